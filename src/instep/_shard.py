"""Computes one shard: seed, read, compute, check, store. The same in every engine."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from instep._errors import LossError
from instep._frame import FrameReader, FrameRef
from instep._layout import store
from instep._program import Program, Task
from instep._seeding import seed_python


@dataclass(frozen=True, slots=True)
class Answer:
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


class ShardRunner:
    """Runs shards of one program, one after the other."""

    def __init__(self, program: Program, threads: int) -> None:
        self._program = program
        self._params = FrameReader()
        self._batch = FrameReader()
        program.start(threads)

    def run(
        self,
        task: Task,
        params: tuple[memoryview, FrameRef],
        batch: tuple[memoryview, FrameRef],
        slot: tuple[memoryview, int],
    ) -> Answer:
        """Computes the shard; its outputs are in the slot when this returns.

        Args:
            task: which shard of which step.
            params: block and frame of the parameters.
            batch: block and frame of the batch.
            slot: block and byte offset for the outputs.
        """
        arguments, _ = self._batch.read(*batch, task.shard)
        parameters, layout = self._params.read(*params, 0)
        seed_python(task.seed)
        started = time.perf_counter()
        result = self._program.compute(parameters, arguments, task)
        seconds = time.perf_counter() - started
        loss, weight = scalar_loss(result.loss), _weight(result.weight, task)
        if task.gradient:
            buffer, base = slot
            views = layout.views(buffer, base)
            store(layout, result.outputs, views, layout.present(buffer, base))
        aux = b"" if result.aux is None else cloudpickle.dumps(result.aux)
        return Answer(loss, weight, aux, seconds)


def scalar_loss(loss: Any) -> Any:
    """The loss as a numpy scalar.

    Raises:
        LossError: not a real number, or more than one.
    """
    value = np.asarray(loss)
    if loss is None or value.dtype == object:
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
    value = float(weight)
    if not 0 <= value < math.inf:  # also false for NaN
        raise LossError(
            f"the loss returned the weight {value} for shard {task.shard}; expected "
            "a finite number >= 0: what its mean is divided by"
        )
    return value
