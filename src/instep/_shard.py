"""Computes one shard: seed, read, compute, check, store. The same in every engine."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from instep._errors import LossError
from instep._frame import FrameReader, FrameRef
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
    """All that a shard reads and writes, as trees of views of the memory."""

    place: Any  # what the views depend on
    arguments: tuple[Any, ...]
    parameters: Any
    layout: Layout
    outputs: list[Array]
    present: Array


class ShardRunner:
    """Runs shards of one program, one after the other."""

    def __init__(self, program: Program, threads: int) -> None:
        self._program = program
        self._params = FrameReader()
        self._batch = FrameReader()
        self._views: _Views | None = None
        self._seeded: int | None = None  # the seed the generators already have
        program.start(threads)

    def prepare(self, task: Task, params: Frame, batch: Frame, slot: Slot) -> None:
        """Does beforehand what the next task, most likely this shard's next, needs.

        While the master averages, a worker has nothing else to do; this takes half
        of a small shard's time off the critical path.
        """
        self._seeded = task._replace(step=task.step + task.gradient).seed
        seed_python(self._seeded)
        if not (self._params.has_numbers or self._batch.has_numbers):
            self._views = self._look(task.shard, params, batch, slot)

    def run(self, task: Task, params: Frame, batch: Frame, slot: Slot) -> Answer:
        """Computes the shard; its outputs are in the slot when this returns.

        Args:
            task: which shard of which step.
            params: block and frame of the parameters.
            batch: block and frame of the batch.
            slot: block and byte offset for the outputs.
        """
        views, self._views = self._views, None  # never the same arrays twice: a loss
        # that remembers results by the identity of its input must not be fooled
        if views is None or views.place != (task.shard, params[1], batch[1], slot[1]):
            views = self._look(task.shard, params, batch, slot)
        if task.seed != self._seeded:
            seed_python(task.seed)
        self._seeded = None
        started = time.perf_counter()
        result = self._program.compute(views.parameters, views.arguments, task)
        seconds = time.perf_counter() - started
        if task.gradient:
            store(views.layout, result.outputs, views.outputs, views.present)
        loss, weight = scalar_loss(result.loss), _weight(result.weight, task)
        aux = b"" if result.aux is None else cloudpickle.dumps(result.aux)
        return Answer(loss, weight, aux, seconds)

    def _look(self, shard: int, params: Frame, batch: Frame, slot: Slot) -> _Views:
        arguments, _ = self._batch.read(*batch, shard)
        parameters, layout = self._params.read(*params, 0)
        return _Views(
            (shard, params[1], batch[1], slot[1]),
            *(arguments, parameters, layout),
            *(layout.views(*slot), layout.present(*slot)),
        )


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
