"""Training in NumPy, with a gradient written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

import instep.numpy
from instep._demo.function_trainer import FunctionTrainer
from instep._demo.parabola import Array, Parameters
from instep._demo.trainer import PoolSize, wait_for_workers


def make(parameters: Parameters, size: PoolSize | None) -> FunctionTrainer:
    """A trainer that starts from `parameters`."""
    if size is None:
        return FunctionTrainer(parameters, value_and_grad)
    pool = instep.numpy.value_and_grad(
        value_and_grad, workers=size.workers, shards=size.shards
    )
    trainer = FunctionTrainer(parameters, pool, pool.close)
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
