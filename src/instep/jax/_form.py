"""How the arguments of a call travel, leaf by leaf, and how they are put together.

arguments ── leaves ──> arrays, one each ──> shared memory
    the rest (the tree, what is no array) is the form: pickled, sent when it changes
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef, tree_unflatten

from instep.jax._leaves import fold_keys, weakly_typed
from instep.jax._nodes import Registration


class Role(enum.Enum):
    """What becomes of a leaf."""

    PARAM = "differentiated, the same for every shard"
    WHOLE = "the same for every shard"
    ROWS = "split along an axis"
    STATIC = "no array: a part of the form"


class Leaf(NamedTuple):
    """The form of one leaf.

    Attributes:
        role: what becomes of it.
        axis: the axis of its rows; in transit it comes first.
        key: the implementation, where the leaf is a typed PRNG key (or some); its
            data travels.
        weak: the Python type whose promotion rules the leaf follows, if it does.
        is_text: a list of strings.
        static: the value itself, where the role is STATIC.
    """

    role: Role
    axis: int = 0
    key: Any = None
    weak: type | None = None
    is_text: bool = False
    static: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """All that the workers have to know of a call besides its arrays.

    Attributes:
        types: pytree nodes to register before the tree can be read.
        treedef: of (args, kwargs).
        leaves: in the tree's order.
    """

    types: tuple[Registration, ...]
    treedef: PyTreeDef
    leaves: tuple[Leaf, ...]

    def in_place(self, whole: Iterable[Any], rows: Iterable[Any]) -> list[Any]:
        """The leaves in their order, from those that are whole and those by rows."""
        whole, rows = iter(whole), iter(rows)
        return [
            leaf.static
            if leaf.role is Role.STATIC
            else _with_axis(next(rows), leaf.axis)
            if leaf.role is Role.ROWS
            else next(whole)
            for leaf in self.leaves
        ]

    def parted(self, leaves: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """(those that are differentiated, the others that travel)."""
        params, rest = list[Any](), list[Any]()
        for leaf, value in zip(self.leaves, leaves, strict=True):
            if leaf.role is Role.PARAM:
                params.append(value)
            elif leaf.role is not Role.STATIC:
                rest.append(value)
        return params, rest

    @property
    def folds_keys(self) -> bool:
        """Whether a key is the same for all shards, so that each folds it."""
        return any(leaf.key and leaf.role is not Role.ROWS for leaf in self.leaves)

    @property
    def has_text(self) -> bool:
        """Whether there are strings that differ from batch to batch."""
        return any(leaf.is_text for leaf in self.leaves)


def arguments(
    form: Form, params: Iterable[Any], rest: Iterable[Any], shard: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) as the loss expects them.

    Args:
        form: of the call.
        params: the leaves that are differentiated.
        rest: the other leaves that travelled.
        shard: index to fold into keys that all shards share; None: leave them.
    """
    params, rest = iter(params), iter(rest)
    leaves = []
    for leaf in form.leaves:
        if leaf.role is Role.STATIC:
            leaves.append(leaf.static)
        else:
            value = next(params if leaf.role is Role.PARAM else rest)
            leaves.append(_restored(leaf, value, shard))
    args, kwargs = tree_unflatten(form.treedef, leaves)
    return args, kwargs


def _with_axis(value: Any, axis: int) -> Any:
    """The rows back at the axis where the loss expects them."""
    return np.moveaxis(value, 0, axis) if axis else value


def _restored(leaf: Leaf, value: Any, shard: Any) -> Any:
    if leaf.key is not None:
        keys = jax.random.wrap_key_data(value, impl=leaf.key)
        is_own = leaf.role is Role.ROWS or shard is None
        return keys if is_own else fold_keys(keys, shard)
    return weakly_typed(value, leaf.weak)
