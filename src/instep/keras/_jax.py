"""Keras on JAX: the model's train and test functions, through a pool.

    state, batch ─► pool ─► gradients, loss, predictions ─► optimizer, metrics ─► state

The workers have a copy of the model for its structure; all values travel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from keras.src import backend

from instep._check import Report
from instep._values import Mean, Sum
from instep.jax import value_and_grad
from instep.keras._combine import Combiner
from instep.keras._model import scale_of, unpacked
from instep.keras._shard import Data, measured, shard_loss
from instep.keras._state import STRIDE, is_seed
from instep.keras._travel import Traveller

Values = Sequence[Any]
"""One array per variable."""


class ShardLoss:
    """The loss that the workers compute.

    Args:
        model: compiled and built; None until there is one.
    """

    def __init__(self, model: Any) -> None:
        self._traveller = Traveller(model)

    def __call__(
        self,
        trainable: Values,
        state: Values,
        whole: dict[str, Any],
        data: tuple[Any, ...],
        positions: Any,
        training: bool,
        combine: str,
    ) -> Any:
        """(loss, aux); aux has the changed state too, by index.

        Args:
            trainable: values of the trainable variables.
            state: values of the others.
            whole: "totals" and "scale", for `shard_loss`.
            data: x, y, sample weights.
            positions: of the rows in the batch.
            training: as in the model's `call`.
            combine: the name of a `Combine`.
        """
        model = self._traveller.model
        own = _own_seeds(model, state, positions[0])
        changed: dict[str, Any] = {}

        def run(data: Data) -> tuple[Any, Any]:
            loss, predictions, new = forward(model, data, trainable, own, training)
            changed.update(_changed(own, new, positions[0] == 0))
            return loss, predictions

        parts = combine, whole["totals"], whole["scale"]
        loss, aux = shard_loss(model, run, data, *parts)
        return loss, {**aux, "state": changed}


def forward(
    model: Any, data: Data, trainable: Values, state: Values, training: bool
) -> tuple[Any, Any, Values]:
    """Loss, predictions and new state, as in Keras's own step."""
    # Metrics are not updated here; in `fit` their variables have no values.
    metrics = [jnp.zeros(v.shape, v.dtype) for v in model.metrics_variables]
    model.optimizer, optimizer = None, model.optimizer  # it would scale the loss
    try:
        loss, (_, predictions, new, _) = model.compute_loss_and_updates(
            trainable, state, metrics, *data, training=training
        )
    finally:
        model.optimizer = optimizer
    return loss, predictions, new


def _own_seeds(model: Any, state: Values, position: Any) -> Values:
    """Every shard draws its own random numbers; the first one those of the model."""
    shift = position * jnp.uint32(STRIDE)
    return [
        value.at[0].add(shift.astype(value.dtype)) if is_seed(variable) else value
        for variable, value in zip(model.non_trainable_variables, state, strict=True)
    ]


def _changed(old: Values, new: Values, is_first: Any) -> dict[str, Any]:
    """Moving statistics are averaged; of seeds and counters the first shard's count."""
    pairs = enumerate(zip(old, new, strict=True))
    changed = {str(k): now for k, (before, now) in pairs if now is not before}
    return {
        key: Mean(value)
        if jnp.issubdtype(value.dtype, jnp.floating)
        else Sum(jnp.where(is_first, value, jnp.zeros_like(value)))
        for key, value in changed.items()
    }


