"""Learns with NumPy: the optimizer is a function, or the rate of plain SGD."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from instep._job import Job
from instep._program import Array
from instep._tree import flatten, leaves_like, unflatten

EXPECTED = "a function (params, grads) -> params, or a learning rate"


def fits(optimizer: Any) -> bool:
    """Whether it is one that this learner can use."""
    return callable(optimizer) or _is_rate(optimizer)


class Learner:
    """Parameters are a tree of arrays; each step gives another one."""

    def __init__(self, job: Job) -> None:
        self.params = copy.deepcopy(job.model)
        self._given = job.optimizer
        is_rate = _is_rate(job.optimizer)
        self._optimizer = descent(job.optimizer) if is_rate else job.optimizer

    def step(self, grads: Any) -> None:
        self.params = self._optimizer(self.params, grads)

    def follow(self, way: Any) -> None:
        self.params = descent(1.0)(self.params, way)

    def worker_optimizer(self) -> Any:
        return self._given

    def model_state(self) -> Any:
        return copy.deepcopy(self.params)

    def load_model_state(self, state: Any) -> None:
        self.params = copy.deepcopy(state)

    def optimizer_state(self) -> Any:
        """The attributes of an object that is called; a function has none."""
        return copy.deepcopy(getattr(self._optimizer, "__dict__", {}))

    def load_optimizer_state(self, state: Any) -> None:
        attributes = getattr(self._optimizer, "__dict__", None)
        if attributes is not None:
            attributes.clear()
            attributes.update(copy.deepcopy(state))

    def arrays(self) -> Sequence[Array]:
        return list(map(np.asarray, flatten(self.params)[0]))

    def arguments(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.params, *batch)

    def evaluating(self) -> AbstractContextManager[object]:
        return nullcontext()

    def limit_threads(self, threads: int) -> None:
        pass  # BLAS threads sleep when they have nothing to do


def descent(rate: float) -> Callable[[Any, Any], Any]:
    """Plain SGD, `params - rate * grads`, in the parameters' own dtypes."""

    def step(params: Any, grads: Any) -> Any:
        leaves, structure = flatten(params)
        pairs = zip(leaves, leaves_like(grads, structure), strict=True)
        return unflatten(structure, [_moved(leaf, g, rate) for leaf, g in pairs])

    return step


def _moved(leaf: Any, grad: Any, rate: float) -> Any:
    return leaf - np.asarray(leaf).real.dtype.type(rate) * grad


def _is_rate(optimizer: Any) -> bool:
    return isinstance(optimizer, int | float) and not isinstance(optimizer, bool)
