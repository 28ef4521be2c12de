"""The Python function that stands in a graph for the gradients of its loss."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from instep._errors import BatchError
from instep._outcome import Outcome
from instep._pool import Pool
from instep._program import Array, Output, Rule
from instep._slices import merge_slices
from instep.tensorflow._graph import GraphLoss, GraphTrace, node_name, read_all
from instep.tensorflow._program import Extras
from instep.tensorflow._session import run_for_session


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arrays of one call."""

    batch: Sequence[Array]
    others: Sequence[Array]
    params: Sequence[Array]


def compute(
    pool: Pool,
    number: int,
    traced: GraphTrace,
    inputs: Inputs,
    outputs: Sequence[Output],
) -> Outcome:
    """Has the workers compute graph `number`; 0 is the loss alone."""
    _check_forgotten(traced.others, inputs)
    whole = [*inputs.others, np.int64(number)]
    return pool._step(
        [np.asarray(array) for array in inputs.params],
        tuple(np.asarray(array) for array in (*inputs.batch, *whole)),
        outputs,
        gradient=number > 0,
        split_arguments=[True] * len(inputs.batch) + [False] * len(whole),
    )


@dataclass(slots=True)
class GraphCall:
    """Batch and variables in, pooled loss and gradients out.

    Attributes:
        pairs: symbolic gradients and their variables.
        params: the variables' values in the graph, once it is inserted.
    """

    pool: Pool
    given: GraphLoss
    number: int
    traced: GraphTrace
    pairs: Sequence[tuple[Any, Any]]
    params: Sequence[tf.Tensor] = ()

    def insert(self) -> tuple[tf.Tensor, list[Any]]:
        """Adds the function to the graph; the pooled loss and gradients."""
        types = [t.dtype.base_dtype for g, _ in self.pairs for t in _parts(g)]
        graph = self.given.graph
        step = functools.partial(self._call, self._dense())
        # Python functions run on the CPU. Update ops on the loss's control edges
        # run here, before, as they did for the loss.
        with (
            graph.as_default(),
            graph.device("/CPU:0"),
            tf.control_dependencies(self.traced.effects),
        ):
            self.params = read_all(graph, self.traced)
            loss, *flat = tf.numpy_function(
                step,
                [*self.given.batch, *self.traced.others, *self.params],
                [self.given.value.dtype, *types],
                name="instep",
            )
        loss.set_shape([])
        values = iter(flat)
        return loss, [_shaped(g, v, values) for g, v in self.pairs]

    def gradients(self, inputs: Inputs) -> tuple[Any, dict[str, Array | None]]:
        """The pooled loss and dense gradients, by the names of the variables."""
        outputs = self._dense().outputs(inputs.params)
        outcome = compute(self.pool, self.number, self.traced, inputs, outputs)
        values = iter(self._flat_gradients(outcome))
        return outcome.loss, {v.name: _densified(g, v, values) for g, v in self.pairs}

    def _dense(self) -> _DenseOutputs:
        """The dense gradients, by the place of their variable among the params."""
        nodes = [variable.node for variable in self.traced.trace.variables]
        dense = [v for g, v in self.pairs if isinstance(g, tf.Tensor)]
        places = tuple(nodes.index(node_name(variable)) for variable in dense)
        names = tuple(str(variable.name) for variable in dense)
        return _DenseOutputs(places, names, self.pool._options.reduction)

    def _call(self, dense: _DenseOutputs, *arrays: Array) -> list[Array]:
        """What the graph calls; the thread in `Session.run` does the step."""
        step = functools.partial(self._step, dense, arrays)
        outputs: list[Array] = run_for_session(self.given.graph, step)
        return outputs

    def _step(self, dense: _DenseOutputs, arrays: Sequence[Array]) -> list[Array]:
        inputs = self._split(arrays)
        outputs = dense.outputs(inputs.params)
        outcome = compute(self.pool, self.number, self.traced, inputs, outputs)
        return [np.asarray(outcome.loss), *self._flat_gradients(outcome)]

    def _split(self, arrays: Sequence[Array]) -> Inputs:
        end = len(self.given.batch)
        params = end + len(self.traced.others)
        return Inputs(arrays[:end], arrays[end:params], arrays[params:])

    def _flat_gradients(self, outcome: Outcome) -> list[Any]:
        rule = self.pool._options.reduction
        parts = [Extras.of(shard).slices for shard in outcome.shards]
        columns = zip(*parts, strict=True)
        slices = iter([merge_slices(c, outcome.shards, rule) for c in columns])
        dense = iter(outcome.outputs)
        flat: list[Any] = []
        for gradient in self.traced.trace.gradients:
            if isinstance(gradient, tuple):
                flat.extend(next(slices))
            elif gradient is not None:
                flat.append(next(dense))
        return flat


class _DenseOutputs:
    """The dense gradients that every shard returns.

    Args:
        places: of the variables among the parameters.
        names: of the variables.
        rule: how shards are combined.
    """

    def __init__(
        self, places: tuple[int, ...], names: tuple[str, ...], rule: Rule
    ) -> None:
        self._places, self._names, self._rule = places, names, rule
        self._last: list[Output] = []

    def outputs(self, params: Sequence[Array]) -> list[Output]:
        """The same list while shapes stay, which spares the pool a comparison."""
        shapes = [np.shape(params[place]) for place in self._places]
        if shapes != [output.shape for output in self._last]:
            columns = zip(shapes, self._places, self._names, strict=True)
            self._last = [
                Output(shape, params[place].dtype, self._rule, name)
                for shape, place, name in columns
            ]
        return self._last


def _parts(gradient: Any) -> list[tf.Tensor]:
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def _shaped(symbolic: Any, variable: Any, values: Any) -> Any:
    """The next of `values` in the form of the symbolic gradient."""
    if symbolic is None:
        return None
    if not isinstance(symbolic, tf.IndexedSlices):
        gradient = next(values)
        gradient.set_shape(variable.shape)
        return gradient
    rows, indices = next(values), next(values)
    rows.set_shape([None, *variable.shape.as_list()[1:]])
    indices.set_shape([None])
    return tf.IndexedSlices(rows, indices, symbolic.dense_shape)


def _densified(symbolic: Any, variable: Any, values: Any) -> Array | None:
    """The next of `values` as an array of the variable's shape."""
    if not isinstance(symbolic, tf.IndexedSlices):
        return None if symbolic is None else next(values)
    rows, indices = next(values), next(values)
    dense = np.zeros(variable.shape.as_list(), rows.dtype)
    np.add.at(dense, indices, rows)
    return dense


def _check_forgotten(others: Sequence[tf.Tensor], inputs: Inputs) -> None:
    """Refuses a placeholder that looks like a part of the batch that was left out."""
    rows = {len(array) for array in inputs.batch if np.ndim(array)}
    for tensor, array in zip(others, inputs.others, strict=True):
        is_open = bool(tensor.shape.rank) and tensor.shape.as_list()[0] is None
        if is_open and rows == {len(array)} != {1}:
            raise BatchError(
                f"{tensor.name} has {len(array)} rows, as many as the batch, but is "
                "not in batch=[...], so every shard would get all of them; add it, "
                "or give it a fixed first dimension if that is meant"
            )
