"""Workers on several machines: the master's end.

    master ──┬── Processes: the workers beside it, if any
             └── orders ──> station of each other machine ──> Processes: its workers

Frames, shards, slots and the tree are those of the one-machine engine, and the workers
of each machine are one such engine, so the bits are the same. Outputs stay where they
were computed until they are averaged. How messages travel is the subclass's business.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from instep._errors import OutputsLostError
from instep._exceptions import unpack_error, with_origin
from instep._frame import FrameRef
from instep._layout import Layout
from instep._partials import Node
from instep._pieces import Cutter
from instep._program import Array, Program, Task
from instep._reduction import present_views
from instep._sharding import Batch
from instep._shelf import Shelf
from instep._ship import ship
from instep.engines._average import MASTER, nodes_of, parts_of, plan, shares_of
from instep.engines._base import Done, Event, Failed, Kept, Lost, Ready
from instep.engines._holdings import GONE, Held, Holdings
from instep.engines._orders import (
    Average,
    Close,
    Compute,
    Forget,
    LayOut,
    PackedError,
    Params,
    Replace,
    Staff,
    Start,
    Trouble,
    Word,
)
from instep.engines.processes import Processes


class Errand(NamedTuple):
    """What a worker elsewhere computes.

    Attributes:
        shard: of the call; None: kept frames.
        key: of its outputs.
        rows: the frame that was made for it.
        is_wanted: whether its call still waits for it.
    """

    shard: int | None
    key: int
    rows: FrameRef | None
    is_wanted: bool = True


class Machines(ABC):
    """Workers of stations, and of this machine, under one set of numbers."""

    passes_on = True  # stations can tell each other something

    def __init__(self, home: Processes | None) -> None:
        self._home = home
        self._places: dict[int, int] = {}  # worker -> station
        self._workers = self._number = self._version = self._key = 0
        self._programs = 0
        self._program: Program | None = None
        self._pending: list[Event] = []
        self._expected: dict[int, int] = {}  # worker -> the last order about it
        self._idle: dict[int, None] = {}  # elsewhere
        self._errands: dict[int, Errand] = {}
        self._pids: dict[int, int] = {}
        self._holdings = Holdings()
        self._started: set[int] = set()  # stations
        self._layout: Layout | None = None
        self._layouts: dict[int, Layout] = {}  # that stations know
        self._frames: dict[tuple[int, int], int] = {}  # (station, base) -> version
        self._cutter = Cutter()
        self._is_closed = False

    # What a transport does

    @abstractmethod
    def _placed(self, workers: int) -> dict[int, int]:
        """Where workers of these numbers are to run: worker -> station."""

    @abstractmethod
    def _tell(self, station: int, message: Any, *arrays: Array) -> None:
        """Sends a message; the arrays stay as they are until it is answered."""

    @abstractmethod
    def _listen(self, timeout: float | None) -> list[Event | Word | Trouble]:
        """What happened here and elsewhere; waits for it."""

    @abstractmethod
    def _combine(self, order: Average, nodes: Mapping[Node, Array]) -> Array:
        """The result in the working layout; the master's own nodes are given."""

    @abstractmethod
    def _where(self, worker: int) -> str:
        """The place of a worker, for errors."""

    def _cores(self, workers: Sequence[int]) -> dict[int, set[int]]:
        """The cores of those workers that are told theirs."""
        return {}

    # The engine: workers

    def start(self, program: Program, workers: int, threads: int) -> None:
        self._program, self._threads, self._text = program, threads, ship(program)
        self._programs += 1
        self._pending.clear()
        knowledge: list[Any] = [self._idle, self._errands, self._expected, self._pids]
        for known in (*knowledge, self._layouts, self._frames):
            known.clear()
        self._holdings = Holdings()
        self._workers, self._places = workers, self._placed(workers)
        if self._home is not None:
            own = self._staff_of(MASTER)
            self._home.cores = self._cores(own)
            self._home.start_shipped(self._text, program.modules, own, threads)
        for station in self._stations():
            self._start(station)

    def resize(self, workers: int) -> None:
        self._workers = workers
        before, self._places = self._places, self._placed(workers)
        for worker in [w for w in before if w not in self._places]:
            self._drop(worker)
        if self._home is not None:
            self._home.staff(self._staff_of(MASTER))
        known = {station for station in before.values() if station != MASTER}
        for station in known:
            self._restaff(station)
        for station in self._stations() - known:
            self._start(station)

    def idle(self) -> list[int]:
        told = {event.worker for event in self._pending}  # when `wait` has said so
        return [w for w in (*self._own("idle"), *self._idle) if w not in told]

    def busy(self) -> list[int]:
        return [*self._own("busy"), *self._errands]

    def pids(self) -> tuple[int, ...]:
        own = () if self._home is None else self._home.pids()
        return (*own, *self._pids.values())

    def replace(self, worker: int) -> None:
        station = self._places.get(worker)
        if station == MASTER and self._home is not None:
            self._home.replace(worker)
        elif station is not None:
            self._drop(worker)
            self._tell(station, Replace(self._expect(worker), worker))

    def abandon(self, *, at_once: bool) -> None:
        self._pending = [e for e in self._pending if isinstance(e, Lost | Ready)]
        if self._home is not None:
            self._home.abandon(at_once=at_once)
        for worker in list(self._errands) if at_once else ():
            self.replace(worker)
        self._want_no_more(*self._errands)
        self._forget_call()

    def interrupt(self) -> None:
        self._is_closed = True
        if self._home is not None:
            self._home.interrupt()

    def close(self) -> None:
        if self._program is not None:
            self._is_closed, self._program = True, None
            self._pids.clear()
            for station in self._started:
                self._tell(station, Close())
        if self._home is not None:
            self._home.close()

    # The engine: calls

    def publish(self, params: Batch, batch: Batch, layout: Layout) -> int:
        self._forget_call()
        self._call = batch
        nbytes = self._write(params, batch, layout)
        self.lay_out(layout)
        self._version += 1
        if self._stations():
            order = Params(self._params_ref, self._version, self._programs)
            self._spread(order, np.asarray(self._params_at(self._params_ref)))
        return nbytes

    def lay_out(self, layout: Layout) -> None:
        self._layout = layout
        if self._home is not None:
            self._home.lay_out(layout)
        for station in self._stations():
            if self._layouts.get(station) is not layout:
                self._layouts[station] = layout
                self._tell(station, LayOut(layout))

    def submit(self, worker: int, task: Task, kept: Kept | None = None) -> None:
        station = self._places[worker]
        if station == MASTER and self._home is not None:
            self._home.submit(worker, task, kept)
            return
        if kept is None:
            version, rows = self._bring_call(station), self._cut(task.shard)
            self._key -= 1  # below the keys of kept frames
            kept = Kept(self._params_ref, rows, self._key)
            errand = Errand(task.shard, self._key, rows)
        else:
            version = self._bring(station, kept.params)
            errand = Errand(None, kept.key, None)
        del self._idle[worker]
        self._errands[worker] = errand
        order = Compute(self._expect(worker), worker, task, kept, version)
        self._tell(station, order, np.asarray(self.kept_batches.view(kept.batch)))

    def wait(self, timeout: float | None) -> list[Event]:
        if not self._pending:
            for heard in self._listen(timeout):
                self._note(heard)
        events, self._pending = self._pending, []
        return events

    def average(
        self, weights: Sequence[float], keys: Sequence[int] | None = None
    ) -> list[Array | None]:
        if keys is None:  # a late worker may still compute a shard
            self._want_no_more(*self._on_shards())
        held = self._holdings.find(len(weights), keys)
        if self._home is not None and not any(held):
            return self._home.average(weights, keys)
        return self._average(weights, held, keys)

    def forget(self, key: int) -> None:
        if not self._holdings.forget(key) and self._home is not None:
            self._home.forget(key)

    def resident(self) -> list[Array]:
        return [] if self._home is None else self._home.resident()

    # Memory of the master

    @property
    def kept_params(self) -> Shelf:
        return self._shelves()[0]

    @property
    def kept_batches(self) -> Shelf:
        return self._shelves()[1]

    def _shelves(self) -> tuple[Shelf, Shelf]:
        assert self._home is not None
        return self._home.kept_params, self._home.kept_batches

    def _write(self, params: Batch, batch: Batch, layout: Layout) -> int:
        """Writes the parameters of a call, and for this machine's workers its batch."""
        assert self._home is not None
        nbytes = self._home.publish(params, batch, layout)
        self._params_ref = self._home.params_ref
        return nbytes

    def _params_at(self, ref: FrameRef) -> memoryview:
        assert self._home is not None
        return self._home.params_at(ref)

    # Stations

    def _stations(self) -> set[int]:
        """The machines besides this one that have workers."""
        return {station for station in self._places.values() if station != MASTER}

    def _staff_of(self, station: int) -> list[int]:
        return [w for w, place in self._places.items() if place == station]

    def _own(self, what: str) -> list[int]:
        """Workers of this machine that are so."""
        if self._home is None or not self._staff_of(MASTER):
            return []
        found: list[int] = getattr(self._home, what)()
        return found

    def _start(self, station: int) -> None:
        """Has a station start its workers anew, with the program."""
        assert self._program is not None
        self._started.add(station)
        workers = self._staff_of(station)
        self._number += 1
        self._expected.update(dict.fromkeys(workers, self._number))
        order = Start(
            self._number,
            self._programs,
            workers,
            tuple(self._program.modules),
            self._threads,
            os.uname().nodename,
            {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},
            [os.path.abspath(entry) for entry in sys.path],
            self._cores(workers),
        )
        self._tell(station, order, np.frombuffer(self._text, np.uint8))
        if self._layout is not None:
            self._layouts[station] = self._layout
            self._tell(station, LayOut(self._layout))

    def _restaff(self, station: int) -> None:
        workers = self._staff_of(station)
        self._number += 1
        for worker in workers:
            self._expected.setdefault(worker, self._number)
        self._tell(station, Staff(self._number, workers))

    def _lose_station(self, station: int, reason: str) -> None:
        """A machine is gone; its workers are lost, and its outputs."""
        for worker in self._staff_of(station):
            self._drop(worker)
            del self._places[worker]
            self._pending.append(Lost(worker, reason))
        self._holdings.lose(station)
        self._started.discard(station)
        self._layouts.pop(station, None)
        gone = [frame for frame in self._frames if frame[0] == station]
        for frame in gone:
            del self._frames[frame]

    def _expect(self, worker: int) -> int:
        self._number += 1
        self._expected[worker] = self._number
        return self._number

    def _drop(self, worker: int) -> None:
        """Nothing is known of this worker's process any more."""
        self._idle.pop(worker, None)
        self._pids.pop(worker, None)
        self._expected.pop(worker, None)
        errand = self._errands.pop(worker, None)
        if errand is not None:
            self._release(errand)
        self._pending = [e for e in self._pending if e.worker != worker]

    def _release(self, errand: Errand) -> None:
        if errand.rows is not None:
            self.kept_batches.release(errand.rows)

    def _forget_call(self) -> None:
        """Gives up outputs of the last call, and its shards under way."""
        self._want_no_more(*self._on_shards())
        self._holdings.forget_call()
        for station in self._stations():
            if keys := self._holdings.take_spare(station):
                self._tell(station, Forget(keys))

    def _on_shards(self) -> list[int]:
        """Workers who compute a call's shards."""
        return [w for w, errand in self._errands.items() if errand.shard is not None]

    def _want_no_more(self, *workers: int) -> None:
        """What they compute is not wanted any more."""
        for worker in workers:
            self._errands[worker] = self._errands[worker]._replace(is_wanted=False)

    def _cut(self, shard: int) -> FrameRef:
        """A shard's rows, as a frame of their own."""
        bounds = self._call.plan.bounds[shard]
        return self.kept_batches.keep(self._cutter.piece(self._call, *bounds))

    def _bring(self, station: int, ref: FrameRef) -> int:
        """Sees to it that a station has these parameters; returns their version."""
        return self._bring_version(station, ref, self.kept_params.version(ref))

    def _bring_call(self, station: int) -> int:
        """The same with those of the call, where a machine has come since."""
        return self._bring_version(station, self._params_ref, self._version)

    def _bring_version(self, station: int, ref: FrameRef, version: int) -> int:
        if self._frames.get((station, ref.base)) != version:
            self._frames[station, ref.base] = version
            content = np.asarray(self._params_at(ref))
            order = Params(ref, version, self._programs)
            self._tell(station, order, content)
        return version

    def _spread(self, order: Params, content: Array) -> None:
        """Brings parameters to all stations: each gets a part, and passes it on."""
        stations = sorted(self._stations())
        self._frames.update({(s, order.ref.base): order.version for s in stations})
        if not self.passes_on:
            for station in stations:
                self._tell(station, order, content)
            return
        for station, (start, stop), others in parts_of(stations, content.nbytes):
            part = order._replace(start=start, pass_on=others)
            self._tell(station, part, content[start:stop])

    # What is heard

    def _note(self, heard: Event | Word | Trouble) -> None:
        if isinstance(heard, Trouble):
            raise with_origin(*unpack_error(heard.error), "another machine's station")
        if isinstance(heard, Word):
            if self._expected.get(heard.event.worker) == heard.number:
                self._take(heard)
        else:
            self._pending.append(self._placed_event(heard))

    def _take(self, word: Word) -> None:
        event = word.event
        worker = event.worker
        errand = self._errands.pop(worker, None)
        if errand is not None:
            self._release(errand)
        if isinstance(event, Lost):
            self._drop(worker)
            self._pending.append(Lost(worker, f"{event.reason}, {self._where(worker)}"))
            return
        if word.pid:
            self._pids[worker] = word.pid
        if not (isinstance(event, Failed) and event.at_start):
            self._idle[worker] = None
        self._pending.append(self._opened(worker, errand, event))

    def _opened(self, worker: int, errand: Errand | None, event: Event) -> Event:
        """What the pool hears of it."""
        if isinstance(event, Done) and errand is not None:
            held = Held(self._places[worker], errand.key)
            self._holdings.hold(held, errand.shard, is_wanted=errand.is_wanted)
        if errand is not None and not errand.is_wanted:
            return Ready(worker)
        if isinstance(event, Failed) and isinstance(event.error, PackedError):
            error, text = unpack_error(event.error.packed)
            event = replace(event, error=error, text=text)
        if isinstance(event, Done):
            event = self._with_aux(event)
        return self._placed_event(event)

    def _with_aux(self, event: Done) -> Done | Failed:
        try:
            return event._replace(aux=pickle.loads(event.aux) if event.aux else None)
        except Exception as error:  # a class that only the worker could import
            text = "".join(traceback.format_exception(error))
            return Failed(event.worker, error, text)

    def _placed_event(self, event: Event) -> Event:
        """A failure says where it happened."""
        if isinstance(event, Failed):
            return replace(event, where=self._where(event.worker))
        return event

    # Averages

    def _average(
        self,
        weights: Sequence[float],
        held: Sequence[Held | None],
        keys: Sequence[int] | None,
    ) -> list[Array | None]:
        """Averages outputs of which some are elsewhere."""
        assert self._layout is not None
        self._check_there(held)
        places = [MASTER if where is None else where.station for where in held]
        own = list(range(len(held))) if keys is None else keys
        names = [own[k] if where is None else where.key for k, where in enumerate(held)]
        shares = shares_of(places, names, weights)
        nodes: dict[Node, Array] = {}
        if self._home is not None and MASTER in shares:
            nodes = nodes_of(self._home, shares[MASTER], by_key=keys is not None)
        self._number += 1
        order = plan(self._number, shares, weights, self._layout.working)
        result = self._combine(order, nodes)
        self._holdings.drop(held)
        if keys is not None and self._home is not None:
            for key, where in zip(keys, held, strict=True):
                if where is None:
                    self._home.forget(key)
        slot = self._layout.working.convert(result, self._layout)
        return present_views([slot], self._layout, slot)

    def _check_there(self, held: Sequence[Held | None]) -> None:
        """None of them is gone."""
        gone = [where.key for where in held if where and where.station == GONE]
        if gone:
            self._forget_call()
            raise OutputsLostError(
                f"{len(gone)} of {len(held)} outputs were on a machine that is gone",
                gone,
            )
