"""`in_axes`, as `jax.vmap` takes it -> the axis of every leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.tree_util import tree_leaves, tree_map

from instep._errors import ArgumentError


class Default:
    """In place of an axis: a leaf that has axes is split along the first."""


DEFAULT = Default()
Axis = int | Default | None


def axes_of_leaves(
    in_axes: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_leaf: Callable[[Any], bool],
) -> list[Axis]:
    """One axis per leaf of (args, kwargs); None: not split.

    Args:
        in_axes: None: the default for every leaf. An int for all arguments, or a
            tuple with an int, None or a tree of them per argument.
        args: positional arguments.
        kwargs: keyword arguments; as in `jax.vmap`, `in_axes` says nothing of them.
        is_leaf: what counts as a leaf of the arguments.

    Raises:
        ArgumentError: `in_axes` does not fit the arguments.
    """
    given = _per_argument(in_axes, len(args))
    axes: list[Axis] = []
    for index, (prefix, argument) in enumerate(zip(given, args, strict=True)):
        axes += _spread(prefix, argument, is_leaf, f"args[{index}]")
    return axes + [DEFAULT] * len(tree_leaves(kwargs, is_leaf))


def _per_argument(in_axes: Any, number: int) -> list[Any]:
    if in_axes is None:
        return [DEFAULT] * number
    if _is_axis(in_axes):
        return [in_axes] * number
    if not isinstance(in_axes, tuple | list) or len(in_axes) != number:
        raise ArgumentError(
            f"in_axes={in_axes!r} for {number} positional arguments; expected an int, "
            "or a tuple with one entry (an int, None, or a tree of them) per argument"
        )
    return list(in_axes)


def _spread(
    prefix: Any, argument: Any, is_leaf: Callable[[Any], bool], name: str
) -> list[Axis]:
    """The prefix's axes, each as often as there are leaves below it."""
    axes: list[Axis] = []

    def note(axis: Any, subtree: Any) -> None:
        if not (axis is None or axis is DEFAULT or _is_axis(axis)):
            raise ArgumentError(f"in_axes has {axis!r} for {name}; expected an int")
        axes.extend([axis] * len(tree_leaves(subtree, is_leaf)))

    try:
        tree_map(note, prefix, argument, is_leaf=lambda node: node is None)
    except ArgumentError:
        raise
    except ValueError as error:
        raise ArgumentError(
            f"in_axes has {prefix!r} for {name}, which is no prefix of its tree: "
            f"{error}"
        ) from error
    return axes


def _is_axis(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
