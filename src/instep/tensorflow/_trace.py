"""A TensorFlow 2 loss, traced once in the master -> a trace that workers compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from instep._errors import LossError, ShipError
from instep._tree import Structure, flatten
from instep._values import Marker, Weighted, is_marked, marker_of, unmarked
from instep.tensorflow._arrays import to_array
from instep.tensorflow._closure import PLACEHOLDERS, cut_out
from instep.tensorflow._nodes import NodeDef, constant, node
from instep.tensorflow._program import Gradient, Trace, Variable
from instep.tensorflow._random import without_state
from instep.tensorflow._state import is_generator
from instep.tensorflow._writes import Writes


@dataclass(frozen=True, slots=True)
class EagerTrace:
    """A trace, and the variables of the master that belong to it.

    Attributes:
        trace: what the workers compute.
        variables: all variables the loss reads or writes, in the trace's order.
        differentiated: the variables the gradients are by.
        aux: the structure of the user's aux.
    """

    trace: Trace
    variables: tuple[tf.Variable, ...]
    differentiated: tuple[tf.Variable, ...]
    aux: Structure


@dataclass(frozen=True, slots=True)
class LossFunction:
    """The user's loss, and what it is called with.

    Attributes:
        function: called with the arguments of one shard.
        variables: gives the variables to differentiate by, once the loss has run.
        has_aux: the loss returns (loss, aux).
    """

    function: Callable[..., Any]
    variables: Callable[[], list[tf.Variable]]
    has_aux: bool


def trace_loss(
    loss: LossFunction,
    build: Callable[[Sequence[tf.Tensor]], Sequence[Any]],
    specs: Sequence[tf.TensorSpec],
) -> EagerTrace:
    """Runs the loss once on symbolic tensors and cuts out what it computes.

    Args:
        loss: the loss.
        build: makes the loss's arguments from one tensor per spec.
        specs: shapes and dtypes of the batch's arrays.

    Raises:
        LossError: the loss did not return a scalar to differentiate.
        ShipError: it computes with something that lives in this process.
    """
    found = _Found(loss)
    take, differentiate = map(_as_written, (found.take, found.differentiate))
    function, arrange = loss.function, _as_written(build)

    def body(*tensors: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            take(function(*arrange(tensors)))
        differentiate(tape)

    try:
        concrete = tf.function(body, input_signature=specs).get_concrete_function()
    except Exception as error:
        raise found.error or _original(error) from None
    return _cut(found, concrete.graph, len(specs))


def _original(error: Exception) -> BaseException:
    """AutoGraph raises another kind of error where it cannot copy the first."""
    context = error.__context__
    return context if type(error).__name__ == "StagingError" and context else error


def _as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps AutoGraph, which is meant for the user's loss, from rewriting ours."""
    return tf.autograph.experimental.do_not_convert(function)  # type: ignore[no-any-return]


@dataclass
class _Found:
    """Collects the tensors of a trace while it is made."""

    loss: LossFunction
    value: tf.Tensor | None = None
    weight: tf.Tensor | None = None
    aux: list[tuple[tf.Tensor, Marker]] = field(default_factory=list)
    aux_structure: Structure = field(default_factory=lambda: flatten(None)[1])
    gradients: list[Any] = field(default_factory=list)
    differentiated: list[tf.Variable] = field(default_factory=list)
    error: Exception | None = None

    def take(self, returned: Any) -> None:
        """Takes apart what the loss returned."""
        try:
            self._take(returned)
        except Exception as error:
            self.error = error
            raise

    def differentiate(self, tape: tf.GradientTape) -> None:
        """Adds the gradients; models that build themselves have done so by now."""
        self.differentiated = self.loss.variables()
        if not self.differentiated:  # enough for an evaluation
            return
        gradients = tape.gradient(self.value, self.differentiated)
        self.gradients = [_own(gradient) for gradient in gradients]

    def _take(self, returned: Any) -> None:
        if self.loss.has_aux:
            returned, aux = _pair(returned)
            leaves, self.aux_structure = flatten(aux, is_marked)
            self.aux = [_aux(leaf) for leaf in leaves]
        if isinstance(returned, Weighted):
            self.weight = _scalar("weight", returned.weight)
            returned = returned.value
        self.value = _scalar("loss", returned)
        if not self.value.dtype.is_floating:
            raise LossError(
                f"the loss has dtype {self.value.dtype.name}; expected a real float"
            )


def _pair(returned: Any) -> tuple[Any, Any]:
    if isinstance(returned, tuple | list) and len(returned) == 2:
        return returned[0], returned[1]
    raise LossError(
        f"the loss returned a {type(returned).__name__}; with has_aux=True it is "
        "expected to return (loss, aux)"
    )


def _aux(leaf: Any) -> tuple[tf.Tensor, Marker]:
    """The tensor of an aux value, and how it is combined."""
    return _own(tf.convert_to_tensor(unmarked(leaf))), marker_of(leaf)


