"""Workers that share no memory with the master: what engines for them have in common.

    master ── programs; tasks with parameters and rows ──> workers
           <── loss, weight and outputs of each shard ─────

Frames, shards and slots are those of the one-machine engine, so the bits are, too; only
that arrays are sent. An engine brings messages to workers and reports back; `Desk` is
the worker's side, the same in all.
"""

from __future__ import annotations

import os
import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from threadpoolctl import threadpool_limits

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
from instep.engines._base import Done, Event, Failed, Kept, Lost, Ready
from instep.engines.processes import worker_environment
from instep.engines.serial import PrivateMemory

START = 0  # the number of the command that brings a program


class Start(NamedTuple):
    """Take this program into use."""

    program: bytes
    threads: int


class Compute(NamedTuple):
    """Compute a shard, with parameters that come beside or are there already."""

    number: int
    task: Task
    params_ref: FrameRef
    batch_ref: FrameRef
    batch: Array


Command = Start | Compute


class Report(NamedTuple):
    """What a worker says.

    Attributes:
        number: of the command it answers.
        answer: (loss, weight, pickled aux, seconds), or a packed error; for START the
            process id.
        outputs: the slot's bytes.
    """

    number: int
    answer: Any
    outputs: Array | None = None


class _Running(NamedTuple):
    """What a worker is doing."""

    number: int
    shard: int | None = None
    key: int | None = None


class _Rows:
    """Where a worker's rows are put together."""

    def __init__(self) -> None:
        self.memory = PrivateMemory()
        self.writer = FrameWriter(self.memory)


class Remote(ABC):
    """The master's side. Subclasses start workers and carry messages."""

    def __init__(self) -> None:
        self._program: Start | None = None
        self._programs = self._workers = 0
        self._loaded: dict[int, int] = {}  # worker -> which of the programs
        self._number = START
        self._oldest = 0
        self._pending: list[Event] = []
        self._running: dict[int, _Running] = {}
        self._idle: dict[int, None] = {}
        self._pids: dict[int, int] = {}
        self._blocks = [Block.create() for _ in range(2)]
        self.kept_params, self.kept_batches = map(Shelf, self._blocks)
        self._memory = PrivateMemory()
        self._params = FrameWriter(self._memory)
        self._cutter, self._rows = Cutter(), dict[int, _Rows]()
        self._published = 0
        self._known: dict[int, int] = {}  # worker -> the call whose parameters it has
        self._outputs: dict[int, Array] = {}  # of a call's shards
        self._kept: dict[int, Array] = {}  # by key
        self._is_closed = False

    # What a transport does

    @abstractmethod
    def _prepare(self, workers: int) -> None:
        """Sees to it that so many workers can be sent to, or raises."""

    @abstractmethod
    def _send(self, worker: int, command: Command, params: Array | None) -> None:
        """Brings a command to a worker."""

    @abstractmethod
    def _collect(self, timeout: float | None) -> list[tuple[int, Report | str]]:
        """Reports of workers, or why they are lost; waits for the first."""

    @abstractmethod
    def _close(self) -> None:
        """Ends the workers."""

    # The engine

    def start(self, program: Program, workers: int, threads: int) -> None:
        self._program = Start(ship(program), threads)
        self._programs += 1
        self._known.clear()
        self._idle.clear()
        self.resize(workers)

    def resize(self, workers: int) -> None:
        self._prepare(workers)
        self._workers = workers
        for worker in range(workers):
            if worker not in self._running:
                self._take_in(worker)

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
        key = None if kept is None else kept.key
        frames = self._frames(worker, task) if kept is None else self._kept_frames(kept)
        params_ref, params, batch_ref, rows = frames
        if kept is not None:
            self._known.pop(worker, None)
        command = Compute(self._number, task, params_ref, batch_ref, rows)
        self._give(worker, command, params, _Running(self._number, task.shard, key))

    def wait(self, timeout: float | None) -> list[Event]:
        if not self._pending:
            for worker, report in self._collect(timeout):
                if isinstance(report, str):
                    self._lose(worker, report)
                else:
                    self._note(worker, report)
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
        """Here, a worker has no more work until it has answered."""
        if worker in self._running:
            self._running[worker] = _Running(-1)

    def abandon(self, *, at_once: bool) -> None:
        self._oldest = self._number + 1
        self._pending = [e for e in self._pending if isinstance(e, Ready | Lost)]

    def pids(self) -> tuple[int, ...]:
        return tuple(self._pids.values())

    def interrupt(self) -> None:
        self._is_closed = True

    def close(self) -> None:
        if self._program is not None:
            self._is_closed, self._program = True, None
            self._pids.clear()
            self._close()
            for block in self._blocks:
                block.close()

    # Messages

    def _take_in(self, worker: int) -> None:
        """The worker has nothing to do: it gets the program, or is idle."""
        if self._loaded.get(worker) == self._programs:
            self._idle[worker] = None
        elif worker < self._workers and self._program is not None:
            self._loaded[worker] = self._programs
            self._give(worker, self._program, None, _Running(START))

    def _give(
        self, worker: int, command: Command, params: Array | None, running: _Running
    ) -> None:
        self._idle.pop(worker, None)
        self._running[worker] = running
        self._send(worker, command, params)

    def _frames(
        self, worker: int, task: Task
    ) -> tuple[FrameRef, Array | None, FrameRef, Array]:
        """Parameters, if the worker does not have them, and the shard's rows."""
        rows = self._rows.setdefault(worker, _Rows())
        bounds = self._call.plan.bounds[task.shard]
        ref = rows.writer.write(self._cutter.piece(self._call, *bounds))
        params = None
        if self._known.get(worker) != self._published:
            self._known[worker] = self._published
            params = _bytes(self._memory, self._params_ref)
        return self._params_ref, params, ref, _bytes(rows.memory, ref)

    def _kept_frames(self, kept: Kept) -> tuple[FrameRef, Array, FrameRef, Array]:
        params = np.asarray(self.kept_params.view(kept.params))
        rows = np.asarray(self.kept_batches.view(kept.batch))
        return kept.params, params, kept.batch, rows

    def _lose(self, worker: int, reason: str) -> None:
        """The worker has ended; the dispatcher asks for another."""
        self._drop(worker)
        self._pending.append(Lost(worker, reason))

    def _drop(self, worker: int) -> None:
        """Nothing is known of this worker's process any more."""
        for known in (self._running, self._idle, self._loaded, self._known, self._pids):
            known.pop(worker, None)

    def _note(self, worker: int, report: Report) -> None:
        running = self._running.pop(worker, _Running(-1))
        if report.number == START and isinstance(report.answer, int):
            self._pids[worker] = report.answer
        self._take_in(worker)
        is_wanted = report.number == running.number
        is_wanted &= report.number >= self._oldest or report.number == START
        if not is_wanted or isinstance(report.answer, int):
            self._pending.append(Ready(worker))
        elif isinstance(report.answer, bytes):
            error = unpack_error(report.answer)
            self._pending.append(Failed(worker, *error, report.number == START))
        else:
            self._pending.append(self._done(worker, running, report))

    def _done(self, worker: int, running: _Running, report: Report) -> Event:
        loss, weight, aux, seconds = report.answer
        outputs = np.empty(0, np.uint8) if report.outputs is None else report.outputs
        if running.key is not None:
            self._kept[running.key] = outputs
        elif running.shard is not None:
            self._outputs.setdefault(running.shard, outputs)
        try:
            value = pickle.loads(aux) if aux else None
        except Exception as error:  # a class that only the worker could import
            text = "".join(traceback.format_exception(error))
            return Failed(worker, error, text)
        return Done(worker, loss, weight, value, seconds)


