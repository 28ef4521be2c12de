"""The MPI engine: rank 0 runs the script, the other ranks are its workers.

    mpirun -n 9 instep run train.py

    rank 0: script ── Processes ──> the workers of its machine's ranks
       └── letters ──> first rank of each other machine: a station ──> its workers

Ranks are started by MPI's own launcher and end with its job. A worker is a process of
its own on the cores of its rank, started by the first rank of its machine; so a worker
that dies is replaced, and the ranks, which only relay, always answer. Nobody spins.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from instep._errors import EngineUnavailableError, PoolClosedError, WorkerLostError
from instep._partials import Node
from instep._program import Array
from instep.engines._average import MASTER, Combining, assembled, parts_for
from instep.engines._base import Event
from instep.engines._letters import Letter, Letters, Pause
from instep.engines._machines import Machines
from instep.engines._orders import Average, Close, Part, Trouble, Word
from instep.engines._station import Station
from instep.engines.processes import Processes

# How often a station says that it is there.
BEAT_S = 2.0
# It is gone when nothing is heard of it for so long.
SILENCE_S = 12.0

# How long a rank sleeps at a time whose machine has another for its station.
_REST_S = 0.1

# Programs of Open MPI and MPICH that start ranks, and wait for them.
_LAUNCHERS = ("prterun", "mpirun", "orterun", "mpiexec", "mpiexec.hydra")

_engines = itertools.count()
_is_serving = False  # this job's other ranks


class _Rank(NamedTuple):
    """Where a rank runs.

    Attributes:
        station: the first rank of its machine.
        host: the machine's name.
        cores: that it may use.
    """

    station: int
    host: str
    cores: frozenset[int]


class Mpi(Machines):
    """Workers for the ranks of the MPI job that this process is rank 0 of.

    Raises:
        EngineUnavailableError: mpi4py is missing, this is no job of at least two ranks,
            or it was not started by `instep run`.
    """

    def __init__(self) -> None:
        size = _mpi().COMM_WORLD.Get_size()
        if size < 2 or not _is_serving:
            raise EngineUnavailableError(
                f"engine='mpi' in a job of {size} ranks"
                + ("" if _is_serving else " that serve nobody")
                + "; start the script by: mpirun -n 9 instep run script.py"
            )
        self._id = next(_engines)
        self._ranks, self._letters = _ranks(), _letters()
        super().__init__(Processes())

    def publish(self, *call: Any) -> int:
        nbytes = super().publish(*call)
        self._flush()  # the script may write to its parameters afterwards
        return nbytes

    def abandon(self, *, at_once: bool) -> None:
        super().abandon(at_once=at_once)
        self._flush()

    def _placed(self, workers: int) -> dict[int, int]:
        if workers >= len(self._ranks):
            raise EngineUnavailableError(
                f"workers={workers} in a job of {len(self._ranks)} ranks, of which "
                f"rank 0 runs the script; use at most {len(self._ranks) - 1}"
            )
        return {worker: self._ranks[worker + 1].station for worker in range(workers)}

    def _cores(self, workers: Sequence[int]) -> dict[int, set[int]]:
        sets = {worker: set(self._ranks[worker + 1].cores) for worker in workers}
        # Ranks that are bound to nothing have all cores of the machine in common.
        return sets if len(set(map(frozenset, sets.values()))) > 1 else {}

    def _where(self, worker: int) -> str:
        return f"rank {worker + 1} on {self._ranks[worker + 1].host}"

    def _tell(self, station: int, message: Any, *arrays: Array) -> None:
        if _is_serving:  # else the script has ended, and the ranks with it
            self._letters.post(station, (self._id, message), *arrays)

    def _listen(self, timeout: float | None) -> list[Event | Word | Trouble]:
        if not self._stations():
            return [*self._waited(timeout)]
        limit = None if timeout is None else time.monotonic() + timeout
        pause, watch = Pause(), self._watch()
        while True:
            heard: list[Event | Word | Trouble] = [*self._waited(0)]
            for letter in self._inbox():
                heard.extend(letter.text)
            if heard or (limit is not None and time.monotonic() >= limit):
                return heard
            watch.look()
            self._letters.rest(pause)

    def _waited(self, timeout: float | None) -> list[Event]:
        """What has happened on this machine."""
        if self._is_closed:
            raise PoolClosedError("the pool was closed during this call")
        assert self._home is not None
        return self._home.wait(timeout) if self._staff_of(MASTER) else []

    def _inbox(self) -> list[Letter]:
        """Letters to this engine."""
        self._receive()
        return _boxes.pop(self._id, [])

    def _receive(self) -> None:
        """Takes letters in, to whichever engine."""
        while letter := self._letters.receive(_room):
            engine, text = letter.text
            _boxes[engine].append(letter._replace(text=text))

    def _watch(self) -> _Watch:
        """From now on stations have to be heard of."""
        watch = _Watch(sorted(self._stations()), self._ranks, self._letters)
        self._letters.meanwhile = watch.look
        return watch

    def _flush(self) -> None:
        """Waits until all messages have left."""
        if _gone or not self._letters.is_sending():
            return  # those to a machine that is gone will not
        watch = self._watch()

        def look() -> None:
            self._receive()
            watch.look()

        self._letters.flush(look)

    def _combine(self, order: Average, nodes: Mapping[Node, Array]) -> Array:
        assert self._layout is not None
        layout = self._layout.working
        for station in order.shares:
            if station != MASTER:
                self._tell(station, order)
        mine = Combining(order, MASTER, layout)
        for node, array in nodes.items():
            mine.take(node, array[mine.start : mine.stop])
        for owner, part, array in parts_for(order, MASTER, nodes):
            self._tell(owner, part, array)
        parts, pause, watch = dict[int, Array](), Pause(), self._watch()
        while not mine.is_complete or len(parts) < len(order.owners) - 1:
            for letter in self._inbox():
                self._take_letter(letter, order.number, mine, parts)
                pause.reset()
            if self._is_closed:
                raise PoolClosedError("the pool was closed during this call")
            watch.look()
            self._letters.rest(pause)
        self._flush()
        return assembled(order, {**parts, 0: mine.result()}, mine.present(), layout)

    def _take_letter(
        self, letter: Letter, number: int, mine: Combining, parts: dict[int, Array]
    ) -> None:
        part = letter.text
        if not isinstance(part, Part):
            for heard in part:
                self._note(heard)
        elif part.number == number and part.node is None:
            parts[part.start] = np.asarray(letter.content)
        elif part.number == number and part.node is not None:
            mine.take(part.node, np.asarray(letter.content))


class _Watch:
    """Looks whether stations are still heard of; they always say something."""

    def __init__(
        self, stations: Sequence[int], ranks: Sequence[_Rank], letters: Letters
    ) -> None:
        self._stations, self._ranks, self._letters = stations, ranks, letters
        self._heard = dict.fromkeys(stations, time.monotonic())

    def look(self) -> None:
        """Looks.

        Raises:
            WorkerLostError: nothing was heard of one for too long.
        """
        now = time.monotonic()
        self._heard.update(dict.fromkeys(self._letters.beats(), now))
        for station in self._stations:
            if self._heard[station] <= now - SILENCE_S:
                _gone.add(station)
                raise WorkerLostError(
                    f"rank {station} on {self._ranks[station].host} has not been heard "
                    f"of for {SILENCE_S:.0f} s; the machine may be down, or cut off. A "
                    "job of MPI cannot go on without it: start it again from the last "
                    "checkpoint"
                )


class _Rooms:
    """The stations of one rank: one for each engine of the master."""

    def __init__(self, me: int, letters: Letters) -> None:
        self._me, self._letters, self._beaten = me, letters, time.monotonic()
        letters.meanwhile = self.beat
        self._stations: dict[int, Station] = {}

    def room(self, text: Any, nbytes: int) -> memoryview:
        """Where the bytes of a letter go."""
        engine, message = text
        return self._station(engine).room(message, nbytes)

    def take(self, letter: Letter) -> None:
        """Carries out what a letter says."""
        engine, message = letter.text
        if isinstance(message, Close):
            self.close(engine)
        else:
            self._station(engine).carry_out(message, letter.content)

    def hear(self) -> bool:
        """Tells the master what has happened; whether anything has."""
        has_heard = False
        for engine, station in self._stations.items():
            if words := station.hear(0):
                has_heard = True
                self._letters.post(MASTER, (engine, words))
        self.beat()
        return has_heard

    def beat(self) -> None:
        """Tells the master now and then that this rank is there."""
        if time.monotonic() - self._beaten > BEAT_S:
            self._beaten = time.monotonic()
            self._letters.beat(MASTER)

    def close(self, *engines: int) -> None:
        """Ends the workers of these engines, or of all."""
        for engine in engines or list(self._stations):
            station = self._stations.pop(engine, None)
            if station is not None:
                station.close()

    def _station(self, engine: int) -> Station:
        if engine not in self._stations:

            def post(to: int, message: Any, arrays: Sequence[Array]) -> None:
                self._letters.post(to, (engine, message), *arrays)

            self._stations[engine] = Station(self._me, post)
        return self._stations[engine]


def is_master() -> bool:
    """Whether this process is rank 0."""
    return bool(_mpi().COMM_WORLD.Get_rank() == 0)


def num_workers() -> int:
    """The other ranks."""
    return max(1, int(_mpi().COMM_WORLD.Get_size()) - 1)


def begin_serving() -> None:
    """The other ranks of this job serve from now on."""
    global _is_serving
    _ranks()
    _is_serving = True


def end_serving() -> None:
    """The script has ended: the other ranks may, too."""
    global _is_serving
    _is_serving = False
    if _gone:
        _end_at_once()
    for rank in range(1, _mpi().COMM_WORLD.Get_size()):
        _letters().post(rank, None)
    _letters().flush()


def _end_at_once() -> None:
    """Ends the job, of which a part does not answer: all others would wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(1)  # the launcher passes on what was said
    launcher = os.getppid()
    name = Path(f"/proc/{launcher}/comm").read_text().strip()
    if name in _LAUNCHERS:  # it waits, too, after an abort; without it the ranks end
        os.kill(launcher, signal.SIGKILL)
        os._exit(1)
    _mpi().COMM_WORLD.Abort(1)


