"""The part of a graph that a loss and its gradients need, cut out to be shipped.

batch tensor ─X─► Placeholder ─┐
other placeholder ─────────────┼─► ops of the loss ─► loss, gradients
variable handle ───────────────┘        ▲
                                        │ control edge
                          update ops, py_func ...  ─X─ stay in the master
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from instep._errors import ShipError
from instep.tensorflow._nodes import (
    FunctionDef,
    GraphDef,
    NodeDef,
    called_functions,
    is_stateful,
    source,
)
from instep.tensorflow._random import is_random
from instep.tensorflow._writes import Writes

VARIABLES = ("VarHandleOp", "VariableV2", "Variable")
PLACEHOLDERS = ("Placeholder", "PlaceholderV2", "PlaceholderWithDefault")

# Ops with state that do the same in any process. The rest (queues, tables,
# iterators, Python functions) live in the process that made them.
_SHIPPABLE = frozenset(
    [
        "VarHandleOp",
        "VariableV2",
        "Variable",
        "ReadVariableOp",
        "VariableShape",
        "VarIsInitializedOp",
        "IsVariableInitialized",
        "ResourceGather",
        "ResourceGatherNd",
        "DisableCopyOnRead",
        "TemporaryVariable",
        "DestroyTemporaryVariable",
        "While",
        "If",
        "Case",
        "StatefulPartitionedCall",
        "XlaLaunch",
        "Assert",
        "Abort",
        "Print",
        "PrintV2",
        "CheckNumerics",
        "CheckNumericsV2",
        "Timestamp",
        "StackV2",
        "StackPushV2",
        "StackPopV2",
        "StackCloseV2",
    ]
)
_SHIPPABLE_PREFIXES = ("TensorArray", "Optional", "_Xla")


@dataclass(frozen=True, slots=True)
class Closure:
    """A graph cut out, and the ops on its control edges that stay behind."""

    graph: GraphDef
    left_behind: tuple[str, ...]


def cut_out(
    graph: GraphDef,
    targets: Sequence[str],
    replaced: Mapping[str, NodeDef],
    *,
    leave_effects: bool,
) -> Closure:
    """The nodes that `targets` need, down to the tensors in `replaced`.

    Args:
        graph: a GraphDef with its function library.
        targets: names of tensors or ops.
        replaced: tensor name (`a:0`) -> the node that gives it instead.
        leave_effects: ops that write variables or cannot leave this process stay
            behind where only a control edge leads to them.

    Raises:
        ShipError: the targets compute with an op that cannot be shipped.
    """
    walk = _Walk(graph, replaced, leave_effects)
    walk.visit(targets)
    cut = tf.compat.v1.GraphDef(versions=graph.versions)
    cut.node.extend(n for n in graph.node if n.name in walk.kept)
    renamed = {tensor: new.name for tensor, new in replaced.items()}
    for kept in cut.node:
        _clean(kept, walk, renamed)
    used = {source(i) for kept in cut.node for i in kept.input} | {
        source(renamed.get(_tensor(t), t)) for t in targets
    }
    news = {new.name: new for new in replaced.values() if new.name in used}
    cut.node.extend(news.values())
    _add_functions(cut, walk.functions)
    check_shippable(cut)
    return Closure(cut, tuple(sorted(walk.left_behind)))


def check_shippable(graph: GraphDef) -> None:
    """Raises ShipError if an op of the graph or its functions cannot be shipped."""
    bodies = [graph.node, *(f.node_def for f in graph.library.function)]
    bad = [n for body in bodies for n in body if not _can_ship(n)]
    if bad:
        raise ShipError(_ship_problem(bad))


def reached(
    graph: GraphDef, targets: Sequence[str], stop: Collection[str] = ()
) -> Iterator[NodeDef]:
    """All nodes that `targets` depend on by data, not beyond the tensors in `stop`."""
    nodes = {n.name: n for n in graph.node}
    queue = [tensor for tensor in targets if _tensor(tensor) not in stop]
    seen = set[str]()
    while queue:
        name = source(queue.pop())
        if name in seen or name not in nodes:
            continue
        seen.add(name)
        yield nodes[name]
        inputs = [i for i in nodes[name].input if not i.startswith("^")]
        queue.extend(i for i in inputs if _tensor(i) not in stop)


class _Walk:
    """Backwards from the targets; knows which control edges to drop."""

    def __init__(
        self, graph: GraphDef, replaced: Mapping[str, NodeDef], leave_effects: bool
    ) -> None:
        self.nodes: dict[str, NodeDef] = {n.name: n for n in graph.node}
        self.functions: dict[str, FunctionDef] = {
            f.signature.name: f for f in graph.library.function
        }
        self.replaced = replaced
        self.writes = Writes(graph)
        self.leave_effects = leave_effects
        self.kept = set[str]()
        self.harmless = set[str]()
        self.left_behind = set[str]()

    def visit(self, targets: Sequence[str]) -> None:
        queue = [source(t) for t in targets if _tensor(t) not in self.replaced]
        while queue:
            name = queue.pop()
            if name not in self.kept:
                self.kept.add(name)
                queue.extend(map(source, self.inputs(self.nodes[name])))

    def inputs(self, of: NodeDef) -> list[str]:
        """Inputs to follow; control edges to ops that must stay are left behind."""
        data = [i for i in of.input if not i.startswith("^")]
        controls = [i for i in of.input if i.startswith("^")]
        self.left_behind |= {source(c) for c in controls if self.stays(source(c))}
        return [i for i in data if _tensor(i) not in self.replaced] + [
            c for c in controls if source(c) not in self.left_behind
        ]

    def stays(self, name: str) -> bool:
        """Whether the op, or one it needs, must run in the master."""
        queue, seen = [name] if self.leave_effects else [], set[str]()
        while queue:
            name = queue.pop()
            if name in seen or name in self.kept or name in self.harmless:
                continue
            seen.add(name)
            if self.writes.of(self.nodes[name]) or not _can_ship(self.nodes[name]):
                return True
            tensors = self.nodes[name].input
            queue.extend(source(t) for t in tensors if _tensor(t) not in self.replaced)
        self.harmless |= seen
        return False


def _clean(kept: NodeDef, walk: _Walk, renamed: Mapping[str, str]) -> None:
    """Points inputs at the replacements; drops devices and colocation."""
    inputs = [
        renamed.get(_tensor(i), i) if not i.startswith("^") else i
        for i in kept.input
        if not (i.startswith("^") and source(i) not in walk.kept)
    ]
    del kept.input[:]
    kept.input.extend(inputs)
    kept.device = ""
    kept.attr.pop("_class", None)


def _add_functions(cut: GraphDef, functions: Mapping[str, FunctionDef]) -> None:
    """Copies the functions that the cut graph calls, and those they call."""
    queue, wanted = list(cut.node), dict[str, FunctionDef]()
    for caller in queue:
        for name in called_functions(caller, functions):
            if name not in wanted:
                wanted[name] = functions[name]
                queue.extend(functions[name].node_def)
    cut.library.function.extend(wanted.values())
    for function in cut.library.function:
        for inner in function.node_def:
            inner.device = ""
            inner.attr.pop("_class", None)


def _can_ship(candidate: NodeDef) -> bool:
    op = candidate.op
    return (
        not is_stateful(op)
        or op in _SHIPPABLE
        or op.startswith(_SHIPPABLE_PREFIXES)
        or is_random(op, candidate.attr)
        or Writes.is_write(op)
    )


def _ship_problem(bad: Sequence[NodeDef]) -> str:
    names = sorted({f"{n.op} (node {n.name!r})" for n in bad})
    return (
        f"the loss computes with {', '.join(names)}, which lives in this process and "
        "cannot be computed in another; compute it before the loss and pass its "
        "result in the batch"
    )


def _tensor(name: str) -> str:
    """`a` is short for `a:0`."""
    return name if ":" in name or name.startswith("^") else f"{name}:0"
