"""Training in JAX: `value_and_grad` of a function of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import instep.jax
from instep._demo.parabola import LEARNING_RATE, Parameters, points
from instep._demo.trainer import PoolSize, wait_for_workers


def make(parameters: Parameters, size: PoolSize | None) -> JaxTrainer:
    """A trainer that starts from `parameters`."""
    if size is None:
        return JaxTrainer(parameters, jax.jit(jax.value_and_grad(mean_squared_error)))
    pool = instep.jax.value_and_grad(
        mean_squared_error, workers=size.workers, shards=size.shards
    )
    trainer = JaxTrainer(parameters, pool, pool.close)
    wait_for_workers(pool, trainer.value_and_grad)
    return trainer


def mean_squared_error(parameters: Any, x: Any, y: Any) -> Any:
    """The mean over rows of the squared error."""
    weights, biases, out_weights, out_biases = parameters
    prediction = jnp.tanh(x @ weights + biases) @ out_weights + out_biases
    return jnp.mean(jnp.sum(jnp.square(prediction - y), axis=1))


class JaxTrainer:
    """Gradient descent with a function that gives loss and gradient."""

    def __init__(
        self,
        parameters: Parameters,
        function: Callable[..., Any],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._parameters = [jnp.asarray(array) for array in parameters]
        self._function = function
        self._points = points()
        self.close = close

    def step(self) -> float:
        loss, gradient = self._function(self._parameters, *self._points)
        self._parameters = [
            array - LEARNING_RATE * slope
            for array, slope in zip(self._parameters, gradient, strict=True)
        ]
        return float(loss)

    def value_and_grad(self) -> tuple[float, Parameters]:
        loss, gradient = self._function(self._parameters, *self._points)
        return float(loss), [np.asarray(slope) for slope in gradient]

    def parameters(self) -> Parameters:
        return [np.array(array) for array in self._parameters]
