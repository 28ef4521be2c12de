"""The pool of TensorFlow 2: traces the loss, reads variables, returns tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from instep._aux import merge_aux
from instep._check import Trial
from instep._errors import ArgumentError, GradientError
from instep._host import Prepared
from instep._options import Options
from instep._outcome import Outcome
from instep._pool import Pool
from instep._program import Array, Output, Rule
from instep._sharding import take_rows
from instep._slices import merge_slices
from instep._tree import unflatten
from instep._values import Weighted
from instep.tensorflow._arrays import read_variable
from instep.tensorflow._program import (
    Extras,
    TensorFlowProgram,
    threads_of_this_process,
)
from instep.tensorflow._trace import EagerTrace, LossFunction
from instep.tensorflow._traces import Entry, Traces


class GradientPool(Pool):
    """Computes a loss and its gradients over a whole batch with several processes.

    The loss is traced once, as by `tf.function`, and the traced graph is what the
    workers get: models and layers of the script need not be picklable, and Python
    code of the loss does not run in the workers. At every call the master sends the
    variables' values and each worker its rows.

    Variables that the loss writes (moving statistics of batch normalisation) are
    averaged over the shards like the loss, and written in the master once per step;
    whole-number ones (counters, seeds) take shard 0's value. Each shard normalises
    by its own rows. Random numbers differ between shards: shard 0 draws what one
    process would draw from a Keras `SeedGenerator` or a `tf.random.Generator`, the
    others from streams of their own; other random ops draw from (seed, step, shard).

    Args:
        model: a Keras model or layer, a `tf.Module`, anything with
            `trainable_variables`; or a list of variables.
        loss: `loss(model, *batch)`, or `loss(*batch)` if it takes no more; returns a
            scalar tensor, the mean over the rows it is given, or
            `instep.Weighted(mean, weight)`. With `has_aux=True`: (loss, aux).
        **keywords: see `instep.Options`.

    Raises:
        ArgumentError: `model` has no variables to differentiate by.

    Example:
        >>> import instep.tensorflow, tensorflow as tf
        >>> w = tf.Variable(2.0)
        >>> def loss(variables, x):
        ...     return tf.reduce_mean(variables[0] * x)
        >>> with instep.tensorflow.GradientPool(
        ...     [w], loss, shards=3, engine="serial"
        ... ) as pool:
        ...     value, grads = pool.gradient(tf.range(1.0, 51.0))
        >>> float(value), float(grads[0])
        (51.0, 25.5)
    """

    def __init__(
        self,
        model: Any,
        loss: Callable[..., tf.Tensor | Weighted | tuple[Any, Any]],
        **keywords: Any,
    ) -> None:
        _check_model(model)
        options = Options.of(**keywords)
        function = LossFunction(loss, lambda: _variables(model), options.has_aux)
        self._traces = Traces(
            function,
            lambda: self._parts_of_stream or self.shards,
            lambda batch: _arguments(loss, model, batch),
        )
        self._num_shipped = 0
        self._outputs_of: dict[tuple[int, Rule], list[Output]] = {}
        super().__init__(TensorFlowProgram({}), options)

    def gradient(self, *batch: Any) -> tuple[Any, list[Any]]:
        """Loss and gradients over the whole batch, for `optimizer.apply_gradients`.

        Args:
            *batch: tensors or arrays (or trees of them) with the same number of
                rows. Numbers and 0-d tensors go whole to every shard; bools and
                strings are fixed in the trace.

        Returns:
            (loss, grads), or ((loss, aux), grads). `grads` has one tensor,
            `tf.IndexedSlices` or None per trainable variable, in order.

        Raises:
            BatchError: the batch cannot be split; names the field.
            LossError: the loss did not return a scalar.
            ShipError: the loss uses something that lives in this process, such as
                a lookup table or a Python function.
        """
        entry, outcome = self._outcome(batch, gradient=True)
        return self._handed_over(entry, outcome)

    def evaluate(self, *batch: Any) -> Any:
        """The loss (or `(loss, aux)`) over the whole batch.

        No gradients are computed and no variable is written.
        """
        entry, outcome = self._outcome(batch, gradient=False)
        return self._value(entry.traced, outcome)

    def _handed_over(self, entry: Entry, outcome: Outcome) -> tuple[Any, list[Any]]:
        """(value, gradients); variables that the loss writes have their new values."""
        trace, outputs = entry.traced.trace, list(outcome.outputs)
        num_dense = len(outputs) - len(trace.state)
        self._update(entry.traced, outputs[num_dense:], outcome)
        grads = self._gradients(entry.traced, outputs[:num_dense], outcome)
        return self._value(entry.traced, outcome), grads

    # Streams

    def _stream_batch(self, batch: tuple[Any, ...]) -> Prepared:
        return self._prepared(batch, gradient=True)

    def _stream_params(self, prepared: Prepared) -> Any:
        return [read_variable(v) for v in prepared.form.traced.variables]

    def _stream_arrays(self, leaves: list[Array], prepared: Prepared) -> list[Array]:
        return [leaves[k] for k in prepared.form.traced.trace.dense]

    def _stream_result(self, outcome: Outcome, prepared: Prepared) -> tuple[Any, Any]:
        return self._handed_over(prepared.form, outcome)

    def _try(self, arguments: tuple[Any, ...], index: Array | None) -> Trial:
        batch = arguments if index is None else take_rows(arguments, index)
        entry, outcome = self._outcome(batch, gradient=True)
        traced, outputs = entry.traced, list(outcome.outputs)
        num_dense = len(outputs) - len(traced.trace.state)
        grads = self._gradients(traced, outputs[:num_dense], outcome)
        dense = [None if g is None else tf.convert_to_tensor(g).numpy() for g in grads]
        names = [f"{k}: {v.name}" for k, v in enumerate(traced.differentiated)]
        return Trial(float(outcome.loss), dict(zip(names, dense, strict=True)))

    def _alone(self) -> Sequence[int]:
        return threads_of_this_process()

    def _outcome(
        self, arguments: tuple[Any, ...], *, gradient: bool
    ) -> tuple[Entry, Outcome]:
        prepared = self._prepared(arguments, gradient=gradient)
        params = self._stream_params(prepared)
        outcome = self._step(
            params, prepared.arguments, prepared.outputs, gradient=gradient
        )
        return prepared.form, outcome

    def _prepared(self, arguments: tuple[Any, ...], *, gradient: bool) -> Prepared:
        """The batch, and the entry with the trace for it, which the workers have."""
        if not tf.executing_eagerly():
            raise ArgumentError(
                "the pool was called while a graph is being built (in a tf.function, "
                "or with eager execution off); call it outside, and put only what "
                "comes after the gradients into the tf.function. For tf.compat.v1 "
                "graphs there is instep.tensorflow.v1"
            )
        batch, entry = self._traces.find(arguments)
        if gradient and not entry.traced.differentiated:
            raise GradientError(
                "the model has no trainable variables; expected at least one to "
                "differentiate by"
            )
        self._ship_new_traces()
        shipped = *batch.shippable(), entry.number
        return Prepared(shipped, None, self._outputs_for(entry), entry, entry.number)

    def _outputs_for(self, entry: Entry) -> list[Output]:
        """The same list at every call, which spares the pool a comparison."""
        key = entry.number, self._options.reduction
        if key not in self._outputs_of:
            self._outputs_of[key] = _outputs(entry.traced, self._options.reduction)
        return self._outputs_of[key]

    def _ship_new_traces(self) -> None:
        traces = self._traces.shipped()
        if len(traces) != self._num_shipped:
            self._ship(TensorFlowProgram(traces))
            self._num_shipped = len(traces)

    def _value(self, traced: EagerTrace, outcome: Outcome) -> Any:
        loss = tf.convert_to_tensor(outcome.loss)
        if not self._options.has_aux:
            return loss
        shards = [s._replace(aux=Extras.of(s).aux) for s in outcome.shards]
        leaves = [tf.convert_to_tensor(leaf) for leaf in merge_aux(shards)]
        return loss, unflatten(traced.aux, leaves)

    def _gradients(
        self, traced: EagerTrace, dense: Sequence[Any], outcome: Outcome
    ) -> list[Any]:
        parts = [Extras.of(shard).slices for shard in outcome.shards]
        columns = zip(*parts, strict=True)
        rule, rest = self._options.reduction, iter(dense)
        slices = iter([merge_slices(c, outcome.shards, rule) for c in columns])
        grads: list[Any] = []
        pairs = zip(traced.trace.gradients, traced.differentiated, strict=True)
        for gradient, variable in pairs:
            if gradient is None:
                grads.append(None)
            elif isinstance(gradient, tuple):
                values, indices = map(tf.convert_to_tensor, next(slices))
                shape = tf.shape(variable)
                grads.append(tf.IndexedSlices(values, indices, shape))
            else:
                grads.append(tf.convert_to_tensor(next(rest)))
        return grads

    def _update(
        self, traced: EagerTrace, state: Sequence[Any], outcome: Outcome
    ) -> None:
        """Writes the variables that the loss writes."""
        trace, sent = traced.trace, [Extras.of(s).counters for s in outcome.shards]
        # Shard 0 of a batch sends counters; an update of a stream may be without it.
        counters = next(filter(None, sent), ())
        indices = trace.state + (trace.counters if counters else ())
        for index, value in zip(indices, [*state, *counters], strict=True):
            traced.variables[index].assign(value)


def _outputs(traced: EagerTrace, rule: Any) -> list[Output]:
    """Dense gradients, then state."""
    trace = traced.trace
    pairs = zip(trace.gradients, traced.differentiated, strict=True)
    dense = [_output(v, rule) for g, v in pairs if isinstance(g, str)]
    return dense + [_output(traced.variables[k], "mean") for k in trace.state]


def _output(variable: tf.Variable, rule: Any) -> Output:
    shape = variable.shape
    if not shape.is_fully_defined():
        shape = variable.read_value().shape
    dtype = np.dtype(variable.dtype.as_numpy_dtype)
    return Output(tuple(shape.as_list()), dtype, rule, variable.name)


def _variables(model: Any) -> list[tf.Variable]:
    """The variables to differentiate by, as TensorFlow's own."""
    found = model if isinstance(model, list | tuple) else model.trainable_variables
    return [_tensorflow_variable(variable) for variable in found]


def _tensorflow_variable(variable: Any) -> tf.Variable:
    """A Keras variable holds a TensorFlow one."""
    return variable if isinstance(variable, tf.Variable) else variable._value


def _check_model(model: Any) -> None:
    if isinstance(model, list | tuple):
        wrong = [v for v in model if not hasattr(v, "assign")]
        if wrong or not model:
            raise ArgumentError(
                f"the variables are {model!r}; expected tf.Variables, at least one"
            )
    elif not hasattr(model, "trainable_variables"):
        raise ArgumentError(
            f"the model is a {type(model).__name__}; expected a Keras model, a "
            "tf.Module, something with trainable_variables, or a list of variables"
        )


def _arguments(loss: Any, model: Any, batch: Sequence[Any]) -> Sequence[Any]:
    """What the loss is called with: the model too, if the loss takes it."""
    try:
        inspect.signature(loss).bind(model, *batch)
    except TypeError:
        return batch
    except ValueError:  # no signature: a builtin
        return model, *batch
    return model, *batch