class Desk:
    """The worker's side."""

    def __init__(self) -> None:
        self._params, self._batch = PrivateMemory(), PrivateMemory()
        self._slot = PrivateMemory()

    def carry_out(self, command: Command, params: Array | None) -> Report:
        """What the command asks for, or the error that it ended with."""
        number = command.number if isinstance(command, Compute) else START
        try:
            if isinstance(command, Compute):
                return self._compute(command, params)
            return self._start(command)
        except BaseException as error:
            return Report(number, pack_error(error))

    def _start(self, command: Start) -> Report:
        os.environ.update(worker_environment(command.threads))
        program = cloudpickle.loads(command.program)
        self._limits = threadpool_limits(limits=command.threads)
        self._runner = ShardRunner(program, command.threads)
        return Report(START, os.getpid())

    def _compute(self, command: Compute, params: Array | None) -> Report:
        if params is not None:
            _fill(self._params, params)
        _fill(self._batch, command.batch)
        of_params: Frame = self._params.at_least(0), command.params_ref
        of_batch: Frame = self._batch.at_least(0), command.batch_ref
        gradient = command.task.gradient
        nbytes = self._runner.layout(of_params).nbytes if gradient else 0
        slot = self._slot.at_least(nbytes)
        answer = self._runner.run(command.task, of_params, of_batch, (slot, 0))
        outputs = np.asarray(slot)[:nbytes] if nbytes else None
        return Report(command.number, tuple(answer), outputs)


def _fill(memory: PrivateMemory, content: Array) -> None:
    np.copyto(np.asarray(memory.at_least(content.nbytes))[: content.nbytes], content)


def _bytes(memory: PrivateMemory, ref: FrameRef) -> Array:
    return np.asarray(memory.at_least(0))[: ref.nbytes]
