"""Kinds of leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lax.lax import _convert_element_type  # JAX has no public way

NUMBERS = (int, float, complex)  # exactly these; a bool is a switch


def is_text(node: Any) -> bool:
    """A list of strings, split like an array: one leaf, not one per string."""
    return type(node) is list and bool(node) and all(type(s) is str for s in node)


def is_key(leaf: Any) -> bool:
    """A typed PRNG key, or an array of them."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_kind(leaf: Any) -> Any:
    """The implementation of a typed key; None for anything else."""
    return jax.random.key_impl(leaf) if is_key(leaf) else None


def fold_keys(keys: Any, data: Any) -> Any:
    """`jax.random.fold_in` for a key, or for every key of an array."""
    fold = jax.random.fold_in
    for _ in keys.shape:
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(keys, data)


def is_array(leaf: Any) -> bool:
    """Whether JAX takes it for an array."""
    if isinstance(leaf, jax.Array):
        return True
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return False
    try:
        dtype = np.dtype(leaf.dtype)
    except TypeError:  # another library's
        return False
    # Texts, dates and objects are neither; bfloat16 and its like are numbers.
    return dtype.kind == "b" or bool(jnp.issubdtype(dtype, np.number))


def weak_kind(leaf: Any) -> type | None:
    """The Python type whose promotion rules a leaf follows, if it does."""
    if type(leaf) in NUMBERS:
        return type(leaf)
    if not getattr(leaf, "weak_type", False):
        return None
    kind = {"f": float, "c": complex}.get(np.dtype(leaf.dtype).kind, int)
    # Under another x64 flag than that of its making it would change its dtype.
    return kind if dtype_of(kind(0)) == leaf.dtype else None


def weakly_typed(value: Any, kind: type | None) -> Any:
    """The array as one that, like a Python number, adapts to others' dtypes."""
    if kind is None or type(value) in NUMBERS:
        return value
    return _convert_element_type(value, dtype_of(kind(0)), weak_type=True)


def dtype_of(leaf: Any) -> np.dtype[Any]:
    """The dtype that JAX gives a leaf which is no key."""
    return np.dtype(jax.dtypes.result_type(leaf))


def canonical(dtype: Any) -> np.dtype[Any]:
    """The dtype as JAX takes it: 64 bits only where they are enabled."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))
