"""The serial engine: every shard in this process, one after the other.

It is the definition of what a pool computes and the tool for debugging a loss
(breakpoints work); the other engines give its bits.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import ExitStack

import cloudpickle
import numpy as np
from threadpoolctl import ThreadpoolController

from instep._frame import FrameWriter
from instep._layout import Layout
from instep._memory import Block
from instep._program import Array, Program, Task
from instep._reduction import average_slots
from instep._seeding import preserved_generators
from instep._shard import Frame, ShardRunner, Slot
from instep._sharding import Batch
from instep._shelf import Shelf
from instep._ship import ship
from instep.engines._base import Done, Event, Failed, Kept

_WORKER = 0


class PrivateMemory:
    """Memory of this process, aligned as shared memory is."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def at_least(self, nbytes: int) -> memoryview:
        """A buffer of `nbytes` or more that starts on a 64-byte boundary."""
        if self._bytes.nbytes < nbytes or not self._bytes.nbytes:
            raw = np.zeros(nbytes + 64, np.uint8)
            self._bytes = raw[-raw.ctypes.data % 64 :]
        return self._bytes.data


class Serial:
    """Computes a shard when asked what happened to it."""

    def __init__(self) -> None:
        self._memory = [PrivateMemory() for _ in range(3)]
        self._params = FrameWriter(self._memory[0])
        self._batch = FrameWriter(self._memory[1])
        self._blocks = [Block.create() for _ in range(2)]
        self.kept_params, self.kept_batches = map(Shelf, self._blocks)
        self._outputs: dict[int, Array] = {}  # of kept frames, by key
        self._task: Task | None = None
        self._kept: Kept | None = None

    def start(self, program: Program, workers: int, threads: int) -> None:
        # Through the pickle, so that a loss which cannot travel fails here too and
        # one that keeps state behaves as it does in a worker.
        self._program: Program = cloudpickle.loads(ship(program))
        self._runner: ShardRunner | None = None
        self._threads = threads

    def publish(self, params: Batch, batch: Batch, layout: Layout) -> int:
        self.lay_out(layout)
        self._refs = self._params.write(params, layout), self._batch.write(batch)
        self._slots = self._memory[2].at_least(layout.nbytes * len(batch.plan.bounds))
        return sum(ref.nbytes for ref in self._refs)

    def lay_out(self, layout: Layout) -> None:
        self._layout = layout

    def idle(self) -> list[int]:
        return [] if self._task else [_WORKER]

    def busy(self) -> list[int]:
        return [_WORKER] if self._task else []

    def submit(self, worker: int, task: Task, kept: Kept | None = None) -> None:
        self._task, self._kept = task, kept

    def wait(self, timeout: float | None) -> list[Event]:
        task, self._task = self._task, None
        if task is None:
            return []
        try:
            return [self._run(task, self._kept)]
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            return [Failed(_WORKER, error, text)]

    def average(
        self, weights: Sequence[float], keys: Sequence[int] | None = None
    ) -> list[Array | None]:
        if keys is not None:
            kept = [self._outputs.pop(key) for key in keys]
            return average_slots(kept, weights, self._layout)
        size = self._layout.nbytes
        slots = np.frombuffer(self._slots, np.uint8)
        rows = slots[: size * len(weights)].reshape(len(weights), size)
        return average_slots(rows, weights, self._layout)

    def forget(self, key: int) -> None:
        del self._outputs[key]

    def resident(self) -> list[Array]:
        return self._params.resident()

    def resize(self, workers: int) -> None:
        pass  # there is one, this process

    def replace(self, worker: int) -> None:
        self._runner = None

    def abandon(self, *, at_once: bool) -> None:
        self._task = None

    def pids(self) -> tuple[int, ...]:
        return ()

    def interrupt(self) -> None:
        pass  # a loss in this process cannot be interrupted

    def close(self) -> None:
        self._task = None
        for block in self._blocks:
            block.close()

    def _run(self, task: Task, kept: Kept | None) -> Done:
        with ExitStack() as stack:
            stack.enter_context(preserved_generators())
            stack.enter_context(self._program.preserved())
            runner = self._runner or self._start_runner()
            stack.enter_context(self._pools.limit(limits=self._threads))
            answer = runner.run(task, *self._places(task, kept))
        aux = cloudpickle.loads(answer.aux) if answer.aux else None
        return Done(_WORKER, answer.loss, answer.weight, aux, answer.seconds)

    def _start_runner(self) -> ShardRunner:
        self._runner = ShardRunner(self._program, self._threads)
        self._pools = ThreadpoolController()  # once: finding them takes 1 ms
        return self._runner

    def _places(self, task: Task, kept: Kept | None) -> tuple[Frame, Frame, Slot]:
        """Where the shard's parameters and batch lie, and where its outputs go."""
        if kept is None:
            buffers = [memory.at_least(0) for memory in self._memory[:2]]
            params, batch = zip(buffers, self._refs, strict=True)
            return params, batch, (self._slots, task.shard * self._layout.nbytes)
        out = self._outputs[kept.key] = np.zeros(self._layout.nbytes, np.uint8)
        params = self.kept_params.view(kept.params), kept.params
        batch = self.kept_batches.view(kept.batch), kept.batch
        return params, batch, (out.data, 0)
