"""Parameters of a worker's own, and an optax optimizer on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from instep._program import Array, ShardResult
from instep.jax._form import Form, Role


def parameters(form: Form, whole: Sequence[Any]) -> list[Any]:
    """Of what goes whole to every shard, those leaves that are differentiated."""
    roles = [leaf.role for leaf in form.leaves]
    roles = [role for role in roles if role in (Role.PARAM, Role.WHOLE)]
    pairs = zip(whole, roles, strict=True)
    return [leaf for leaf, role in pairs if role is Role.PARAM]


class Private:
    """A copy of all that goes whole to every shard."""

    def __init__(self, params: Sequence[Any], form: Form) -> None:
        self._spec, *self._leaves = params
        self._whole = [np.array(leaf) for leaf in self._leaves]
        self.arrays = parameters(form, self._whole)

    def params(self) -> Any:
        pairs = zip(self._whole, self._leaves, strict=True)
        return [self._spec, *(_like(array, leaf) for array, leaf in pairs)]

    def keep(self, result: ShardResult) -> None:
        pass  # a function of JAX changes nothing


def _like(array: Array, leaf: Any) -> Any:
    """As an array where the leaf was one, else as a number of its type."""
    return array if isinstance(leaf, np.ndarray) else type(leaf)(array[()])


class Method:
    """An optax optimizer."""

    def __init__(self, optimizer: Any, private: Private) -> None:
        self._optimizer, self._arrays = optimizer, private.arrays
        self._state = optimizer.init(self._params())

    def step(self, gradients: Sequence[Array]) -> None:
        grads, params = list(map(jnp.array, gradients)), self._params()
        updates, self._state = self._optimizer.update(grads, self._state, params)
        for array, update in zip(self._arrays, updates, strict=True):
            array += np.asarray(update, array.dtype)

    def state(self) -> Any:
        return jax.tree.map(np.asarray, self._state)

    def load(self, state: Any) -> None:
        self._state = jax.tree.map(jnp.asarray, state)

    def _params(self) -> list[Any]:
        return list(map(jnp.array, self._arrays))
