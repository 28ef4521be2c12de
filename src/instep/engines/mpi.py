"""The MPI engine: rank 0 runs the script, the other ranks are its workers.

    mpirun -n 9 instep run --engine mpi train.py

    rank 0 ── programs, tasks with their parameters and rows ──> ranks 1, 2, ...
           <── loss, weight and outputs of each shard ─────────

Ranks are started by MPI's own launcher and end with its job; an engine of a pool talks
to those that `instep run` has told to serve. Messages go by mpi4py's pickle 5 layer:
arrays are sent from where they lie, of any length. Nobody spins while waiting.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from threadpoolctl import threadpool_limits

from instep._errors import EngineUnavailableError, PoolClosedError
from instep._exceptions import pack_error, unpack_error
from instep._frame import FrameRef, FrameWriter
from instep._layout import Layout
from instep._memory import Block
from instep._pieces import Cutter
from instep._program import Array, Program, Task
from instep._reduction import average_slots
from instep._shard import Frame, ShardRunner
from instep._sharding import Batch
from instep._shelf import Shelf
from instep._ship import ship
from instep.engines._base import Done, Event, Failed, Kept, Ready
from instep.engines.processes import worker_environment
from instep.engines.serial import PrivateMemory

_TO_RANK, _TO_MASTER = 71, 72  # tags
# How long a waiting rank looks for a message without a break, and then in between.
_LOOK_S, _PAUSE_S, _LONG_PAUSE_S = 2e-4, 5e-5, 1e-3
_LONG_S = 0.05

_engines = itertools.count()
_is_serving = False  # this job's other ranks


class _Start(NamedTuple):
    """Take this program into use, for an engine."""

    engine: int
    program: bytes
    threads: int


class _Compute(NamedTuple):
    """Compute a shard. `params` is None where the rank has them already."""

    engine: int
    number: int
    task: Task
    params_ref: FrameRef
    params: Array | None
    batch_ref: FrameRef
    batch: Array


class _End(NamedTuple):
    """Forget an engine; None: the job is done."""

    engine: int | None


class _Report(NamedTuple):
    """What a rank says.

    Attributes:
        number: of the command it answers; 0: to a program.
        answer: (loss, weight, pickled aux, seconds), or a packed error.
        outputs: the slot's bytes.
    """

    engine: int
    number: int
    answer: Any
    outputs: Array | None = None


class Mpi:
    """Workers that are ranks of the MPI job this process is rank 0 of.

    Raises:
        EngineUnavailableError: mpi4py is missing, this is no job of at least two ranks,
            or it was not started by `instep run`.
    """

    def __init__(self) -> None:
        self._comm = _world()
        size = self._comm.Get_size()
        if size < 2 or not _is_serving:
            raise EngineUnavailableError(
                f"engine='mpi' in a job of {size} ranks"
                + ("" if _is_serving else " that serve nobody")
                + "; start the script by: mpirun -n 9 instep run --engine mpi script.py"
            )
        self._id = next(_engines)
        self._start: _Start | None = None
        self._programs = self._workers = 0
        self._loaded: dict[int, int] = {}  # worker -> which of the programs
        self._size = size
        self._number = 0
        self._oldest = 0
        self._pending: list[Event] = []
        self._running: dict[int, _Running] = {}
        self._idle: dict[int, None] = {}
        self._blocks = [Block.create() for _ in range(2)]
        self.kept_params, self.kept_batches = map(Shelf, self._blocks)
        self._memory = PrivateMemory()
        self._params = FrameWriter(self._memory)
        self._cutter, self._rows = Cutter(), dict[int, _Rows]()  # by worker
        self._published = 0
        self._known: dict[int, int] = {}  # rank -> the call whose parameters it has
        self._outputs: dict[int, Array] = {}  # of a call's shards
        self._kept: dict[int, Array] = {}  # by key
        self._is_closed = False

    def start(self, program: Program, workers: int, threads: int) -> None:
        self._start = _Start(self._id, ship(program), threads)
        self._programs += 1
        self._known.clear()
        self._idle.clear()
        self._workers = 0
        self.resize(workers)

    def resize(self, workers: int) -> None:
        if workers >= self._size:
            raise EngineUnavailableError(
                f"workers={workers} in a job of {self._size} ranks, of which rank 0 "
                f"runs the script; use at most {self._size - 1}"
            )
        self._workers = workers
        for worker in range(workers):
            if worker not in self._running:
                self._take_in(worker)

    def _take_in(self, worker: int) -> None:
        """The rank has nothing to do: it gets the program, or is idle."""
        if self._loaded.get(worker) == self._programs:
            self._idle[worker] = None
        elif worker < self._workers:
            self._loaded[worker] = self._programs
            self._send(worker, self._start, _Running(0, None, None))

    def publish(self, params: Batch, batch: Batch, layout: Layout) -> int:
        self._oldest = self._number + 1
        self._published += 1
        self._outputs.clear()
        self.lay_out(layout)
        self._params_ref, self._call = self._params.write(params, layout), batch
        return self._params_ref.nbytes

    def lay_out(self, layout: Layout) -> None:
        self._layout = layout

    def idle(self) -> list[int]:
        return [worker for worker in self._idle if worker < self._workers]

    def busy(self) -> list[int]:
        return list(self._running)

    def submit(self, worker: int, task: Task, kept: Kept | None = None) -> None:
        self._number += 1
        frames = self._frames(worker, task) if kept is None else self._kept_frames(kept)
        key = None if kept is None else kept.key
        running = _Running(self._number, task.shard, key)
        if kept is not None:
            self._known.pop(worker, None)
        self._send(worker, _Compute(self._id, self._number, task, *frames), running)

    def wait(self, timeout: float | None) -> list[Event]:
        if not self._pending:
            self._receive(timeout)
        events, self._pending = self._pending, []
        return events

    def average(
        self, weights: Sequence[float], keys: Sequence[int] | None = None
    ) -> list[Array | None]:
        if keys is None:
            self._oldest = self._number + 1
            slots = [self._outputs[shard] for shard in range(len(weights))]
        else:
            slots = [self._kept.pop(key) for key in keys]
        return average_slots(slots, weights, self._layout)

    def forget(self, key: int) -> None:
        del self._kept[key]

    def resident(self) -> list[Array]:
        return self._params.resident()

    def replace(self, worker: int) -> None:
        """A rank cannot be replaced; it has no more work until it has answered."""
        if worker in self._running:
            self._running[worker] = self._running[worker]._replace(number=-1)

    def abandon(self, *, at_once: bool) -> None:
        self._oldest = self._number + 1
        self._pending = [e for e in self._pending if isinstance(e, Ready)]

    def pids(self) -> tuple[int, ...]:
        return ()  # on other machines they say nothing

    def interrupt(self) -> None:
        self._is_closed = True

    def close(self) -> None:
        if self._start is not None:
            self._is_closed, self._start = True, None
            for rank in range(1, self._size):
                self._comm.send(_End(self._id), dest=rank, tag=_TO_RANK)
            for block in self._blocks:
                block.close()

    # Messages

    def _frames(self, worker: int, task: Task) -> _Frames:
        """Parameters, if the rank does not have them, and the shard's rows."""
        rows = self._rows.setdefault(worker, _Rows())
        bounds = self._call.plan.bounds[task.shard]
        ref = rows.writer.write(self._cutter.piece(self._call, *bounds))
        params = None
        if self._known.get(worker) != self._published:
            self._known[worker] = self._published
            params = _bytes(self._memory, self._params_ref)
        return self._params_ref, params, ref, _bytes(rows.memory, ref)

    def _kept_frames(self, kept: Kept) -> _Frames:
        params = np.asarray(self.kept_params.view(kept.params))
        return (
            kept.params,
            params,
            kept.batch,
            np.asarray(self.kept_batches.view(kept.batch)),
        )

    def _send(self, worker: int, message: Any, running: _Running) -> None:
        self._idle.pop(worker, None)
        self._running[worker] = running
        self._comm.send(message, dest=worker + 1, tag=_TO_RANK)

    def _receive(self, timeout: float | None) -> None:
        """Waits for a report and takes all that are there."""
        limit = None if timeout is None else time.monotonic() + timeout
        if not _wait(self._comm, _TO_MASTER, limit, lambda: self._is_closed):
            if self._is_closed:
                raise PoolClosedError("the pool was closed during this call")
            return
        while self._comm.iprobe(tag=_TO_MASTER):
            status = _mpi().Status()
            report = self._comm.recv(tag=_TO_MASTER, status=status)
            if report.engine == self._id:  # else of a pool that is closed
                self._note(status.Get_source() - 1, report)

    def _note(self, worker: int, report: _Report) -> None:
        running = self._running.pop(worker, _Running(-1, None, None))
        self._take_in(worker)
        is_wanted = report.number == running.number
        is_wanted &= report.number >= self._oldest or report.number == 0
        if isinstance(report.answer, bytes):
            error = unpack_error(report.answer)
            at_start = report.number == 0
            if is_wanted:
                self._pending.append(Failed(worker, *error, at_start))
        elif report.number == 0 or not is_wanted:
            self._pending.append(Ready(worker))
        else:
            self._pending.append(self._done(worker, running, report))

    def _done(self, worker: int, running: _Running, report: _Report) -> Event:
        loss, weight, aux, seconds = report.answer
        outputs = np.empty(0, np.uint8) if report.outputs is None else report.outputs
        if running.key is not None:
            self._kept[running.key] = outputs
        elif running.shard is not None:
            self._outputs.setdefault(running.shard, outputs)
        try:
            value = pickle.loads(aux) if aux else None
        except Exception as error:  # a class that only the rank could import
            text = "".join(traceback.format_exception(error))
            return Failed(worker, error, text)
        return Done(worker, loss, weight, value, seconds)


