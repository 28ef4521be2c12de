"""Steps that a worker takes by itself, between reading parameters and answering.

    local      from the master's parameters; hands over how far it came, old minus new
    elastic    from the shard's own ones, which it keeps; hands over minus the pull on
               the master's
    gather     plain SGD from the master's or its own; hands over the gradients' sum

What lasts between two turns (an optimizer's state, parameters of its own) belongs to
the shard, not to the process: it travels with the work, and so survives a worker.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import cloudpickle
import numpy as np

from instep._errors import LossError
from instep._portions import Turn
from instep._program import Array, Program, ShardResult, Task

Way = Literal["local", "elastic", "gather"]


class Private(Protocol):
    """Parameters of a worker's own, which its steps change."""

    arrays: list[Array]  # one per output, views of the parameters

    def params(self) -> Any:
        """As the program takes them, with their present values."""

    def keep(self, result: ShardResult) -> None:
        """Takes over what else the loss has changed, such as running statistics."""


class Optimizer(Protocol):
    """Changes arrays in place, by gradients."""

    def step(self, gradients: Sequence[Array]) -> None:
        """Takes one step."""

    def state(self) -> Any:
        """What it remembers; pickles."""

    def load(self, state: Any) -> None:
        """Remembers this."""


class Walker(Program, Protocol):
    """A program whose parameters can be had privately."""

    def private(self, params: Any, arguments: tuple[Any, ...]) -> Private:
        """A copy, for batches like this one."""

    def optimizer(self, optimizer: Any, private: Private) -> Optimizer:
        """The user's optimizer, for these arrays."""


class Memory(NamedTuple):
    """What lasts of a shard; pickled."""

    optimizer: Any
    arrays: list[Array] | None  # the shard's own parameters, where it keeps them


class Walked(NamedTuple):
    """The aux of a turn.

    Attributes:
        aux: that of the last step, from the loss.
        memory: pickled `Memory`.
    """

    aux: Any
    memory: bytes


@dataclass
class LocalProgram:
    """Takes steps where it is given a `Turn`; computes all else as it was.

    Attributes:
        program: the adapter's.
        method: the user's optimizer, or the rate of plain SGD.
        way: see above.
        pull: alpha of elastic averaging.
        keeps: whether the shard goes on with parameters of its own.
    """

    program: Walker
    method: Any
    way: Way
    pull: float = 0.0
    keeps: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        return self.program.modules

    def start(self, threads: int) -> None:
        self._steps = 0
        self.program.start(threads)

    def preserved(self) -> AbstractContextManager[None]:
        return self.program.preserved()

    def compute(self, params: Any, batch: tuple[Any, ...], task: Task) -> ShardResult:
        if not (batch and isinstance(batch[0], Turn)):
            return self.program.compute(params, batch, task)
        return self._walk(params, batch[0], task)

    def _walk(self, params: Any, turn: Turn, task: Task) -> ShardResult:
        private = self.program.private(params, turn.batches[0])
        old = [array.copy() for array in private.arrays]
        optimizer = self._optimizer(private, turn.state)
        results = []
        total = [np.zeros_like(array) for array in old]
        for number, arguments in enumerate(turn.batches):
            self._steps += 1
            rows = int(turn.rows[number])
            step, version = task.step + number, -self._steps  # unlike any before
            now = task._replace(step=step, rows=rows, version=version)
            result = self.program.compute(private.params(), arguments, now)
            gradients = _dense(result, len(old))
            for part, gradient in zip(total, gradients, strict=True):
                part += gradient
            optimizer.step(gradients)
            private.keep(result)
            results.append(_Step(result, rows))
        outputs: list[Array | None] = [*self._outputs(old, private.arrays, total)]
        outputs += results[-1].result.outputs[len(old) :]  # state
        own = private.arrays if self.keeps else None
        memory = cloudpickle.dumps(Memory(optimizer.state(), own))
        return _merged(results, outputs, memory)

    def _optimizer(self, private: Private, state: Array) -> Optimizer:
        """With the state of before; the shard's own parameters are put in place."""
        is_rate = isinstance(self.method, int | float)
        optimizer: Optimizer = (
            PlainSgd(self.method, private.arrays)
            if is_rate
            else self.program.optimizer(self.method, private)
        )
        if state.size:
            memory: Memory = pickle.loads(state.tobytes())
            optimizer.load(memory.optimizer)
            for array, own in zip(private.arrays, memory.arrays or [], strict=False):
                np.copyto(array, own)
        return optimizer

    def _outputs(
        self, old: list[Array], new: list[Array], total: list[Array]
    ) -> list[Array]:
        if self.way == "gather":
            return total
        if self.way == "local":
            return [before - after for before, after in zip(old, new, strict=True)]
        pulls = [self._pull(x, centre) for x, centre in zip(new, old, strict=True)]
        for x, pull in zip(new, pulls, strict=True):
            x -= pull
        return [-pull for pull in pulls]

    def _pull(self, x: Array, centre: Array) -> Array:
        pull: Array = x.real.dtype.type(self.pull) * (x - centre)
        return pull


@dataclass
class PlainSgd:
    """w -= rate * g."""

    rate: float
    arrays: list[Array]

    def step(self, gradients: Sequence[Array]) -> None:
        for array, gradient in zip(self.arrays, gradients, strict=True):
            array -= array.real.dtype.type(self.rate) * gradient

    def state(self) -> None:
        return None

    def load(self, state: None) -> None:
        pass


class _Step(NamedTuple):
    result: ShardResult
    rows: int

    @property
    def weight(self) -> float:
        given = self.result.weight
        return float(self.rows) if given is None else float(given)


def _dense(result: ShardResult, number: int) -> list[Array]:
    """The gradients, all of which have to be there."""
    gradients = [g for g in result.outputs[:number] if g is not None]
    if len(gradients) != number:
        raise LossError(
            f"the loss gave {len(gradients)} dense gradients for {number} parameters; "
            "steps of a worker's own need one for each: leave unused and sparse "
            "parameters out, or use another mode"
        )
    return gradients


def _merged(
    steps: Sequence[_Step], outputs: list[Array | None], memory: bytes
) -> ShardResult:
    """One result: the mean loss over all steps, by their weights."""
    weights = [step.weight for step in steps]
    total = sum(weights)
    losses = [np.asarray(step.result.loss) for step in steps]
    loss = losses[0]
    if len(steps) > 1 and total > 0:
        mean = sum(w * float(x) for w, x in zip(weights, losses, strict=True)) / total
        loss = np.asarray(mean, loss.dtype)
    aux = Walked(steps[-1].result.aux, memory)
    return ShardResult(loss, total, outputs, aux)
