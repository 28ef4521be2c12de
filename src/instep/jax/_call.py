"""Takes a call's arguments apart; the plan is kept for calls of the same form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef, keystr, tree_flatten, tree_flatten_with_path

from instep._errors import BatchError
from instep._program import Array, Output, Rule
from instep._ship import ship_values
from instep.jax._axes import axes_of_leaves
from instep.jax._flags import Flags, current_flags
from instep.jax._form import Form, Leaf, Role
from instep.jax._leaves import NUMBERS, is_text
from instep.jax._nodes import registrations_of
from instep.jax._roles import dtype_in_transit, in_transit, leaf_form

_MAX_PLANS = 64  # forms of calls that a pool remembers


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What calls of one form have in common.

    Attributes:
        form: what the workers are told.
        spec: the same, and JAX's flags, pickled: an array, so that it travels and is
            compared like one.
        dtypes: per leaf, that of its array; None where there is none.
        rows: in the batch.
        outputs: under either rule, one gradient per differentiated leaf.
        weak: one per output, the Python type that it follows, if it does.
        gradients: per entry of `argnums`, the tree and the range in `outputs`.
    """

    form: Form
    spec: Array
    dtypes: tuple[np.dtype[Any] | None, ...]
    rows: int
    outputs: dict[Rule, list[Output]]
    weak: tuple[type | None, ...]
    gradients: tuple[tuple[PyTreeDef, slice], ...]

    def transit(self, leaves: Sequence[Any]) -> list[Any]:
        """What travels of each leaf: arrays, rows first, or a number or text."""
        triples = zip(leaves, self.form.leaves, self.dtypes, strict=True)
        return [in_transit(*triple) for triple in triples]

    def place(self, values: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
        """What travels, parted: (for every shard, by rows)."""
        whole: list[Any] = [self.spec]
        rows: list[Any] = []
        for leaf, value in zip(self.form.leaves, values, strict=True):
            if leaf.role is Role.ROWS:
                rows.append(value)
            elif leaf.role is not Role.STATIC:
                whole.append(value)
        return whole, tuple(rows)


class Call(NamedTuple):
    """A call's leaves and the plan they follow."""

    plan: Plan
    leaves: list[Any]


class Caller:
    """Turns arguments into calls.

    Args:
        argnums: what is differentiated, as in `jax.value_and_grad`.
        in_axes: what is split, as in `jax.vmap`; None: by default.
    """

    def __init__(self, argnums: int | tuple[int, ...], in_axes: Any) -> None:
        self._argnums = argnums if isinstance(argnums, tuple) else (argnums,)
        self._in_axes = in_axes
        self._plans: dict[Any, Plan] = {}

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call, taken apart.

        Raises:
            BatchError: the arguments cannot be split; names the leaf.
            GradientTypeError: a differentiated leaf has no gradient.
            ArgumentError: `in_axes` does not fit them.
        """
        leaves, treedef = tree_flatten((args, kwargs))
        if str in map(type, leaves):
            leaves, treedef = tree_flatten((args, kwargs), is_text)
        flags = current_flags()
        try:
            key = treedef, flags, tuple(map(_signature, leaves))
            plan = self._plans.get(key)
        except TypeError:  # unhashable: a leaf that nobody can use; says which
            key, plan = None, None
        if plan is None:
            plan = self._plan(args, kwargs, flags)
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return Call(plan, leaves)

    def _plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], flags: Flags
    ) -> Plan:
        pairs, treedef = tree_flatten_with_path((args, kwargs), is_text)
        names = [_name(path) for path, _ in pairs]
        leaves = [leaf for _, leaf in pairs]
        argnums = self._positions(len(args))
        is_param = [path[0].idx == 0 and path[1].idx in argnums for path, _ in pairs]
        axes = axes_of_leaves(self._in_axes, args, kwargs, is_text)
        forms = tuple(map(leaf_form, names, leaves, axes, is_param))
        rows = _common_rows(names, leaves, forms)
        form = Form(registrations_of(treedef), treedef, forms)
        dtypes = tuple(map(dtype_in_transit, leaves, forms))
        quadruples = zip(names, leaves, dtypes, forms, strict=True)
        means = [
            Output(np.shape(leaf), dtype, name=name)
            for name, leaf, dtype, its in quadruples
            if its.role is Role.PARAM and dtype is not None
        ]
        weak = tuple(form.weak for form in forms if form.role is Role.PARAM)
        sums = [replace(output, rule="sum") for output in means]
        outputs: dict[Rule, list[Output]] = {"mean": means, "sum": sums}
        gradients = tuple(_places(args, argnums))
        spec = _spec(flags, form)
        return Plan(form, spec, dtypes, rows, outputs, weak, gradients)

    def _positions(self, number: int) -> list[int]:
        wrong = [k for k in self._argnums if not -number <= k < number]
        if wrong:
            raise TypeError(
                f"argnums={wrong[0]} of a call with {number} positional arguments; "
                "what is differentiated must be passed by position"
            )
        return [k % number for k in self._argnums]


def _signature(leaf: Any) -> Any:
    """What of a leaf decides its form."""
    kind = type(leaf)
    if hasattr(leaf, "dtype"):
        return kind, leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
    if kind in NUMBERS:
        return kind
    return (list, len(leaf)) if kind is list else (kind, leaf)


def _common_rows(names: list[str], leaves: list[Any], forms: tuple[Leaf, ...]) -> int:
    counts = {
        name: len(leaf) if form.is_text else leaf.shape[form.axis]
        for name, leaf, form in zip(names, leaves, forms, strict=True)
        if form.role is Role.ROWS
    }
    if not counts:
        raise BatchError(
            "the batch has nothing to split; expected at least one array with an axis "
            "of rows among the arguments that are not differentiated"
        )
    first, rows = next(iter(counts.items()))
    if rows == 0:
        raise BatchError(f"{first} has 0 rows; expected at least one")
    for name, count in counts.items():
        if count != rows:
            leaf = leaves[names.index(name)]
            raise BatchError(
                f"{name} has {count} rows but {first} has {rows}; every array that is "
                f"split needs the same number of them{_hint(leaf)}"
            )
    return rows


def _hint(leaf: Any) -> str:
    if getattr(leaf, "dtype", None) == np.uint32 and np.shape(leaf) == (2,):
        return (
            ". If it is a PRNG key, make it by jax.random.key, or give it None in "
            "in_axes"
        )
    return "; give what goes whole to every shard None in in_axes"


def _places(args: tuple[Any, ...], argnums: list[int]) -> list[tuple[PyTreeDef, slice]]:
    """Per entry of `argnums` its tree, and where its leaves are among all of them."""
    starts, end = {}, 0
    for index in sorted(set(argnums)):
        treedef: Any = jax.tree_util.tree_structure(args[index])
        starts[index] = treedef, slice(end, end + treedef.num_leaves)
        end += treedef.num_leaves
    return [starts[index] for index in argnums]


def _spec(flags: Flags, form: Form) -> Array:
    # A name where the form has a value: static values and nodes are the user's.
    text = ship_values([(flags, form)], lambda: ["the tree of the arguments"])
    return np.frombuffer(text, np.uint8)


def _name(path: tuple[Any, ...]) -> str:
    return ("kwargs" if path[0].idx else "args") + keystr(path[1:])
