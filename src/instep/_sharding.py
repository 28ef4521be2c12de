"""Batch -> shards: contiguous slices of rows, sizes as `numpy.array_split`.

What is split, leaf by leaf:

* an array with at least one axis, along its first;
* a sparse matrix or a data frame, by rows;
* a list that holds no arrays (strings, numbers, token lists), item by item;
* everything else (numbers, strings, 0-d arrays) goes whole to every shard.
"""

from __future__ import annotations

import enum
import functools
import itertools
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from instep._errors import BatchError
from instep._tree import Structure, flatten, leaf_names, unflatten

Bounds = tuple[tuple[int, int], ...]


class Kind(enum.Enum):
    """How a leaf of the batch is split."""

    ROWS = "array, split along its first axis"
    WHOLE = "array, the same for every shard"
    SCALAR = "number, the same for every shard"
    ITEMS = "rows that are not an array, sliced by the worker"
    OBJECT = "any other value, the same for every shard"


@dataclass(frozen=True, eq=False)
class Plan:
    """How the leaves of batches of one form are split, and where.

    Compared by identity: batches of the same form share their plan.
    """

    structure: Structure
    kinds: tuple[Kind, ...]
    rows: int
    bounds: Bounds
    has_objects: bool


class Batch(NamedTuple):
    """A batch (or parameters) taken apart: its plan and its leaves."""

    plan: Plan
    leaves: list[Any]


@functools.lru_cache(maxsize=64)
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


class Splitter:
    """Takes batches apart; the plan is made again only when their form changes."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._form: Any = None
        self._plan: Plan | None = None

    def split(
        self, batch: tuple[Any, ...], splits: Sequence[bool] | None = None
    ) -> Batch:
        """Takes a batch apart into leaves and row bounds.

        Args:
            batch: the arguments after the parameters; any pytrees.
            splits: per argument, False where it goes whole to every shard.

        Raises:
            BatchError: fields with different numbers of rows, no rows, or a value
                that is neither split nor a plain scalar; names the field.
        """
        leaves, structure = flatten(batch, is_row_list)
        form = structure, splits, list(map(_form, leaves))
        if self._plan is None or form != self._form:
            plan = _plan(leaves, structure, _spread(structure, splits))
            bounds = shard_bounds(_common_rows(leaves, plan), self._shards)
            self._plan = replace(plan, rows=bounds[-1][1], bounds=bounds)
            self._form = form
        return Batch(self._plan, _arrays(leaves, self._plan))

    def whole(self, tree: Any) -> Batch:
        """Takes a tree of arrays and numbers apart that goes whole to every shard."""
        leaves, structure = flatten(tree)
        form = structure, list(map(_form, leaves))
        if self._plan is None or form != self._form:
            self._plan = _plan(leaves, structure, [False] * len(leaves))
            self._form = form
        return Batch(self._plan, _arrays(leaves, self._plan))


def take_rows(batch: tuple[Any, ...], index: Any) -> tuple[Any, ...]:
    """The batch with these rows only, in this order; the rest as it is."""
    leaves, structure = flatten(batch, is_row_list)
    kinds = _plan(leaves, structure, [True] * len(leaves)).kinds
    taken = [
        _take(leaf, index) if kind in (Kind.ROWS, Kind.ITEMS) else leaf
        for leaf, kind in zip(leaves, kinds, strict=True)
    ]
    return tuple(unflatten(structure, taken))


def _take(leaf: Any, index: Any) -> Any:
    if isinstance(leaf, list):
        return [leaf[k] for k in index]
    if hasattr(leaf, "iloc"):
        return leaf.iloc[index]
    return np.asarray(leaf)[index] if _is_tensorflow(leaf) else leaf[index]


def _is_tensorflow(leaf: Any) -> bool:
    """TensorFlow's tensors take no list of rows as an index."""
    return type(leaf).__module__.startswith("tensorflow")


