"""Functions of a graph, each call with a copy of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from instep.tensorflow._nodes import (
    FunctionDef,
    GraphDef,
    NodeDef,
    called_functions,
)

_LOOPS = ("While", "StatelessWhile")


def bodies(graph: GraphDef) -> Iterator[tuple[Any, bool]]:
    """The graph's nodes, then those of its functions in the order of first call.

    Each with whether it is a function's body.
    """
    functions = _functions(graph)
    yield graph.node, False
    queue, seen = list(graph.node), set[str]()
    for caller in queue:
        for name in called_functions(caller, functions):
            if name not in seen:
                seen.add(name)
                queue.extend(functions[name].node_def)
                yield functions[name].node_def, True


def separate_calls(graph: GraphDef, is_special: Callable[[NodeDef], bool]) -> None:
    """Copies functions with special nodes until none of them is called twice.

    Loops that call one then run their iterations one after the other.
    """
    functions = _functions(graph)

    @functools.cache
    def has_special(name: str) -> bool:
        body = functions[name].node_def
        return any(map(is_special, body)) or any(
            has_special(inner) for n in body for inner in called_functions(n, functions)
        )

    queue = list(graph.node)
    for caller in queue:
        special = [f for f in called_functions(caller, functions) if has_special(f)]
        if special and caller.op in _LOOPS:
            caller.attr["parallel_iterations"].i = 1
        for name in special:
            copy = graph.library.function.add()
            copy.CopyFrom(functions[name])
            copy.signature.name = f"{name}_instep_{len(graph.library.function)}"
            _redirect(caller, name, copy.signature.name)
            queue.extend(copy.node_def)


def _functions(graph: GraphDef) -> dict[str, FunctionDef]:
    return {f.signature.name: f for f in graph.library.function}


def _redirect(caller: NodeDef, old: str, new: str) -> None:
    """Has the first call of `old` in a node call `new`."""
    if caller.op == old:
        caller.op = new
        return
    for key in sorted(caller.attr):
        value = caller.attr[key]
        for function in [value.func, *value.list.func]:
            if function.name == old:
                function.name = new
                return
