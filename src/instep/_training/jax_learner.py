"""Learns with JAX and optax."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from instep._job import Job
from instep._program import Array

EXPECTED = "one of optax's, such as optax.adam(1e-3)"


def fits(optimizer: Any) -> bool:
    """Whether it is one that this learner can use."""
    return hasattr(optimizer, "init") and hasattr(optimizer, "update")


class Learner:
    """Parameters are a pytree; each step gives another one."""

    def __init__(self, job: Job) -> None:
        self.params = job.model
        self._optimizer = job.optimizer
        self._state = job.optimizer.init(job.model)
        self._step = jax.jit(self._stepped)

    def step(self, grads: Any) -> None:
        self.params, self._state = self._step(self.params, self._state, grads)

    def _stepped(self, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = self._optimizer.update(grads, state, params)
        # As optax.apply_updates: in the parameters' own dtypes.
        return jax.tree.map(_added, params, updates), state

    def follow(self, way: Any) -> None:
        self.params = jax.tree.map(lambda x, far: x - far, self.params, way)

    def worker_optimizer(self) -> Any:
        return self._optimizer

    def model_state(self) -> Any:
        return self.params  # is never updated in place

    def load_model_state(self, state: Any) -> None:
        self.params = state

    def optimizer_state(self) -> Any:
        return self._state

    def load_optimizer_state(self, state: Any) -> None:
        self._state = state

    def arrays(self) -> Sequence[Array]:
        return list(map(np.asarray, jax.tree.leaves(self.params)))

    def arguments(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.params, *batch)

    def evaluating(self) -> AbstractContextManager[object]:
        return nullcontext()

    def limit_threads(self, threads: int) -> None:
        pass  # JAX's threads sleep when they have nothing to do


def _added(param: Any, update: Any) -> Any:
    return (param + update).astype(param.dtype)
