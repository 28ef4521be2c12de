"""Auxiliary data of the shards -> auxiliary data of the batch.

number, 0-d array                 weighted mean
array or list, first axis = rows  concatenated in row order
instep.Sum(x)                     added
instep.Mean(x)                    weighted mean, element by element
anything else                     must be the same in every shard
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from instep._errors import LossError
from instep._program import Array
from instep._reduction import reduce_arrays, reduce_scalar
from instep._sharding import is_row_list
from instep._tree import Structure, flatten, leaf_names, unflatten
from instep._values import Mean, Sum, is_marked


class ShardAnswer(NamedTuple):
    """What the master keeps of one shard."""

    weight: float
    rows: int
    aux: Any


def merge_aux(shards: Sequence[ShardAnswer]) -> Any:
    """The aux of the whole batch; one shard's comes back untouched.

    Raises:
        LossError: a value that differs between shards and has no rule.
    """
    leaves, structure = merge_aux_leaves(shards)
    return unflatten(structure, leaves)


def merge_aux_leaves(shards: Sequence[ShardAnswer]) -> tuple[list[Any], Structure]:
    """The same, taken apart: for adapters whose aux holds tensors of their own."""
    flat = [flatten(shard.aux, is_aux_leaf) for shard in shards]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise LossError("aux has not the same structure in every shard")
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    return merge_columns(leaf_names(structure, "aux"), columns, shards), structure


def merge_columns(
    names: Sequence[str],
    columns: Sequence[Sequence[Any]],
    shards: Sequence[ShardAnswer],
) -> list[Any]:
    """Leaf by leaf: for adapters whose trees are of another kind.

    Args:
        names: how each leaf is written, for errors.
        columns: per leaf its values, one per shard.
        shards: for their weights and rows.
    """
    pairs = zip(names, columns, strict=True)
    return [_merge(name, column, shards) for name, column in pairs]


def is_aux_leaf(node: Any) -> bool:
    """What one rule is for, though it may be a container."""
    return is_marked(node) or is_row_list(node)


def _merge(name: str, values: Sequence[Any], shards: Sequence[ShardAnswer]) -> Any:
    if isinstance(values[0], Sum):
        return functools.reduce(operator.add, (value.value for value in values))
    if isinstance(values[0], Mean):
        return _mean(name, [np.asarray(value.value) for value in values], shards)
    if len(values) == 1:
        return values[0]
    if _is_number(values[0]):
        return reduce_scalar(values, [shard.weight for shard in shards], "mean")
    if all(_has_rows(v, s.rows) for v, s in zip(values, shards, strict=True)):
        if isinstance(values[0], list):
            return list(itertools.chain.from_iterable(values))
        return np.concatenate(list(values))
    return _the_same(name, values, shards)


def _mean(name: str, arrays: list[Array], shards: Sequence[ShardAnswer]) -> Any:
    forms = {(array.shape, array.dtype) for array in arrays}
    if len(forms) > 1:
        shapes = [array.shape for array in arrays]
        raise LossError(
            f"{name} is an instep.Mean of arrays with the shapes {shapes}; expected "
            "the same shape and dtype in every shard"
        )
    if len(arrays) == 1:
        return arrays[0]
    if arrays[0].dtype.kind in "biu":  # the mean of integers is none
        arrays = [array.astype(np.float64) for array in arrays]
    return reduce_arrays(arrays, [shard.weight for shard in shards], "mean")


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex) or (
        isinstance(value, np.ndarray | np.generic)
        and value.shape == ()
        and value.dtype.kind in "biufcV"
    )


def _has_rows(value: Any, rows: int) -> bool:
    if isinstance(value, list):
        return len(value) == rows
    return isinstance(value, np.ndarray) and value.ndim > 0 and len(value) == rows


def _the_same(name: str, values: Sequence[Any], shards: Sequence[ShardAnswer]) -> Any:
    if all(_equal(value, values[0]) for value in values[1:]):
        return values[0]
    shape = getattr(values[0], "shape", None)
    what = f"has shape {shape}" if shape else f"is a {type(values[0]).__name__}"
    raise LossError(
        f"{name} {what} in a shard of {shards[0].rows} rows and differs between "
        "shards; expected a number (averaged), an array with one entry per row "
        "(concatenated), instep.Sum(...) (added) or instep.Mean(...) (averaged)"
    )


def _equal(a: Any, b: Any) -> bool:
    try:
        return type(a) is type(b) and bool(np.all(a == b))
    except ValueError:
        return False