_Frames = tuple[FrameRef, Array | None, FrameRef, Array]


class _Rows:
    """Where a worker's rows are put together."""

    def __init__(self) -> None:
        self.memory = PrivateMemory()
        self.writer = FrameWriter(self.memory)


class _Running(NamedTuple):
    """What a rank is doing."""

    number: int
    shard: int | None
    key: int | None


# The other ranks


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
        comm.send(_End(None), dest=rank, tag=_TO_RANK)


def serve() -> None:
    """Carries out commands of rank 0 until the script has ended."""
    comm, desks = _world(), dict[int, _Desk]()
    while True:
        _wait(comm, _TO_RANK, None, lambda: False)
        message = comm.recv(source=0, tag=_TO_RANK)
        if isinstance(message, _End) and message.engine is None:
            return
        if isinstance(message, _Start):
            desks[message.engine] = _Desk()
        reply = _carry_out(desks, message)
        if reply is not None:
            comm.send(reply, dest=0, tag=_TO_MASTER)


def _carry_out(desks: dict[int, _Desk], message: Any) -> _Report | None:
    if isinstance(message, _End):
        desks.pop(message.engine or 0, None)
        return None
    number = message.number if isinstance(message, _Compute) else 0
    desk = desks[message.engine]
    try:
        if isinstance(message, _Start):
            desk.start(message)
            return _Report(message.engine, 0, None)
        return desk.compute(message)
    except BaseException as error:
        return _Report(message.engine, number, pack_error(error))


