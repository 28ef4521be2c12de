"""Pytrees: nested dicts, tuples, namedtuples, lists and dataclasses of leaves.

None is a leaf-less place, as in JAX: it comes back where it stood.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """A tree without its leaves. `kind` is its container type; None for a leaf."""

    kind: type | None
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()


LEAF = Structure(None)
NOTHING = Structure(type(None))


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda node: False
) -> tuple[list[Any], Structure]:
    """The leaves of `tree`, left to right, and what `unflatten` needs to put them back.

    Example:
        >>> flatten({"w": 1, "b": (2, None)})[0]
        [1, 2]
    """
    leaves: list[Any] = []
    return leaves, _flatten_into(tree, is_leaf, leaves)


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """The tree of this structure with these leaves."""
    return _build(structure, iter(leaves))


def leaves_like(tree: Any, structure: Structure) -> list[Any]:
    """The leaves of `tree` in the order of `structure`; dicts may have another order.

    Raises:
        ValueError: the tree has another structure.

    Example:
        >>> leaves_like({"b": 2, "w": 1}, flatten({"w": 0, "b": 0})[1])
        [1, 2]
    """
    parts = _parts(tree)
    if structure.kind is None:
        if parts is not None or tree is None:
            raise ValueError(f"a {type(tree).__name__} in place of a leaf")
        return [tree]
    keys, children = ((), ()) if parts is None else parts
    if set(keys) != set(structure.keys) or (parts is None and tree is not None):
        raise ValueError(f"the keys {keys}; expected {structure.keys}")
    found = dict(zip(keys, children, strict=True))
    pairs = zip(structure.keys, structure.children, strict=True)
    return [leaf for key, child in pairs for leaf in leaves_like(found[key], child)]


def leaf_names(structure: Structure, root: str) -> list[str]:
    """How to write each leaf in Python, for error messages: `batch[0]['text']`."""
    return list(_walk_names(structure, root))


def _flatten_into(
    tree: Any, is_leaf: Callable[[Any], bool], leaves: list[Any]
) -> Structure:
    if tree is None:
        return NOTHING
    parts = None if is_leaf(tree) else _parts(tree)
    if parts is None:
        leaves.append(tree)
        return LEAF
    keys, children = parts
    below = tuple(_flatten_into(child, is_leaf, leaves) for child in children)
    return Structure(type(tree), keys, below)


def _parts(tree: Any) -> tuple[tuple[Any, ...], Iterable[Any]] | None:
    """Keys and children of a container; None for anything else."""
    if isinstance(tree, dict):
        return tuple(tree), tree.values()
    if isinstance(tree, tuple | list):
        keys = getattr(tree, "_fields", None) or tuple(range(len(tree)))
        return tuple(keys), tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = tuple(f.name for f in dataclasses.fields(tree) if f.init)
        return names, [getattr(tree, name) for name in names]
    return None


def _build(structure: Structure, leaves: Iterator[Any]) -> Any:
    kind = structure.kind
    if kind is None:
        return next(leaves)
    if kind is type(None):
        return None
    children = [_build(child, leaves) for child in structure.children]
    if issubclass(kind, dict):
        return _build_dict(kind, dict(zip(structure.keys, children, strict=True)))
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*children)
    if issubclass(kind, tuple | list):
        return kind(children)
    return kind(**dict(zip(structure.keys, children, strict=True)))


def _build_dict(kind: type, items: dict[Any, Any]) -> Any:
    """The same kind of dict; a plain one where the kind takes other arguments."""
    try:
        return kind(items)
    except TypeError:  # defaultdict wants its factory first
        return items


def _walk_names(structure: Structure, name: str) -> Iterator[str]:
    kind = structure.kind
    if kind is None:
        yield name
    for key, child in zip(structure.keys, structure.children, strict=True):
        plain = kind is not None and issubclass(kind, dict | list | tuple)
        indexed = plain and not hasattr(kind, "_fields")
        yield from _walk_names(
            child, f"{name}[{key!r}]" if indexed else f"{name}.{key}"
        )
