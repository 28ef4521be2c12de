"""Learns with TensorFlow 2: variables and a Keras optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np

from instep._job import Job
from instep._program import Array

EXPECTED = "one of Keras's, such as keras.optimizers.Adam()"


def fits(optimizer: Any) -> bool:
    """Whether it is one that this learner can use."""
    return isinstance(optimizer, keras.optimizers.Optimizer)


class Learner:
    """The variables are updated in place."""

    params = None

    def __init__(self, job: Job) -> None:
        is_list = isinstance(job.model, list | tuple)
        self._variables = list(job.model if is_list else job.model.variables)
        trained = job.model if is_list else job.model.trainable_variables
        self._trained = [v for v in trained if getattr(v, "trainable", True)]
        self._optimizer = job.optimizer
        self._optimizer.build(self._trained)  # so that its state is there to be kept

    def step(self, grads: Any) -> None:
        self._optimizer.apply_gradients(zip(grads, self._trained, strict=True))

    def follow(self, way: Any) -> None:
        for variable, far in zip(self._trained, way, strict=True):
            if far is not None:
                variable.assign_sub(far)

    def worker_optimizer(self) -> Any:
        kind = type(self._optimizer)
        return partial(kind.from_config, self._optimizer.get_config())

    def model_state(self) -> Any:
        return _values(self._variables)

    def load_model_state(self, state: Any) -> None:
        _assign(self._variables, state)

    def optimizer_state(self) -> Any:
        return _values(self._optimizer.variables)

    def load_optimizer_state(self, state: Any) -> None:
        _assign(self._optimizer.variables, state)

    def arrays(self) -> Sequence[Array]:
        return _values(self._variables)

    def arguments(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        return batch

    def evaluating(self) -> AbstractContextManager[object]:
        return nullcontext()  # the loss says how it calls the model

    def limit_threads(self, threads: int) -> None:
        pass  # is fixed when TensorFlow starts


def _values(variables: Sequence[Any]) -> list[Array]:
    return [np.array(variable.numpy()) for variable in variables]


def _assign(variables: Sequence[Any], values: Sequence[Array]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
