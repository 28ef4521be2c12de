"""The MPI engine: rank 0 runs the script, the other ranks are its workers.

    mpirun -n 9 instep run --engine mpi train.py

Ranks are started by MPI's own launcher and end with its job; an engine of a pool talks
to those that `instep run` has told to serve. Messages go by mpi4py's pickle 5 layer:
arrays are sent from where they lie, of any length. Nobody spins while waiting.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from instep._errors import EngineUnavailableError, PoolClosedError
from instep._program import Array
from instep.engines._remote import Command, Desk, Remote, Report, Start

_TO_RANK, _TO_MASTER = 71, 72  # tags
# How long a waiting rank looks for a message without a break, and then in between.
_LOOK_S, _PAUSE_S, _LONG_PAUSE_S = 2e-4, 5e-5, 1e-3
_LONG_S = 0.05

_engines = itertools.count()
_is_serving = False  # this job's other ranks


class _Letter(NamedTuple):
    """A message to a rank.

    Attributes:
        engine: whose; None: the script has ended.
        command: None: the engine is closed.
    """

    engine: int | None
    command: Command | None = None
    params: Array | None = None


class Mpi(Remote):
    """Workers that are ranks of the MPI job this process is rank 0 of.

    Raises:
        EngineUnavailableError: mpi4py is missing, this is no job of at least two ranks,
            or it was not started by `instep run`.
    """

    def __init__(self) -> None:
        self._comm = _world()
        self._size = self._comm.Get_size()
        if self._size < 2 or not _is_serving:
            raise EngineUnavailableError(
                f"engine='mpi' in a job of {self._size} ranks"
                + ("" if _is_serving else " that serve nobody")
                + "; start the script by: mpirun -n 9 instep run --engine mpi script.py"
            )
        self._id = next(_engines)
        super().__init__()

    def pids(self) -> tuple[int, ...]:
        return ()  # of other machines they say nothing

    def _prepare(self, workers: int) -> None:
        if workers >= self._size:
            raise EngineUnavailableError(
                f"workers={workers} in a job of {self._size} ranks, of which rank 0 "
                f"runs the script; use at most {self._size - 1}"
            )

    def _send(self, worker: int, command: Command, params: Array | None) -> None:
        self._post(worker + 1, _Letter(self._id, command, params))

    def _post(self, rank: int, letter: _Letter) -> None:
        self._comm.send(letter, dest=rank, tag=_TO_RANK)

    def _collect(self, timeout: float | None) -> list[tuple[int, Report | str]]:
        limit = None if timeout is None else time.monotonic() + timeout
        if not _wait(self._comm, _TO_MASTER, limit, lambda: self._is_closed):
            if self._is_closed:
                raise PoolClosedError("the pool was closed during this call")
            return []
        found: list[tuple[int, Report | str]] = []
        while self._comm.iprobe(tag=_TO_MASTER):
            status = _mpi().Status()
            engine, report = self._comm.recv(tag=_TO_MASTER, status=status)
            if engine == self._id:  # else of a pool that is closed
                found.append((status.Get_source() - 1, report))
        return found

    def _close(self) -> None:
        for rank in range(1, self._size):
            self._post(rank, _Letter(self._id))


def is_master() -> bool:
    """Whether this process is rank 0."""
    return bool(_world().Get_rank() == 0)


def num_workers() -> int:
    """The other ranks."""
    return max(1, int(_world().Get_size()) - 1)


def begin_serving() -> None:
    """The other ranks of this job serve from now on."""
    global _is_serving
    _is_serving = True


def end_serving() -> None:
    """The script has ended: the other ranks may, too."""
    comm = _world()
    for rank in range(1, comm.Get_size()):
        comm.send(_Letter(None), dest=rank, tag=_TO_RANK)


def serve() -> None:
    """Carries out commands of rank 0 until the script has ended."""
    comm, desks = _world(), dict[int, Desk]()
    while True:
        _wait(comm, _TO_RANK, None, lambda: False)
        engine, command, params = comm.recv(source=0, tag=_TO_RANK)
        if engine is None:
            return
        if command is None:
            desks.pop(engine, None)
            continue
        if isinstance(command, Start):
            desks[engine] = Desk()
        report = desks[engine].carry_out(command, params)
        comm.send((engine, report), dest=0, tag=_TO_MASTER)


def _wait(
    comm: Any, tag: int, limit: float | None, is_over: Callable[[], bool]
) -> bool:
    """Waits for a message, asleep most of the time; False: too late, or over."""
    begin = time.monotonic()
    while not comm.iprobe(tag=tag):
        now = time.monotonic()
        if is_over() or (limit is not None and now >= limit):
            return False
        if now - begin < _LOOK_S:
            os.sched_yield()
        else:
            time.sleep(_PAUSE_S if now - begin < _LONG_S else _LONG_PAUSE_S)
    return True


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EngineUnavailableError(
            f"engine='mpi' needs mpi4py and an MPI library ({error}); "
            "pip install 'instep[mpi]' brings both"
        ) from error
    return MPI


def _world() -> Any:
    """The job, with messages of any length."""
    world = _mpi().COMM_WORLD
    from mpi4py.util import pkl5

    return pkl5.Intracomm(world)
