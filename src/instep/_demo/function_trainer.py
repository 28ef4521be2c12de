"""Training with a function that gives loss and gradient: NumPy's and JAX's way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from instep._demo.parabola import LEARNING_RATE, Parameters, points


class FunctionTrainer:
    """Gradient descent on what a function of (parameters, x, y) gives."""

    def __init__(
        self,
        parameters: Any,
        function: Callable[..., Any],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._parameters = list(parameters)
        self._function = function
        self._points = points()
        self.close = close

    def step(self) -> float:
        loss, gradient = self._function(self._parameters, *self._points)
        self._parameters = [
            array - np.float32(LEARNING_RATE) * slope
            for array, slope in zip(self._parameters, gradient, strict=True)
        ]
        return float(loss)

    def value_and_grad(self) -> tuple[float, Parameters]:
        loss, gradient = self._function(self._parameters, *self._points)
        return float(loss), [np.asarray(slope) for slope in gradient]

    def parameters(self) -> Parameters:
        return [np.array(array) for array in self._parameters]
