"""Batch -> shards: contiguous slices of rows, sizes as `numpy.array_split`.

What is split, leaf by leaf:

* an array with at least one axis, along its first;
* a sparse matrix or a data frame, by rows;
* a list that holds no arrays (strings, numbers, token lists), item by item;
* everything else (numbers, strings, 0-d arrays) goes whole to every shard.
"""

from __future__ import annotations

import enum
import itertools
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from instep._errors import BatchError
from instep._tree import Structure, flatten, leaf_names

Bounds = tuple[tuple[int, int], ...]


class Kind(enum.Enum):
    """How a leaf of the batch is split."""

    ROWS = "array, split along its first axis"
    WHOLE = "array, the same for every shard"
    SCALAR = "number, the same for every shard"
    ITEMS = "rows that are not an array, sliced by the worker"
    OBJECT = "any other value, the same for every shard"


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch (or parameters) taken apart: leaves, how each is split, and where."""

    structure: Structure
    leaves: list[Any]
    kinds: tuple[Kind, ...]
    rows: int
    bounds: Bounds


def shard_bounds(rows: int, shards: int) -> Bounds:
    """(start, stop) of every shard that has rows; sizes as `numpy.array_split`.

    Example:
        >>> shard_bounds(50, 3)
        ((0, 17), (17, 34), (34, 50))
        >>> shard_bounds(2, 4)
        ((0, 1), (1, 2))
    """
    size, larger = divmod(rows, shards)
    starts = [k * size + min(k, larger) for k in range(min(shards, rows) + 1)]
    return tuple(itertools.pairwise(starts))


def split(
    batch: tuple[Any, ...], shards: int, splits: Sequence[bool] | None = None
) -> Batch:
    """Takes a batch apart into leaves and row bounds.

    Args:
        batch: the arguments after the parameters; any pytrees.
        shards: how many parts; with fewer rows than that, one row each.
        splits: per argument, False where it goes whole to every shard.

    Raises:
        BatchError: fields with different numbers of rows, no rows, or a value that
            is neither split nor a plain scalar; names the field.
    """
    leaves, structure = flatten(batch, is_row_list)
    may_split = _spread(structure, splits)
    kinds = tuple(map(_kind, leaves, may_split))
    leaves = [
        _as_array(leaf) if kind in (Kind.ROWS, Kind.WHOLE) else leaf
        for leaf, kind in zip(leaves, kinds, strict=True)
    ]
    if Kind.OBJECT in kinds:
        _check_objects(leaves, kinds, structure)
    rows = _common_rows(leaves, kinds, structure)
    return Batch(structure, leaves, kinds, rows, shard_bounds(rows, shards))


def whole(tree: Any) -> Batch:
    """Takes a tree of arrays and numbers apart that every shard gets as it is."""
    leaves, structure = flatten(tree)
    kinds = tuple(_kind(leaf, may_split=False) for leaf in leaves)
    return Batch(structure, leaves, kinds, 0, ())


def slice_items(leaf: Any, start: int, stop: int) -> Any:
    """Rows `start` to `stop` of a leaf that is not a plain array."""
    return leaf.iloc[start:stop] if hasattr(leaf, "iloc") else leaf[start:stop]


def is_row_list(node: Any) -> bool:
    """A list whose items are rows (strings, numbers, token lists), not fields."""
    return type(node) is list and not any(map(_holds_arrays, node))


def _holds_arrays(node: Any) -> bool:
    if isinstance(node, list | tuple):
        return any(map(_holds_arrays, node))
    return isinstance(node, dict) or len(getattr(node, "shape", ())) > 0


def _kind(leaf: Any, may_split: bool) -> Kind:
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return Kind.ROWS if may_split and leaf.ndim else Kind.WHOLE
    if isinstance(leaf, bool | float | complex | np.generic) or _is_int64(leaf):
        return Kind.SCALAR
    if not may_split:
        return Kind.OBJECT
    if isinstance(leaf, list) or hasattr(leaf, "iloc"):
        return Kind.ITEMS
    if len(getattr(leaf, "shape", ())) > 0:
        return Kind.ROWS if _is_dense(leaf) else Kind.ITEMS
    return Kind.OBJECT


def _is_int64(leaf: Any) -> bool:
    return type(leaf) is int and -(2**63) <= leaf < 2**63


def _is_dense(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return hasattr(leaf, "__array__") and getattr(dtype, "kind", "") != "O"


def _as_array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)


def _spread(structure: Structure, splits: Sequence[bool] | None) -> list[bool]:
    """One flag per leaf from one flag per argument."""
    sizes = [len(leaf_names(child, "")) for child in structure.children]
    if splits is None:
        return [True] * sum(sizes)
    pairs = zip(splits, sizes, strict=True)
    return [flag for flag, size in pairs for _ in range(size)]


_SCALARS = (numbers.Number, np.generic, str, bytes, bool, enum.Enum, type(None))


def _check_objects(
    leaves: list[Any], kinds: tuple[Kind, ...], structure: Structure
) -> None:
    names = leaf_names(structure, "batch")
    for name, leaf, kind in zip(names, leaves, kinds, strict=True):
        plain = isinstance(leaf, _SCALARS) or callable(leaf) or hasattr(leaf, "shape")
        if kind is Kind.OBJECT and not plain:
            raise BatchError(
                f"{name} is a {type(leaf).__name__}, which instep cannot split; "
                "expected arrays, lists of rows, numbers or strings, in dicts, tuples "
                "or lists. Convert it to an array, or let the loss close over it."
            )


def _common_rows(
    leaves: list[Any], kinds: tuple[Kind, ...], structure: Structure
) -> int:
    counts = [
        len(leaf) if isinstance(leaf, list) else leaf.shape[0]
        for leaf, kind in zip(leaves, kinds, strict=True)
        if kind in (Kind.ROWS, Kind.ITEMS)
    ]
    if not counts or len(set(counts)) > 1 or counts[0] == 0:
        raise BatchError(_row_problem(counts, kinds, structure))
    return int(counts[0])


def _row_problem(
    counts: list[int], kinds: tuple[Kind, ...], structure: Structure
) -> str:
    names = [
        name
        for name, kind in zip(leaf_names(structure, "batch"), kinds, strict=True)
        if kind in (Kind.ROWS, Kind.ITEMS)
    ]
    if not counts:
        return (
            "the batch has nothing to split; expected at least one array (or list) "
            "whose first axis is the rows"
        )
    if len(set(counts)) == 1:
        return f"{names[0]} has 0 rows; expected at least one"
    other = next(k for k, count in enumerate(counts) if count != counts[0])
    return (
        f"{names[other]} has {counts[other]} rows but {names[0]} has {counts[0]}; "
        "every array of the batch needs the same first dimension"
    )
