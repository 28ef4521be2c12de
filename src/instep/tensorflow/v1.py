"""TensorFlow's graph style (`tf.compat.v1`): gradients of a loss, by many processes.

placeholders ─┐                                         ┌─► gradients ─► optimizer
variables ────┼─► one Python function in the graph ─────┤
              │   (the pool: shards, workers, mean)     └─► pool.loss
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from instep._check import Report, Trial
from instep._errors import (
    ArgumentError,
    BatchError,
    GradientError,
    LossError,
)
from instep._options import Options
from instep._pool import Pool
from instep._program import Array
from instep._sharding import take_rows
from instep._tuning import Tuning
from instep._values import Weighted
from instep.tensorflow._call import GraphCall, Inputs, compute
from instep.tensorflow._graph import (
    GraphLoss,
    GraphTrace,
    read_all,
    trace_graph,
    variables_below,
)
from instep.tensorflow._program import (
    TensorFlowProgram,
    Trace,
    TraceKey,
    threads_of_this_process,
)
from instep.tensorflow._session import answer_in_session_run


class GradientPool(Pool):
    """Computes the gradients of a graph's loss over the whole batch with workers.

    The rest of the script stays as it is: `apply_gradients`, the session, the feeds.
    The loss's part of the graph is cut out at the batch tensors and sent to the
    workers once. At every `sess.run(train_op, ...)` the master hands them the batch
    and the variables' values and gets the averaged gradients.

    Variables may be resource or reference variables. Placeholders that are not in
    `batch` go whole to every shard. Update ops of the graph (batch normalisation's
    moving averages, say) run in the master, on the whole batch, as before: those in
    `tf.GraphKeys.UPDATE_OPS` where the script runs them, those on a control edge of
    the loss before the gradients. Random ops draw from (seed, step, shard).

    Args:
        loss: scalar tensor, the mean over the batch's rows; or
            `instep.Weighted(loss, weight)` with a scalar tensor for what the mean is
            over (valid tokens, the sum of sample weights).
        batch: the tensors whose first axis is the rows, placeholders or any others.
        **keywords: see `instep.Options`.

    Raises:
        LossError: the loss is not a scalar, or does not depend on a variable.
        BatchError: a batch tensor that is no array of rows, or not used by the loss.
        ShipError: the loss needs an op that lives in this process (a Python
            function, a table, an iterator). Put its result into `batch`.

    Example:
        >>> import numpy as np, tensorflow as tf, instep.tensorflow.v1
        >>> v1 = tf.compat.v1
        >>> with tf.Graph().as_default(), v1.Session() as sess:
        ...     xs = v1.placeholder(tf.float32, [None])
        ...     w = v1.get_variable("w", initializer=1.0)
        ...     loss = tf.reduce_mean(w * xs)
        ...     optimizer = v1.train.GradientDescentOptimizer(0.1)
        ...     with instep.tensorflow.v1.GradientPool(
        ...         loss, batch=[xs], shards=2, engine="serial"
        ...     ) as pool:
        ...         grads_and_vars = pool.compute_gradients(optimizer)
        ...         train_op = optimizer.apply_gradients(grads_and_vars)
        ...         sess.run(v1.global_variables_initializer())
        ...         _, value = sess.run([train_op, pool.loss], {xs: [1.0, 2.0, 6.0]})
        >>> float(value)
        3.0
    """

    def __init__(
        self,
        loss: tf.Tensor | Weighted,
        batch: Sequence[tf.Tensor],
        **keywords: Any,
    ) -> None:
        self._given = _checked(loss, batch)
        options = Options.of(**keywords)
        if options.has_aux:
            raise ArgumentError(
                "has_aux=True; the loss of a graph is one tensor and has no aux. "
                "Fetch other tensors with sess.run"
            )
        self._evaluation = trace_graph(self._given, [])
        # Made now: a graph that is finalized later takes no new reading ops.
        self._reads = read_all(self._given.graph, self._evaluation)
        self._traces: dict[TraceKey, Trace] = {(0, None): self._evaluation.trace}
        self._pooled_loss: tf.Tensor | None = None
        self._call: GraphCall | None = None
        super().__init__(TensorFlowProgram(self._traces), options)
        answer_in_session_run(self._given.graph)

    @property
    def loss(self) -> tf.Tensor:
        """The loss over the whole batch, from the same call as the gradients.

        Fetching it computes the gradients too; beside the train op it costs nothing.
        """
        if self._pooled_loss is None:
            raise LossError("pool.loss exists after pool.compute_gradients(optimizer)")
        return self._pooled_loss

    def compute_gradients(
        self, optimizer: Any, var_list: Any = None, **keywords: Any
    ) -> list[tuple[Any, Any]]:
        """Pairs (gradient, variable), for `optimizer.apply_gradients`.

        Stands for `optimizer.compute_gradients(loss)`. A gradient that is None or
        IndexedSlices stays so.

        Args:
            optimizer: a `tf.compat.v1.train.Optimizer`.
            var_list: variables to differentiate by; None: all trainable ones.
            **keywords: the optimizer's own (`gate_gradients`, ...).

        Raises:
            ShipError: a gradient needs an op that cannot leave this process.
            GradientError: the loss does not depend on any of the variables, or the
                batch tensors depend on one of them.
        """
        pairs = self._symbolic(optimizer, var_list, keywords)
        traced = trace_graph(self._given, [gradient for gradient, _ in pairs])
        number = len(self._traces)
        self._traces = {**self._traces, (number, None): traced.trace}
        self._ship(TensorFlowProgram(self._traces))
        self._call = GraphCall(self, self._given, number, traced, pairs)
        self._pooled_loss, gradients = self._call.insert()
        return [(g, v) for g, (_, v) in zip(gradients, pairs, strict=True)]

    def evaluate(
        self,
        *values: Any,
        session: Any = None,
        feed_dict: Mapping[Any, Any] | None = None,
    ) -> Any:
        """The loss of a batch with the session's variables, without gradients.

        Args:
            *values: one array per batch tensor, in the order of `batch`.
            session: whose variables; None: the default session.
            feed_dict: values of the other placeholders.

        Returns:
            The loss, a NumPy scalar.
        """
        inputs = self._inputs(self._evaluation, self._reads, values, session, feed_dict)
        return compute(self, 0, self._evaluation, inputs, []).loss

    def check(
        self,
        *values: Any,
        session: Any = None,
        feed_dict: Mapping[Any, Any] | None = None,
    ) -> Report:
        """Whether shards give the loss and gradients of the whole batch.

        Takes what `evaluate` takes, after `compute_gradients`; see `Pool.check`.
        """
        return super().check(*self._probed(values, session, feed_dict))

    def tune(
        self,
        *values: Any,
        session: Any = None,
        feed_dict: Mapping[Any, Any] | None = None,
        **keywords: Any,
    ) -> Tuning:
        """Which split of the cores into workers and threads is the fastest.

        Takes what `evaluate` takes, after `compute_gradients`; see `Pool.tune`.
        """
        return super().tune(*self._probed(values, session, feed_dict), **keywords)

    def _probed(
        self, values: Sequence[Any], session: Any, feed_dict: Mapping[Any, Any] | None
    ) -> Sequence[Any]:
        """The batch's arrays; what else a step needs is kept for `_try`."""
        if self._call is None:
            raise LossError("this computes gradients; call compute_gradients first")
        traced, reads = self._call.traced, self._call.params
        self._probe = self._inputs(traced, reads, values, session, feed_dict)
        return self._probe.batch

    def _alone(self) -> Sequence[int]:
        return threads_of_this_process()

    def _try(self, arguments: tuple[Any, ...], index: Array | None) -> Trial:
        assert self._call is not None
        batch = arguments if index is None else take_rows(arguments, index)
        inputs = Inputs(batch, self._probe.others, self._probe.params)
        loss, gradients = self._call.gradients(inputs)
        return Trial(float(loss), gradients)

    def _inputs(
        self,
        traced: GraphTrace,
        reads: Sequence[tf.Tensor],
        values: Sequence[Any],
        session: Any,
        feed_dict: Mapping[Any, Any] | None,
    ) -> Inputs:
        """The arrays of one call, variables and placeholders from the session."""
        session = session or tf.compat.v1.get_default_session()
        if session is None:
            raise ArgumentError(
                "this needs the session that holds the variables; pass session=sess, "
                "or call it inside `with sess.as_default():`"
            )
        batch = self._given.batch
        if len(values) != len(batch):
            raise BatchError(
                f"got {len(values)} arrays; expected one for each of the "
                f"{len(batch)} batch tensors: {[t.name for t in batch]}"
            )
        pairs = zip(values, batch, strict=True)
        arrays = [np.asarray(v, t.dtype.as_numpy_dtype) for v, t in pairs]
        others, params = session.run([list(traced.others), list(reads)], feed_dict)
        return Inputs(arrays, others, params)

    def _symbolic(
        self, optimizer: Any, var_list: Any, keywords: dict[str, Any]
    ) -> list[tuple[Any, Any]]:
        """The optimizer's own pairs; they are computed in the workers alone."""
        # The caller's control dependencies (update ops) are the master's to run.
        with self._given.graph.as_default(), tf.control_dependencies(None):
            pairs = optimizer.compute_gradients(
                self._given.value, var_list=var_list, **keywords
            )
        variables = [v for g, v in pairs if g is not None]
        if not variables:
            raise GradientError(
                f"the loss ({self._given.value.name}) depends on none of the variables "
                f"{[v.name for _, v in pairs]}, so there is no gradient"
            )
        below = variables_below(self._given, variables)
        if below:
            raise GradientError(
                f"the batch tensors depend on {below}, and instep does not compute "
                "gradients through them; put tensors into `batch` that come before "
                "the variables, or leave these out of var_list"
            )
        return list(pairs)


