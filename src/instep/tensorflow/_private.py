"""Variables of a worker's own, and an optimizer of Keras's on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from instep._errors import LossError
from instep._program import Array, ShardResult


class Private:
    """A copy of the variables of a graph (a `Trace`)."""

    def __init__(self, params: Sequence[Array], trace: Any) -> None:
        if any(isinstance(gradient, tuple) for gradient in trace.gradients):
            raise LossError(
                "steps of a worker's own need dense gradients; this loss has sparse "
                "ones, as of tf.gather or an embedding. Use another mode"
            )
        self._trace, self._values = trace, [np.array(array) for array in params]
        self.arrays = [self._values[k] for k in trace.dense]

    def params(self) -> Any:
        return self._values

    def keep(self, result: ShardResult) -> None:
        """What the loss has written goes on from here."""
        written = result.outputs[len(self.arrays) :]
        counters = () if result.aux is None else result.aux.counters
        indices = self._trace.state + self._trace.counters
        for index, value in zip(indices, [*written, *counters], strict=False):
            if value is not None:
                np.copyto(self._values[index], value)


class Method:
    """An optimizer, on variables that are copies."""

    def __init__(self, make: Callable[[], Any], private: Private) -> None:
        self._arrays = private.arrays
        self._variables = [tf.Variable(array) for array in self._arrays]
        self._optimizer = make()
        self._optimizer.build(self._variables)

    def step(self, gradients: Sequence[Array]) -> None:
        pairs = list(zip(self._variables, self._arrays, strict=True))
        for variable, array in pairs:
            variable.assign(array)
        tensors = map(tf.constant, gradients)
        self._optimizer.apply_gradients(zip(tensors, self._variables, strict=True))
        for variable, array in pairs:
            np.copyto(array, variable.numpy())

    def state(self) -> Any:
        return [np.asarray(variable) for variable in self._optimizer.variables]

    def load(self, state: Any) -> None:
        for variable, value in zip(self._optimizer.variables, state, strict=True):
            variable.assign(value)
