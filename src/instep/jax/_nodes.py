"""Pytree nodes that the workers cannot import: their registrations travel.

A class of a module registers itself where the module is imported. One of `__main__`,
or local to a function, travels by value, and its registration has to go with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jax._src import tree_util as _tree_util
from jax.tree_util import PyTreeDef, register_dataclass, register_pytree_node


class Registration:
    """One kind of node; registered where it is unpickled, unless it is already."""

    def __init__(self, kind: type, register: Callable[[type], object]) -> None:
        self._parts = kind, register

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _register, self._parts


def registrations_of(treedef: PyTreeDef) -> tuple[Registration, ...]:
    """Of the nodes in a tree that travel by value."""
    kinds = dict.fromkeys(_kinds(treedef))
    return tuple(_registration(kind) for kind in kinds if _travels_by_value(kind))


def registrations_of_main() -> tuple[Registration, ...]:
    """Of all nodes of `__main__`: the loss may return some that it was not given."""
    return tuple(
        _registration(kind)
        for kind in _registered()
        if getattr(kind, "__module__", "") == "__main__" and _is_global(kind)
    )


def _register(kind: type, register: Callable[[type], object]) -> Registration:
    if kind not in _registered():
        register(kind)
    return Registration(kind, register)


def _registration(kind: type) -> Registration:
    entry = _registered()[kind]
    to_iter, from_iter = entry.to_iter, entry.from_iter
    if not getattr(to_iter, "__qualname__", "").startswith("register_dataclass."):
        register = partial(
            register_pytree_node, flatten_func=to_iter, unflatten_func=from_iter
        )
        return Registration(kind, register)
    # A tree's pickle tells dataclasses from other nodes, so they must stay such.
    fields = inspect.getclosurevars(to_iter).nonlocals
    data, meta = fields["data_fields"], fields["meta_fields"]
    unused = sorted({*inspect.signature(kind).parameters} - {*data, *meta})
    register = partial(
        register_dataclass, data_fields=data, meta_fields=meta, drop_fields=unused
    )
    return Registration(kind, register)


def _registered() -> dict[type, Any]:
    # JAX has no public way to ask for a node's functions.
    registered: dict[type, Any] = getattr(_tree_util, "_registry", {})
    return registered


def _travels_by_value(kind: type) -> bool:
    return kind in _registered() and (
        kind.__module__ == "__main__" or not _is_global(kind)
    )


def _is_global(kind: type) -> bool:
    return "<locals>" not in kind.__qualname__


def _kinds(treedef: PyTreeDef) -> Iterator[type]:
    data = treedef.node_data()
    if data is not None:
        yield data[0]
    for child in treedef.children():
        yield from _kinds(child)