def _checked(loss: Any, batch: Sequence[Any]) -> GraphLoss:
    """The loss, its weight and the batch, once they are known to be usable."""
    weight = loss.weight if isinstance(loss, Weighted) else None
    value = loss.value if isinstance(loss, Weighted) else loss
    _check_scalar("loss", value)
    if not value.dtype.is_floating:
        raise LossError(f"the loss has dtype {value.dtype.name}; expected a float")
    if weight is not None:
        with value.graph.as_default():
            weight = tf.convert_to_tensor(weight)
        _check_scalar("weight", weight)
    if isinstance(batch, tf.Tensor) or not batch:
        raise BatchError(f"batch={batch!r}; expected a list of tensors: batch=[xs, ys]")
    for index, tensor in enumerate(batch):
        _check_rows(index, tensor)
    return GraphLoss(value, weight, tuple(batch))


def _check_scalar(name: str, tensor: Any) -> None:
    if not isinstance(tensor, tf.Tensor) or not hasattr(tensor, "graph"):
        raise LossError(
            f"the {name} is a {type(tensor).__name__}; expected a scalar tensor of a "
            "tf.compat.v1 graph. For TensorFlow 2 there is instep.tensorflow"
        )
    if tensor.shape.rank not in (0, None):
        raise LossError(
            f"the {name} ({tensor.name}) has shape {tuple(tensor.shape)}; expected a "
            "scalar. Average it over the rows (tf.reduce_mean), or add it up and use "
            "reduction='sum'"
        )


def _check_rows(index: int, tensor: Any) -> None:
    if not isinstance(tensor, tf.Tensor):
        raise BatchError(
            f"batch[{index}] is a {type(tensor).__name__}; expected a tensor of the "
            "graph whose first axis is the rows"
        )
    if tensor.shape.rank == 0:
        raise BatchError(
            f"batch[{index}] ({tensor.name}) is a scalar and has no rows to split; "
            "leave it out of `batch`: every shard then gets it whole"
        )