class Steps:
    """Makes the functions that `fit` and `evaluate` call.

    Args:
        model: compiled and built.
        **keywords: see `instep.Options`.
    """

    def __init__(self, model: Any, **keywords: Any) -> None:
        self._model = model
        self._combiner = Combiner(
            model, lambda: self.pool.shards, self._forward, jax.jit
        )
        # Of the call of a ShardLoss.
        axes = (None, None, None, 0, 0, None, None)
        self.pool = value_and_grad(
            ShardLoss(None), has_aux=True, in_axes=axes, **keywords
        )

    def compiled(self) -> None:
        """The model has been compiled: from now on the workers have it as it is."""
        self._combiner.forget()
        self.pool.replace_loss(ShardLoss(self._model))

    def train_function(self) -> Callable[..., Any]:
        """For `model.train_function`."""
        finish = self._compiled(self._finish)
        return self._function(lambda state, data: self._train(state, data, finish))

    def test_function(self) -> Callable[..., Any]:
        """For `model.test_function`."""
        measure = self._compiled(self._measured)

        def test(state: Any, data: Data) -> Any:
            trainable, others, metrics = state
            aux = self._evaluated(data, trainable, others, training=False)
            logs, metrics = measure(data, aux, metrics)
            return logs, (trainable, others, metrics)

        return self._function(test)

    def check(self, *batch: Any) -> Report:
        """Of the pool, for one batch."""
        model = self._model
        values = [v.value for v in model.trainable_variables]
        others = [v.value for v in model.non_trainable_variables]
        arguments = self._arguments(Data(*batch), values, others, True, None)
        return self.pool.check(*arguments)

    def _function(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Takes `steps_per_execution` batches; the logs of the last one count."""

        def function(state: Any, iterator: Any) -> Any:
            logs = None
            for batch in itertools.islice(iterator, self._model.steps_per_execution):
                logs, state = step(state, unpacked(batch))
            if logs is None:
                raise StopIteration
            return logs, state

        return function

    def _train(self, state: Any, data: Data, finish: Callable[..., Any]) -> Any:
        trainable, others, optimizer, metrics = state
        if not trainable:
            gradients, aux = [], self._evaluated(data, trainable, others, training=True)
        else:
            scale = self._scale(optimizer)
            arguments = self._arguments(data, trainable, others, True, scale)
            (_, aux), gradients = self.pool(*arguments)
        changed = aux.pop("state")
        aux["masks"] = None  # Keras's own step loses them here; metrics are as there
        others = [
            changed[str(k)].astype(value.dtype) if str(k) in changed else value
            for k, value in enumerate(others)
        ]
        logs, trainable, optimizer, metrics = finish(
            gradients, data, aux, trainable, optimizer, metrics
        )
        return logs, (trainable, others, optimizer, metrics)

    def _evaluated(
        self, data: Data, trainable: Values, others: Values, *, training: bool
    ) -> dict[str, Any]:
        arguments = self._arguments(data, trainable, others, training, None)
        aux: dict[str, Any] = self.pool.evaluate(*arguments)[1]
        return aux

    def _arguments(
        self, data: Data, trainable: Values, others: Values, training: bool, scale: Any
    ) -> tuple[Any, ...]:
        """Of the call of a ShardLoss."""
        combine, totals = self._combiner.of(data, trainable, others)
        whole = {"totals": totals and tuple(totals), "scale": scale}
        positions = np.arange(data.rows, dtype=np.uint32)
        return (
            list(trainable),
            list(others),
            whole,
            tuple(data),
            positions,
            training,
            combine.name,
        )

    def _scale(self, optimizer_variables: Values) -> Any:
        mapping = zip(self._model.optimizer.variables, optimizer_variables, strict=True)
        with backend.StatelessScope(state_mapping=list(mapping)):
            return scale_of(self._model)

    def _forward(self, data: Data, trainable: Values, others: Values) -> Any:
        return forward(self._model, data, trainable, others, False)

    def _finish(
        self,
        gradients: Values,
        data: Data,
        aux: dict[str, Any],
        trainable: Values,
        optimizer: Values,
        metrics: Values,
    ) -> Any:
        if gradients:
            trainable, optimizer = self._model.optimizer.stateless_apply(
                optimizer, gradients, trainable
            )
        logs, metrics = self._measured(data, aux, metrics)
        return logs, trainable, optimizer, metrics

    def _measured(self, data: Data, aux: dict[str, Any], values: Values) -> Any:
        """Logs, and the metrics' new values."""
        aux = {key: value for key, value in aux.items() if key != "state"}
        variables = self._model.metrics_variables
        mapping = list(zip(variables, values, strict=True))
        with backend.StatelessScope(state_mapping=mapping) as scope:
            logs = measured(self._model, data, aux)
        news = [scope.get_current_value(variable) for variable in variables]
        pairs = zip(news, values, strict=True)
        return logs, [old if new is None else new for new, old in pairs]

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        model = self._model
        is_jitted = model.jit_compile and not model.run_eagerly
        return jax.jit(function) if is_jitted else function
