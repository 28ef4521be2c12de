"""The problem: 50 points of y = x^2 and a network of five hidden units."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]
# weights (1, 5), biases (5,), weights (5, 1), biases (1,)
Parameters = list[Array]

NUM_POINTS = 50
NUM_HIDDEN = 5
LEARNING_RATE = 1e-2


def points() -> tuple[Array, Array]:
    """x and y = x^2, each of shape (50, 1)."""
    x = np.linspace(-2, 2, NUM_POINTS, dtype=np.float32)[:, np.newaxis]
    return x, x**2


def initial_parameters() -> Parameters:
    """Where every training run starts."""
    generator = np.random.default_rng(3)
    shapes = [(1, NUM_HIDDEN), (NUM_HIDDEN,), (NUM_HIDDEN, 1), (1,)]
    return [
        generator.normal(size=shape).astype(np.float32)
        if len(shape) == 2
        else np.full(shape, 0.1, np.float32)
        for shape in shapes
    ]


def predict(parameters: Parameters, x: Array) -> Array:
    """What the network makes of x, shape (n, 1)."""
    weights, biases, out_weights, out_biases = parameters
    hidden = np.tanh(x @ weights + biases)
    result: Array = hidden @ out_weights + out_biases
    return result
