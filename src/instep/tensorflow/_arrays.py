"""TensorFlow tensors <-> NumPy arrays, with as few copies as TensorFlow allows."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import tensorflow as tf

from instep._errors import BatchError
from instep._program import Array


def to_array(tensor: tf.Tensor) -> Array:
    """The tensor's own memory as a read-only array, where its dtype allows that."""
    try:
        return np.asarray(memoryview(tensor))
    except (BufferError, TypeError, ValueError, NotImplementedError):
        return np.asarray(tensor.numpy())  # bfloat16, strings


def read_variable(variable: tf.Variable) -> Array:
    """The variable's value, to be copied before it is next assigned."""
    # The op itself: `variable.read_value()` spends six times as long around it.
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    return to_array(value)


class Numbers(enum.Enum):
    """How Python numbers of a batch reach the loss."""

    TENSORS = "as 0-d tensors, in TensorFlow's default dtypes"
    WIDE = "as 0-d tensors, floats in float64"
    FIXED = "as they are; the trace is for these numbers"


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number; NumPy's float64 counts as one."""
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)


def batch_array(name: str, leaf: Any, numbers: Numbers) -> Array | None:
    """A leaf of the batch as an array, in the dtype TensorFlow would give it.

    None: the leaf (a bool, a string) is no data; the trace depends on it.

    Raises:
        BatchError: a value that has no rows to split, such as a ragged tensor.
    """
    if isinstance(leaf, bool | str | bytes):
        return None
    if is_number(leaf) and numbers is not Numbers.TENSORS:
        return None if numbers is Numbers.FIXED else np.asarray(leaf)
    if isinstance(leaf, tf.Tensor):
        return to_array(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return leaf
    try:
        return to_array(tf.convert_to_tensor(leaf))
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise BatchError(
            f"{name} is a {type(leaf).__name__} that does not make a tensor ({error}); "
            "expected arrays, tensors, numbers, or lists of equally long rows"
        ) from error
