"""States of random generators that live in variables, one stream per shard."""

from __future__ import annotations

from typing import Any

import numpy as np

from instep._program import Array

# Odd and far from any small multiple, so that shards' seeds do not meet the seeds
# that neighbouring layers were given.
_STRIDE = 0x9E3779B97F4A7C15


def is_generator(variable: Any) -> bool:
    """Whether a variable holds a Keras SeedGenerator's or tf.random.Generator's state.

    Keras: (seed, counter). TensorFlow: (counter, ..., key), named `StateVar`.
    """
    name = variable.name.split("/")[-1].split(":")[0]
    return name in ("seed_generator_state", "StateVar") and not variable.trainable


def fold(state: Array, shard: int) -> Array:
    """The state that a shard starts from: shard 0 the model's own.

    The seed (the first of two numbers) or the key (the last of three or more)
    moves by a multiple of a large odd number; the counter stays.
    """
    own = np.array(state)
    place = 0 if own.size == 2 else -1
    own[place] = _wrapped(int(own[place]) + shard * _STRIDE, own.dtype)
    return own


def _wrapped(value: int, dtype: np.dtype[Any]) -> Any:
    """The whole number modulo the range of an integer type."""
    unsigned = np.array([value % 2 ** (8 * dtype.itemsize)], f"u{dtype.itemsize}")
    return unsigned.view(dtype)[0]