def _scalar(name: str, value: Any) -> tf.Tensor:
    if value is None or isinstance(value, str | tuple | list | dict):
        raise LossError(
            f"the {name} is a {type(value).__name__}; expected a scalar tensor"
            + (" (or has_aux=True for (loss, aux))" if isinstance(value, tuple) else "")
        )
    tensor = _own(tf.convert_to_tensor(value))
    if tensor.shape.rank not in (0, None):
        raise LossError(
            f"the {name} has shape {tuple(tensor.shape)}; expected a scalar. Average "
            "it over the rows (tf.reduce_mean), or add it up and use reduction='sum'"
        )
    return tensor


def _own(gradient: Any) -> Any:
    """A tensor of its own in the traced graph, whatever it was before."""
    if isinstance(gradient, tf.IndexedSlices):
        return _own(gradient.values), _own(gradient.indices)
    return None if gradient is None else tf.identity(gradient)


def _cut(found: _Found, graph: Any, num_inputs: int) -> EagerTrace:
    """The trace: the graph with its captured variables and constants filled in."""
    by_handle = {id(v.handle): v for v in graph.variables}
    inside = {inner.op.name: outer for outer, inner in graph.captures}
    replaced = {f"{k}:0": _filled(k, v, by_handle) for k, v in inside.items()}
    fetched = [_name(g) for g in found.gradients]
    effects = [op.name for op in graph.control_outputs]
    assert found.value is not None
    targets = [*_flat(found, fetched), *effects]
    cut = cut_out(graph.as_graph_def(), targets, replaced, leave_effects=False).graph
    inputs = [t.op.name for t in graph.inputs[:num_inputs]]
    _check_placeholders(cut, inputs)
    present = {n.name for n in cut.node}
    handles = [n for n in inside if n in present and id(inside[n]) in by_handle]
    variables = [by_handle[id(inside[name])] for name in handles]
    written = _written(cut)
    specs = [_variable(n, v, written) for n, v in zip(handles, variables, strict=True)]
    keys = without_state(cut)
    trace = Trace(
        graph=cut.SerializeToString(),
        inputs=tuple(f"{name}:0" if name in present else None for name in inputs),
        variables=tuple(specs),
        loss=found.value.name,
        weight=None if found.weight is None else found.weight.name,
        gradients=tuple(fetched),
        dense=_dense(fetched, found.differentiated, variables),
        state=tuple(k for k, v in enumerate(specs) if v.is_written and _averages(v)),
        counters=tuple(
            k for k, v in enumerate(specs) if v.is_written and not _averages(v)
        ),
        effects=tuple(effects),
        aux=tuple((tensor.name, marker) for tensor, marker in found.aux),
        random_keys=keys,
    )
    return EagerTrace(
        trace, tuple(variables), tuple(found.differentiated), found.aux_structure
    )


def _dense(
    gradients: Sequence[Gradient],
    differentiated: Sequence[Any],
    variables: Sequence[Any],
) -> tuple[int, ...]:
    """Which variable each dense gradient is of."""
    places = {id(variable): k for k, variable in enumerate(variables)}
    pairs = zip(gradients, differentiated, strict=True)
    return tuple(places[id(v)] for g, v in pairs if isinstance(g, str))


def _filled(name: str, captured: Any, by_handle: dict[int, Any]) -> NodeDef:
    """What stands in a worker for something the function captured."""
    variable = by_handle.get(id(captured))
    if variable is not None:
        return node(
            "VarHandleOp",
            name,
            [],
            dtype=variable.dtype,
            shape=variable.shape,
            shared_name=name,
            container="",
        )
    if captured.dtype in (tf.resource, tf.variant):
        raise ShipError(
            f"the loss uses {captured!r}, which is neither a variable nor a tensor "
            "and lives in this process (a lookup table, an iterator, a dataset); "
            "apply it before the loss and pass the result in the batch"
        )
    return constant(name, to_array(captured))


def _name(gradient: Any) -> Gradient:
    if isinstance(gradient, tuple):
        return gradient[0].name, gradient[1].name
    return None if gradient is None else str(gradient.name)


def _flat(found: _Found, gradients: Sequence[Gradient]) -> list[str]:
    tensors = [found.value, found.weight, *(tensor for tensor, _ in found.aux)]
    names = [tensor.name for tensor in tensors if tensor is not None]
    for gradient in gradients:
        names.extend([gradient] if isinstance(gradient, str) else gradient or ())
    return names


def _check_placeholders(cut: Any, inputs: Sequence[str]) -> None:
    strange = [n for n in cut.node if n.op in PLACEHOLDERS and n.name not in inputs]
    if strange:
        raise ShipError(
            f"the loss depends on {strange[0].name!r}, a value that TensorFlow looks "
            "up at every call; pass it in the batch"
        )


def _written(cut: Any) -> set[str]:
    writes = Writes(cut)
    return {name for n in cut.node for name in writes.of(n)}


def _variable(name: str, variable: Any, written: set[str]) -> Variable:
    shape = variable.shape
    draws = is_generator(variable)
    return Variable(
        node=name,
        dtype=variable.dtype,
        shape=None if shape.rank is None else tuple(shape.as_list()),
        is_written=name in written or draws,
        is_generator=draws,
    )


def _averages(variable: Variable) -> bool:
    """Whether new values of shards can be averaged."""
    return bool(variable.dtype.is_floating or variable.dtype.is_complex)