def serve() -> None:
    """Serves rank 0 until the script has ended; an error ends the job."""
    me = _mpi().COMM_WORLD.Get_rank()
    rooms = _Rooms(me, _letters())
    try:
        if _ranks()[me].station == me:
            _relay(rooms)
        else:
            _wait_for_the_end()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        rooms.close()
        _mpi().COMM_WORLD.Abort(1)
    finally:
        rooms.close()


def _relay(rooms: _Rooms) -> None:
    pause = Pause()
    while True:
        letter = _letters().receive(rooms.room)
        if letter is not None and letter.text is None:
            return
        if letter is not None:
            rooms.take(letter)
        if rooms.hear() or letter is not None:
            pause.reset()
        else:
            _letters().rest(pause)


def _wait_for_the_end() -> None:
    while _letters().receive(_room) is None:
        time.sleep(_REST_S)


# Letters to engines that are not listening just now.
_boxes: dict[int, list[Letter]] = defaultdict(list)
_gone: set[int] = set()  # stations that are not heard of any more


def _room(text: Any, nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data


@cache
def _ranks() -> list[_Rank]:
    """All ranks of the job; each has to ask."""
    mpi = _mpi()
    world = mpi.COMM_WORLD
    machine = world.Split_type(mpi.COMM_TYPE_SHARED)
    # Ranks of one machine may be told to behave as if they were on several.
    name = os.environ.get("INSTEP_MACHINE", "")
    others = machine.allgather((name, world.Get_rank()))
    machine.Free()
    first = min(rank for other, rank in others if other == name)
    cores = frozenset(os.sched_getaffinity(0))
    return list(world.allgather(_Rank(first, os.uname().nodename, cores)))


@cache
def _letters() -> Letters:
    return Letters(_mpi())


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EngineUnavailableError(
            f"engine='mpi' needs mpi4py and an MPI library ({error}); "
            "pip install 'instep[mpi]' brings both"
        ) from error
    return MPI
