"""Training in NumPy, with a gradient written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import instep.numpy
from instep._demo.parabola import LEARNING_RATE, Array, Parameters, points
from instep._demo.trainer import PoolSize, wait_for_workers


def make(parameters: Parameters, size: PoolSize | None) -> NumpyTrainer:
    """A trainer that starts from `parameters`."""
    if size is None:
        return NumpyTrainer(parameters, value_and_grad)
    pool = instep.numpy.value_and_grad(
        value_and_grad, workers=size.workers, shards=size.shards
    )
    trainer = NumpyTrainer(parameters, pool, pool.close)
    wait_for_workers(pool, trainer.value_and_grad)
    return trainer


def value_and_grad(
    parameters: Parameters, x: Array, y: Array
) -> tuple[Any, Parameters]:
    """The mean over rows of the squared error, and its gradient."""
    weights, biases, out_weights, out_biases = parameters
    hidden = np.tanh(x @ weights + biases)
    error = hidden @ out_weights + out_biases - y
    d_prediction = 2 * error / np.float32(len(x))
    d_hidden = d_prediction @ out_weights.T * (1 - hidden**2)
    gradient = [
        x.T @ d_hidden,
        d_hidden.sum(axis=0),
        hidden.T @ d_prediction,
        d_prediction.sum(axis=0),
    ]
    return np.mean(np.sum(error**2, axis=1)), gradient


class NumpyTrainer:
    """Gradient descent with a function that gives loss and gradient."""

    def __init__(
        self,
        parameters: Parameters,
        function: Callable[..., Any],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._parameters = [np.copy(array) for array in parameters]
        self._function = function
        self._points = points()
        self.close = close

    def step(self) -> float:
        loss, gradient = self.value_and_grad()
        for array, slope in zip(self._parameters, gradient, strict=True):
            array -= np.float32(LEARNING_RATE) * slope
        return loss

    def value_and_grad(self) -> tuple[float, Parameters]:
        loss, gradient = self._function(self._parameters, *self._points)
        return float(loss), gradient

    def parameters(self) -> Parameters:
        return [np.copy(array) for array in self._parameters]
