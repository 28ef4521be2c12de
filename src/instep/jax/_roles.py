"""What becomes of each leaf of the arguments, and how it travels."""

from __future__ import annotations

import enum
from typing import Any

import jax
import numpy as np

from instep._errors import BatchError, GradientError
from instep.jax._axes import DEFAULT, Axis
from instep.jax._form import Leaf, Role
from instep.jax._leaves import (
    NUMBERS,
    canonical,
    dtype_of,
    is_array,
    is_key,
    key_kind,
    weak_kind,
)

_STATIC = (bool, str, bytes, enum.Enum)


class GradientTypeError(GradientError, TypeError):
    """A leaf of a kind that has no gradient; a TypeError, as JAX's own."""


def leaf_form(name: str, leaf: Any, axis: Axis, is_param: bool) -> Leaf:
    """The form of one leaf.

    Args:
        name: how it is written, for errors.
        leaf: of the arguments.
        axis: what `in_axes` says of it.
        is_param: it is differentiated.

    Raises:
        BatchError: it is of a kind that cannot be handed to the workers.
        GradientTypeError: it is differentiated and has no gradient.
    """
    if is_param:
        return _param_form(name, leaf, axis)
    if isinstance(leaf, list):
        is_whole = axis is None
        return Leaf(Role.WHOLE if is_whole else Role.ROWS, is_text=True)
    if type(leaf) in NUMBERS:
        return Leaf(Role.WHOLE)
    if is_array(leaf):
        return _array_form(name, leaf, axis)
    if isinstance(leaf, _STATIC) or callable(leaf):
        return Leaf(Role.STATIC, static=leaf)
    raise BatchError(
        f"{name} is a {type(leaf).__name__}; expected arrays, numbers or strings, in "
        "any pytree. Convert it to an array, or let the loss close over it."
    )


def dtype_in_transit(leaf: Any, form: Leaf) -> np.dtype[Any] | None:
    """Of the array that the leaf travels as; None where it is none."""
    if form.role is Role.STATIC or form.is_text:
        return None
    if type(leaf) in NUMBERS:
        return dtype_of(leaf) if form.role is Role.PARAM else None
    return np.dtype(np.uint32) if form.key else canonical(leaf.dtype)


def in_transit(leaf: Any, form: Leaf, dtype: np.dtype[Any] | None) -> Any:
    """The leaf as it travels: an array, rows first; what is none as it is."""
    if dtype is None:
        return leaf
    if form.key and is_key(leaf):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf, dtype)
    return np.moveaxis(array, form.axis, 0) if form.axis else array


def _param_form(name: str, leaf: Any, axis: Axis) -> Leaf:
    if axis is not None and axis is not DEFAULT:
        raise BatchError(
            f"{name} is differentiated and cannot be split along axis {axis}; give "
            "its argument None in in_axes"
        )
    if type(leaf) not in NUMBERS and not is_array(leaf):
        raise GradientTypeError(
            f"{name} is a {type(leaf).__name__}, for which there is no gradient; pass "
            "what is not to be fitted as another argument"
        )
    if is_key(leaf) or dtype_of(leaf).kind in "biu":
        raise GradientTypeError(
            f"{name} has dtype {jax.dtypes.result_type(leaf)}, for which there is no "
            "gradient; expected floating-point or complex leaves. Pass what is not to "
            "be fitted as another argument, or convert it: float(...), "
            "jnp.asarray(..., float)"
        )
    return Leaf(Role.PARAM, weak=weak_kind(leaf))


def _array_form(name: str, leaf: Any, axis: Axis) -> Leaf:
    shape, key = np.shape(leaf), key_kind(leaf)
    if axis is DEFAULT:
        axis = 0 if shape else None
    if axis is None:
        return Leaf(Role.WHOLE, key=key, weak=weak_kind(leaf))
    assert isinstance(axis, int)
    if not -len(shape) <= axis < len(shape):
        raise BatchError(
            f"{name} has shape {shape} and no axis {axis} to split; give it None in "
            "in_axes to hand it whole to every shard"
        )
    return Leaf(Role.ROWS, axis % len(shape), key, weak_kind(leaf))
