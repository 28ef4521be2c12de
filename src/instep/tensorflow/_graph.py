"""A loss of a 1-style graph -> a trace that workers compute, and what feeds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from instep._errors import BatchError, LossError, ShipError
from instep.tensorflow._closure import PLACEHOLDERS, VARIABLES, cut_out, reached
from instep.tensorflow._nodes import GraphDef, NodeDef, placeholder
from instep.tensorflow._program import Gradient, Trace, Variable
from instep.tensorflow._random import without_state
from instep.tensorflow._writes import Writes


@dataclass(frozen=True, slots=True)
class GraphLoss:
    """What the user gave: a scalar loss, its weight, and the batch it is over."""

    value: tf.Tensor
    weight: tf.Tensor | None
    batch: tuple[tf.Tensor, ...]

    @property
    def graph(self) -> tf.Graph:
        return self.value.graph


@dataclass(frozen=True, slots=True)
class GraphTrace:
    """A trace, and the tensors of the master's graph that are its inputs.

    Attributes:
        trace: what the workers compute.
        others: placeholders outside the batch; they go whole to every shard.
        variables: handles or references, in the trace's order.
        effects: ops on the loss's control edges that the master has to run.
    """

    trace: Trace
    others: tuple[tf.Tensor, ...]
    variables: tuple[tf.Tensor, ...]
    effects: tuple[tf.Operation, ...]


def trace_graph(loss: GraphLoss, gradients: Sequence[Any]) -> GraphTrace:
    """Cuts the loss and its gradients out of the graph.

    Args:
        loss: the loss, of any graph, finalized ones included.
        gradients: one tensor, IndexedSlices or None per variable.

    Raises:
        ShipError: an op that cannot be computed in another process.
    """
    whole = loss.graph.as_graph_def()
    fed = {t.name: _batch_node(k, t) for k, t in enumerate(loss.batch)}
    names = {tensor: f"{new.name}:0" for tensor, new in fed.items()}
    fetched = [_fetch(gradient, names) for gradient in gradients]
    targets = [t for g in (loss.value, loss.weight, *gradients) for t in _targets(g)]
    _check_dependence(whole, loss)
    first = cut_out(whole, targets, fed, leave_effects=True)
    others = [n for n in first.graph.node if _is_other(n, names)]
    # A default may hang on anything; what is fed is the value, not the default.
    stubs = {f"{n.name}:0": _stub(loss.graph, n) for n in others}
    closure = cut_out(whole, targets, fed | stubs, leave_effects=True)
    variables = [n for n in closure.graph.node if n.op in VARIABLES]
    _check_no_writes(closure.graph)
    keys = without_state(closure.graph)
    trace = Trace(
        graph=closure.graph.SerializeToString(),
        inputs=(*names.values(), *stubs),
        variables=tuple(map(_variable, variables)),
        loss=_named(loss.value, names),
        weight=None if loss.weight is None else _named(loss.weight, names),
        gradients=tuple(fetched),
        random_keys=keys,
    )
    return GraphTrace(
        trace,
        tuple(loss.graph.get_tensor_by_name(name) for name in stubs),
        tuple(_handle(loss.graph, n) for n in variables),
        tuple(map(loss.graph.get_operation_by_name, closure.left_behind)),
    )


def variables_below(loss: GraphLoss, variables: Sequence[Any]) -> list[str]:
    """Names of those variables that the batch tensors themselves depend on."""
    graph = loss.graph.as_graph_def()
    below = {n.name for n in reached(graph, [t.name for t in loss.batch])}
    return [v.name for v in variables if node_name(v) in below]


def read_all(graph: tf.Graph, traced: GraphTrace) -> list[tf.Tensor]:
    """Tensors that read the variables of a trace."""
    with graph.as_default():
        return [_read(handle) for handle in traced.variables]


def node_name(variable: Any) -> str:
    """The node that holds a variable."""
    handle = getattr(variable, "handle", None)
    return str((variable.op if handle is None else handle.op).name)


def _read(handle: tf.Tensor) -> tf.Tensor:
    """The value of a variable, by its handle or its reference."""
    if handle.dtype != tf.resource:
        return handle
    dtype = tf.dtypes.as_dtype(handle.op.get_attr("dtype"))
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    return value


def _batch_node(index: int, tensor: tf.Tensor) -> NodeDef:
    shape = tensor.shape
    if shape.rank:
        shape = tf.TensorShape([None, *shape.as_list()[1:]])
    return placeholder(f"instep/batch_{index}", tensor.dtype, shape)


def _stub(graph: tf.Graph, other: NodeDef) -> NodeDef:
    tensor = graph.get_tensor_by_name(f"{other.name}:0")
    return placeholder(other.name, tensor.dtype, tensor.shape)


def _is_other(candidate: NodeDef, batch: dict[str, str]) -> bool:
    return candidate.op in PLACEHOLDERS and f"{candidate.name}:0" not in batch.values()


def _targets(fetched: Any) -> list[str]:
    if fetched is None:
        return []
    if isinstance(fetched, tf.IndexedSlices):
        return [fetched.values.name, fetched.indices.name]
    return [fetched.name]


def _fetch(gradient: Any, names: dict[str, str]) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return _named(gradient.values, names), _named(gradient.indices, names)
    return None if gradient is None else _named(gradient, names)


def _named(tensor: tf.Tensor, names: dict[str, str]) -> str:
    """What a tensor is called once the batch is cut out."""
    return names.get(tensor.name, str(tensor.name))


def _variable(found: NodeDef) -> Variable:
    shape = tf.TensorShape(found.attr["shape"].shape)
    return Variable(
        node=found.name,
        dtype=tf.dtypes.as_dtype(found.attr["dtype"].type),
        shape=None if shape.rank is None else tuple(shape.as_list()),
        is_reference=found.op != "VarHandleOp",
    )


def _handle(graph: tf.Graph, found: NodeDef) -> tf.Tensor:
    return graph.get_tensor_by_name(f"{found.name}:0")


def _check_dependence(graph: GraphDef, loss: GraphLoss) -> None:
    names = [tensor.name for tensor in loss.batch]
    targets = [*_targets(loss.value), *_targets(loss.weight)]
    below = list(reached(graph, targets, stop=names))
    used = {i if ":" in i else f"{i}:0" for n in below for i in n.input}
    for index, name in enumerate(names):
        if name not in used:
            raise BatchError(
                f"batch[{index}] ({name}) does not enter the loss "
                f"({loss.value.name}); expected the tensors that hold the rows the "
                "loss is a mean over, such as its placeholders"
            )
    if not any(n.op in VARIABLES for n in below):
        raise LossError(
            f"the loss ({loss.value.name}) does not depend on any variable, so it has "
            "no gradient"
        )


def _check_no_writes(graph: GraphDef) -> None:
    writes = Writes(graph)
    bad = [f"{n.op} (node {n.name!r})" for n in graph.node if writes.of(n)]
    if bad:
        raise ShipError(
            f"the loss is computed from {', '.join(bad)}, which writes a variable; in "
            "a worker that change would be lost. Put the update beside the loss "
            "(tf.control_dependencies, or an op of its own in sess.run): it then runs "
            "in the master, once per step"
        )
