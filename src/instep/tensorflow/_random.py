"""A graph's stateful random ops -> stateless ones, keyed by the shard's seed.

A stateful op (`RandomUniform`) keeps a counter in its kernel: what it gives depends
on which process ran it how often before. In its place stand

    VarHandleOp("instep/random/<k>") -> RngReadAndSkip -> GatherV2 -> stateless op

The variable holds (counter, 0, key) as int64. The worker sets it before every shard,
so numbers follow from (seed, step, shard) alone, and an op inside a loop still draws
fresh ones each time round, because reading advances the counter. A variable is found
by its name in the worker's session, inside function bodies too. For every op to
draw in a fixed order, each call of a function that draws gets a copy of its own, and
loops that draw run one iteration at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import tensorflow as tf

from instep._errors import ShipError
from instep.tensorflow._calls import bodies, separate_calls
from instep.tensorflow._nodes import (
    GraphDef,
    NodeDef,
    constant,
    is_stateful,
    node,
    source,
)

PHILOX = 1


@dataclass(frozen=True, slots=True)
class _Rule:
    """The stateless op, where its seed goes among the inputs, its attributes."""

    op: str
    seed_at: int
    attributes: dict[str, str]
    parameter: str = ""


_SHAPE_FIRST = {"dtype": "dtype", "T": "T"}
_RULES = {
    "RandomUniform": _Rule("StatelessRandomUniform", 1, _SHAPE_FIRST),
    "RandomStandardNormal": _Rule("StatelessRandomNormal", 1, _SHAPE_FIRST),
    "TruncatedNormal": _Rule("StatelessTruncatedNormal", 1, _SHAPE_FIRST),
    "RandomUniformInt": _Rule(
        "StatelessRandomUniformInt", 1, {"dtype": "Tout", "T": "T"}
    ),
    "ParameterizedTruncatedNormal": _Rule(
        "StatelessParameterizedTruncatedNormal", 1, {"dtype": "dtype", "S": "T"}
    ),
    "Multinomial": _Rule(
        "StatelessMultinomial", 2, {"T": "T", "output_dtype": "output_dtype"}
    ),
    # These two give shape + parameter.shape; their stateless kin want it in full.
    "RandomGamma": _Rule(
        "StatelessRandomGammaV2", 1, {"dtype": "T", "T": "S"}, parameter="T"
    ),
    "RandomPoissonV2": _Rule(
        "StatelessRandomPoisson",
        1,
        {"Rtype": "R", "dtype": "dtype", "T": "S"},
        parameter="R",
    ),
}


def is_random(op: str, attributes: Any) -> bool:
    """Whether the op draws from a generator that lives in its kernel."""
    return "seed2" in attributes and is_stateful(op)


def without_state(graph: GraphDef) -> tuple[int, ...]:
    """Rewrites the graph in place; returns one key per random op.

    Keys are hashed from the op's own seeds and its position, never from names:
    names of functions carry numbers that differ from process to process.

    Raises:
        ShipError: a random op that has no stateless version.
    """
    separate_calls(graph, lambda n: is_random(n.op, n.attr))
    keys: list[int] = []
    for body, in_function in bodies(graph):
        drawing = [n for n in body if is_random(n.op, n.attr)]
        for old in drawing:
            _rewrite(body, old, len(keys), in_function)
            keys.append(_key(len(keys), old.attr["seed"].i, old.attr["seed2"].i))
        if drawing:
            _run_loops_in_order(body)
    return tuple(keys)


def states(keys: Sequence[int], seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What the generators hold before a shard: (counter, 0, key), one row per op."""
    rows = np.zeros((len(keys), 3), np.int64)
    rows[:, 2] = [_key(key, seed) for key in keys]
    return rows


def variable_name(index: int) -> str:
    """The name under which a random op finds its generator."""
    return f"instep/random/{index}"


def _key(*numbers: int) -> int:
    """63 bits hashed from whole numbers."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def _run_loops_in_order(body: Any) -> None:
    """Iterations of 1-style loops may overlap; then they would draw in any order."""
    for entry in body:
        if entry.op in ("Enter", "RefEnter"):
            entry.attr["parallel_iterations"].i = 1


def _rewrite(body: Any, old: NodeDef, index: int, in_function: bool) -> None:
    """Puts the stateless op in the place, and under the name, of the old one."""
    rule = _RULES.get(old.op)
    if rule is None:
        raise ShipError(
            f"the loss draws random numbers with {old.op} (node {old.name!r}), whose "
            "generator lives in one process and cannot be seeded per shard; draw "
            "them before the loss and pass them in the batch, or use tf.random.*"
        )
    controls = [name for name in old.input if name.startswith("^")]
    inputs = [name for name in old.input if not name.startswith("^")]
    # In a 1-style loop a node belongs to the loop only by what it depends on.
    anchor = [] if in_function else [f"^{source(inputs[0])}"]
    scope = _Scope(body, f"{old.name}/instep", in_function, anchor)
    if rule.parameter:
        inputs[0] = scope.joined_shape(old, inputs, rule.parameter)
    inputs.insert(rule.seed_at, scope.seed(index))
    new = node(rule.op, old.name, [*inputs, *controls], Tseed=tf.int64)
    for name, old_name in rule.attributes.items():
        new.attr[name].CopyFrom(old.attr[old_name])
    body.remove(old)
    body.append(new)


@dataclass(frozen=True, slots=True)
class _Scope:
    """Adds helper nodes beside a random op."""

    body: Any
    prefix: str
    in_function: bool
    anchor: list[str]

    def seed(self, index: int) -> str:
        """(key, counter), fresh at every reading."""
        handle = self._add(
            "VarHandleOp",
            "state",
            self.anchor,
            "resource",
            dtype=tf.int64,
            shape=tf.TensorShape([3]),
            shared_name=variable_name(index),
            container="",
        )
        philox = self._constant("algorithm", np.int32(PHILOX))
        delta = self._constant("delta", np.uint64(1))
        state = self._add("RngReadAndSkip", "read", [handle, philox, delta], "value")
        places = self._constant("places", np.array([2, 0], np.int32))
        axis = self._constant("axis", np.int32(0))
        types = {"Tparams": tf.int64, "Tindices": tf.int32, "Taxis": tf.int32}
        return self._add("GatherV2", "seed", [state, places, axis], "output", **types)

    def joined_shape(self, old: NodeDef, inputs: list[str], parameter: str) -> str:
        """shape + parameter.shape"""
        kind, value = (tf.dtypes.as_dtype(old.attr[a].type) for a in ("S", parameter))
        types = {"T": value, "out_type": kind}
        inner = self._add("Shape", "shape", [inputs[1]], "output", **types)
        parts = [inputs[0], inner, self._constant("join", np.int32(0))]
        return self._add("ConcatV2", "whole", parts, "output", N=2, T=kind)

    def _add(
        self, op: str, name: str, inputs: list[str], output: str, **attributes: Any
    ) -> str:
        self.body.append(node(op, f"{self.prefix}/{name}", inputs, **attributes))
        return self._reference(name, output)

    def _constant(self, name: str, value: Any) -> str:
        made = constant(f"{self.prefix}/{name}", value)
        made.input.extend(self.anchor)
        self.body.append(made)
        return self._reference(name, "output")

    def _reference(self, name: str, output: str) -> str:
        """Function bodies name a tensor by node, output and index."""
        full = f"{self.prefix}/{name}"
        return f"{full}:{output}:0" if self.in_function else full