class _Desk:
    """A rank's view of one engine."""

    def __init__(self) -> None:
        self._params, self._batch = PrivateMemory(), PrivateMemory()
        self._slot = PrivateMemory()

    def start(self, message: _Start) -> None:
        os.environ.update(worker_environment(message.threads))
        program = cloudpickle.loads(message.program)
        self._limits = threadpool_limits(limits=message.threads)
        self._runner = ShardRunner(program, message.threads)

    def compute(self, command: _Compute) -> _Report:
        if command.params is not None:
            _fill(self._params, command.params)
        _fill(self._batch, command.batch)
        params: Frame = self._params.at_least(0), command.params_ref
        batch: Frame = self._batch.at_least(0), command.batch_ref
        nbytes = self._runner.layout(params).nbytes if command.task.gradient else 0
        slot = self._slot.at_least(nbytes)
        answer = self._runner.run(command.task, params, batch, (slot, 0))
        outputs = np.asarray(slot)[:nbytes] if nbytes else None
        return _Report(command.engine, command.number, tuple(answer), outputs)


def _fill(memory: PrivateMemory, content: Array) -> None:
    np.copyto(np.asarray(memory.at_least(content.nbytes))[: content.nbytes], content)


def _bytes(memory: PrivateMemory, ref: FrameRef) -> Array:
    return np.asarray(memory.at_least(0))[: ref.nbytes]


def _wait(comm: Any, tag: int, limit: float | None, is_over: Any) -> bool:
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
    with contextlib.suppress(ImportError):
        from mpi4py.util import pkl5

        return pkl5.Intracomm(world)
    return world
