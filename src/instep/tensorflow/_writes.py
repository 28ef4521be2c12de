"""Which variables a node of a graph writes, function bodies included."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from instep.tensorflow._nodes import (
    FunctionDef,
    GraphDef,
    NodeDef,
    called_functions,
    input_types,
    is_stateful,
    source,
)

_RESOURCE = 20
_READS = frozenset(
    [
        "ReadVariableOp",
        "VariableShape",
        "VarIsInitializedOp",
        "ResourceGather",
        "ResourceGatherNd",
        "DisableCopyOnRead",
        "IsVariableInitialized",
        "RefIdentity",
        "RefSwitch",
        "RefMerge",
        "RefEnter",
        "RefExit",
        "RefNextIteration",
        "RefSelect",
        "DestroyTemporaryVariable",
    ]
)
_PASSING = frozenset(
    [
        "Identity",
        "Switch",
        "Merge",
        "Enter",
        "Exit",
        "NextIteration",
        "RefIdentity",
        "RefSwitch",
        "RefMerge",
        "RefEnter",
        "RefExit",
        "RefNextIteration",
    ]
)
_NOT_VARIABLES = ("TensorArray", "Stack")


class Writes:
    """Answers for one graph; function bodies are looked at once."""

    def __init__(self, graph: GraphDef) -> None:
        self._nodes: dict[str, NodeDef] = {n.name: n for n in graph.node}
        self._functions: dict[str, FunctionDef] = {
            f.signature.name: f for f in graph.library.function
        }
        self._arguments = functools.cache(self._written_arguments)

    def of(self, writer: NodeDef) -> set[str]:
        """Names of the nodes whose variable this node writes."""
        origin = functools.partial(_origin, self._nodes)
        return set(self._written(writer, origin))

    @staticmethod
    def is_write(op: str) -> bool:
        """Whether the op itself writes its first input."""
        inputs = input_types(op)
        if op in _READS or not inputs or op.startswith(_NOT_VARIABLES):
            return False
        by_handle = inputs[0].type == _RESOURCE and is_stateful(op)
        known = op.startswith(("Assign", "Resource", "Rng", "Stateful"))
        # Old queues and tables pass a reference too, to a string of fixed type.
        by_reference = inputs[0].is_ref and inputs[0].type_attr
        return bool(by_reference or (by_handle and known))

    def _written(self, writer: NodeDef, origin: Callable[[str], str]) -> Iterator[str]:
        if self.is_write(writer.op):
            yield origin(writer.input[0])
        # If and Case take a condition before the arguments of their branches.
        skipped = int(writer.op in ("If", "StatelessIf", "Case", "StatelessCase"))
        for name in called_functions(writer, self._functions):
            for index in self._arguments(name):
                yield origin(writer.input[index + skipped])

    def _written_arguments(self, function: str) -> frozenset[int]:
        definition = self._functions[function]
        nodes = {n.name: n for n in definition.node_def}
        names = [argument.name for argument in definition.signature.input_arg]
        origin = functools.partial(_origin, nodes)
        written = {
            name for inner in nodes.values() for name in self._written(inner, origin)
        }
        return frozenset(k for k, name in enumerate(names) if name in written)


def _origin(nodes: dict[str, NodeDef], name: str) -> str:
    """The variable or argument that a handle comes from."""
    name = source(name)
    while name in nodes and nodes[name].op in _PASSING and nodes[name].input:
        name = source(nodes[name].input[0])
    return name
