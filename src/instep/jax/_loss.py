"""Calls the user's loss, traced or not, and parts what it returns.

    loss(*args, **kwargs) -> value | Weighted | (value | Weighted, aux)
    LossCall(...)         -> value, (weight, arrays of aux), and the rest as `Static`

The rest (texts, Python numbers, the tree) is known when the loss is traced and cannot
pass through `jax.jit` as a value: it is part of the result's structure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef, keystr, tree_flatten_with_path, tree_unflatten

from instep._errors import LossError
from instep._values import Marker, Weighted, is_marked, marker_of, unmarked
from instep.jax._form import Form, arguments
from instep.jax._leaves import is_array, is_text, key_kind, weak_kind


class AuxLeaf(NamedTuple):
    """What is known of a leaf of aux besides its array.

    Attributes:
        name: how it is written: aux['accuracy'].
        marker: how it is combined, if that was said.
        is_array: its value is an array; else it is `static`.
        key: the implementation of a typed PRNG key.
    """

    name: str
    marker: Marker
    is_array: bool
    key: Any
    static: Any


class AuxForm(NamedTuple):
    """The aux of one shard without its arrays."""

    treedef: PyTreeDef
    leaves: tuple[AuxLeaf, ...]


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False, slots=True)
class Static:
    """What a traced loss returns besides arrays: a node without leaves.

    Attributes:
        weight: where it is a plain number, which keeps its 64 bits.
        weak: the Python type that the value follows, where it is weakly typed.
        aux: None where there is none.
    """

    weight: Any
    weak: type | None
    aux: AuxForm | None

    def tree_flatten(self) -> tuple[tuple[()], Static]:
        return (), self

    @classmethod
    def tree_unflatten(cls, static: Static, children: Sequence[Any]) -> Static:
        return static


Parts = tuple[Any, tuple[Any, list[Any], Static]]


@dataclass(frozen=True, slots=True)
class LossCall:
    """The loss as a function of flat lists, as JAX differentiates it."""

    loss: Callable[..., Any]
    has_aux: bool
    form: Form

    def __call__(self, params: list[Any], rest: list[Any], shard: Any) -> Parts:
        """(value, (weight, arrays of aux, Static)).

        Args:
            params: the leaves that are differentiated.
            rest: the other leaves that travelled.
            shard: index to fold into keys; None: leave them.
        """
        args, kwargs = arguments(self.form, params, rest, shard)
        value, weight, aux = self._parted(self.loss(*args, **kwargs))
        _check_scalar(value)
        aux_form, arrays = _parted_aux(aux) if self.has_aux else (None, [])
        array, plain = (weight, None) if is_array(weight) else (None, weight)
        weak = weak_kind(value) if is_array(value) else None
        return value, (array, arrays, Static(plain, weak, aux_form))

    def _parted(self, value: Any) -> tuple[Any, Any, Any]:
        weight = aux = None
        if self.has_aux:
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise LossError(
                    f"the loss returned a {type(value).__name__}; expected (loss, aux)"
                )
            value, aux = value
        if isinstance(value, Weighted):
            value, weight = value.value, value.weight
        return value, weight, aux


def rebuilt_aux(form: AuxForm, values: Sequence[Any]) -> Any:
    """The user's aux with these values for leaves."""
    return tree_unflatten(form.treedef, values)


def _parted_aux(aux: Any) -> tuple[AuxForm, list[Any]]:
    """The aux without its arrays, and these."""
    pairs, treedef = tree_flatten_with_path(aux, is_leaf=_is_aux_leaf)
    leaves, arrays = [], []
    for path, leaf in pairs:
        value, marker, name = unmarked(leaf), marker_of(leaf), "aux" + keystr(path)
        if not is_array(value):
            leaves.append(AuxLeaf(name, marker, False, None, value))
            continue
        key = key_kind(value)
        arrays.append(jax.random.key_data(value) if key else value)
        leaves.append(AuxLeaf(name, marker, True, key, None))
    return AuxForm(treedef, tuple(leaves)), arrays


def _is_aux_leaf(node: Any) -> bool:
    return is_marked(node) or is_text(node)


def _check_scalar(value: Any) -> None:
    if not is_array(value) and not isinstance(value, int | float | complex):
        raise LossError(f"the loss returned {value!r}; expected a scalar array")
    if np.shape(value) != ():
        raise LossError(
            f"the loss has shape {np.shape(value)}; expected a scalar. Average it over "
            "the rows (jnp.mean), or add it up and use reduction='sum'"
        )
