"""Computes one shard: seed, read, compute, check, store. The same in every engine."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from instep._errors import LossError
from instep._frame import RESIDENT, FrameReader, FrameRef
from instep._layout import Layout, store
from instep._program import Array, Program, Task
from instep._seeding import seed_python


class Answer(NamedTuple):
    """What a shard gave besides the arrays in its slot.

    Attributes:
        loss: numpy scalar.
        weight: what the shard counts for.
        aux: pickled aux; empty where it is None.
        seconds: time the loss and its gradient took.
    """

    loss: Any
    weight: float
    aux: bytes
    seconds: float


Frame = tuple[memoryview, FrameRef]
Slot = tuple[memoryview, int]


class _Views(NamedTuple):
    """All that a shard reads, as trees of views of the memory."""

    place: Any  # what the views depend on
    arguments: tuple[Any, ...]
    parameters: Any
    layout: Layout


class _Outputs(NamedTuple):
    """Where a shard writes, as views of its slot."""

    layout: Layout
    memory: Any  # grown, it may be another
    slot: int
    arrays: list[Array]
    present: Array


class ShardRunner:
    """Runs shards of one program, one after the other."""

    def __init__(self, program: Program, threads: int) -> None:
        self._program = program
        self._params, self._batch = FrameReader(), FrameReader()
        self._kept_params, self._kept_batch = FrameReader(), FrameReader()
        self._views: _Views | None = None
        self._outputs: _Outputs | None = None
        self._seeded: Any = None  # what the generators are seeded from
        program.start(threads)

    def prepare(self, task: Task, params: Frame, batch: Frame) -> None:
        """Does beforehand what the next task, most likely this shard's next, needs.

        While the master averages, a worker has nothing else to do; this takes half
        of a small shard's time off the critical path.
        """
        self._seed(task._replace(step=task.step + task.gradient))
        readers = self._readers(params, batch)
        if not any(reader.has_numbers for reader in readers):
            self._views = self._look(task.shard, params, batch)

    def run(self, task: Task, params: Frame, batch: Frame, slot: Slot) -> Answer:
        """Computes the shard; its outputs are in the slot when this returns.

        Args:
            task: which shard of which step.
            params: block and frame of the parameters.
            batch: block and frame of the batch.
            slot: block and byte offset for the outputs.
        """
        views, self._views = self._views, None
        if views is None or views.place != (task.shard, params[1], batch[1]):
            views = self._look(task.shard, params, batch)
        if self._seeded != task.seeds:
            self._seed(task)
        self._seeded = None
        started = time.perf_counter()
        result = self._program.compute(views.parameters, views.arguments, task)
        seconds = time.perf_counter() - started
        if task.gradient:
            out = self._outputs_in(views.layout, slot)
            store(views.layout, result.outputs, out.arrays, out.present)
        loss, weight = scalar_loss(result.loss), _weight(result.weight, task)
        aux = b"" if result.aux is None else cloudpickle.dumps(result.aux)
        return Answer(loss, weight, aux, seconds)

    def layout(self, params: Frame) -> Layout:
        """Where outputs lie in a slot, while these are the parameters."""
        layout: Layout = self._readers(params, params)[0].extra(*params)
        return layout

    def _seed(self, task: Task) -> None:
        self._seeded = task.seeds
        seed_python(task.seed)

    def _readers(self, params: Frame, batch: Frame) -> tuple[FrameReader, FrameReader]:
        """Who reads such frames: headers are numbered among their like."""
        is_kept = params[1].base != RESIDENT, batch[1].base != RESIDENT
        return (
            self._kept_params if is_kept[0] else self._params,
            self._kept_batch if is_kept[1] else self._batch,
        )

    def _look(self, shard: int, params: Frame, batch: Frame) -> _Views:
        of_params, of_batch = self._readers(params, batch)
        arguments, _ = of_batch.read(*batch, shard)
        parameters, layout = of_params.read(*params, 0)
        return _Views((shard, params[1], batch[1]), arguments, parameters, layout)

    def _outputs_in(self, layout: Layout, slot: Slot) -> _Outputs:
        """The views of the slot, which is mostly the one of the last shard."""
        out, memory = self._outputs, slot[0].obj
        if (
            out is None
            or out.layout is not layout
            or out.memory is not memory
            or out.slot != slot[1]
        ):
            views = layout.views(*slot), layout.present(*slot)
            self._outputs = out = _Outputs(layout, memory, slot[1], *views)
        return out


def scalar_loss(loss: Any) -> Any:
    """The loss as a numpy scalar.

    Raises:
        LossError: not a real number, or more than one.
    """
    if type(loss) is float or type(loss) is np.float32:
        return np.float64(loss) if type(loss) is float else loss
    value = np.asarray(loss)
    if value.dtype.kind not in "biufc" and value.dtype.name != "bfloat16":
        raise LossError(
            f"the loss returned {loss!r}; expected a number: the mean over the rows "
            "it was given"
        )
    if value.shape != ():
        raise LossError(
            f"the loss has shape {value.shape}; expected a single number. Average it "
            "over the rows (or add it up and use reduction='sum')."
        )
    if value.dtype.kind == "c":
        raise LossError(f"the loss is complex ({value}); expected a real number")
    return value.astype(np.float64)[()] if value.dtype.kind in "biu" else value[()]


def _weight(weight: Any, task: Task) -> float:
    if weight is None:
        return float(task.rows)
    try:
        value = float(weight)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:  # also false for NaN
        raise LossError(
            f"the loss returned the weight {weight} for shard {task.shard}; expected "
            "a finite number >= 0: what its mean is divided by"
        )
    return value