def slice_items(leaf: Any, start: int, stop: int) -> Any:
    """Rows `start` to `stop` of a leaf that is not a plain array."""
    return leaf.iloc[start:stop] if hasattr(leaf, "iloc") else leaf[start:stop]


def is_row_list(node: Any) -> bool:
    """A list whose items are rows (strings, numbers, records), not fields."""
    return type(node) is list and not any(map(_holds_arrays, node))


def _holds_arrays(node: Any) -> bool:
    if isinstance(node, list | tuple | dict):
        children = node.values() if isinstance(node, dict) else node
        return any(map(_holds_arrays, children))
    return len(getattr(node, "shape", ())) > 0


def _kind(leaf: Any, may_split: bool) -> Kind:
    if _is_plain_array(leaf):
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


def _is_plain_array(leaf: Any) -> bool:
    """Whether its bytes are all there is: a masked array has more, a matrix rules."""
    return type(leaf) in (np.ndarray, np.memmap) and not leaf.dtype.hasobject


def _is_int64(leaf: Any) -> bool:
    return type(leaf) is int and -(2**63) <= leaf < 2**63


def _is_dense(leaf: Any) -> bool:
    holds_objects = getattr(getattr(leaf, "dtype", None), "kind", "") == "O"
    is_special = isinstance(leaf, np.ndarray)  # else its rows were plain
    return hasattr(leaf, "__array__") and not holds_objects and not is_special


def _spread(structure: Structure, splits: Sequence[bool] | None) -> list[bool]:
    """One flag per leaf from one flag per argument."""
    sizes = [len(leaf_names(child, "")) for child in structure.children]
    if splits is None:
        return [True] * sum(sizes)
    pairs = zip(splits, sizes, strict=True)
    return [flag for flag, size in pairs for _ in range(size)]


def _form(leaf: Any) -> Any:
    """What decides how a leaf is split and stored."""
    if isinstance(leaf, np.ndarray):
        return type(leaf), leaf.dtype, leaf.shape
    if isinstance(leaf, list):
        return list, len(leaf)
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return type(leaf), shape, dtype, _is_int64(leaf)


def _plan(leaves: list[Any], structure: Structure, splits: Sequence[bool]) -> Plan:
    kinds = tuple(map(_kind, leaves, splits))
    has_objects = Kind.OBJECT in kinds or Kind.ITEMS in kinds
    plan = Plan(structure, kinds, 0, (), has_objects)
    for name, leaf, kind in zip(
        leaf_names(structure, "batch"), leaves, kinds, strict=True
    ):
        if kind is Kind.OBJECT:
            _check_object(name, leaf)
    return plan


def _arrays(leaves: list[Any], plan: Plan) -> list[Any]:
    """The leaves, those that are arrays of some other library as NumPy's."""
    return [
        np.asarray(leaf) if kind is Kind.ROWS or kind is Kind.WHOLE else leaf
        for leaf, kind in zip(leaves, plan.kinds, strict=True)
    ]


_PLAIN = (numbers.Number, np.generic, str, bytes, enum.Enum)


def _check_object(name: str, leaf: Any) -> None:
    if (
        not isinstance(leaf, _PLAIN)
        and not callable(leaf)
        and not hasattr(leaf, "shape")
    ):
        raise BatchError(
            f"{name} is a {type(leaf).__name__}, which instep cannot split; expected "
            "arrays, lists of rows, numbers or strings, in dicts, tuples or lists. "
            "Convert it to an array, or let the loss close over it."
        )


def _common_rows(leaves: list[Any], plan: Plan) -> int:
    counts = [
        len(leaf) if isinstance(leaf, list) else leaf.shape[0]
        for leaf, kind in zip(leaves, plan.kinds, strict=True)
        if kind in (Kind.ROWS, Kind.ITEMS)
    ]
    if not counts or len(set(counts)) > 1 or counts[0] == 0:
        raise BatchError(_row_problem(counts, plan.kinds, plan.structure))
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
