"""Keras on TensorFlow: the model's train and test functions, through a pool.

    batch ─► pool.gradient ─► gradients, loss, predictions ─► optimizer, metrics ─► logs

The loss is traced with the pool, once; optimizer and metrics are a `tf.function`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import tree

from instep._check import Report
from instep.keras._combine import Combiner
from instep.keras._flat import FlatFunction
from instep.keras._model import scale_of, unpacked, warn_if_all_are_frozen
from instep.keras._shard import Data, forward, measured, shard_loss
from instep.tensorflow import GradientPool

Function = Callable[[Any], Any]


class Steps:
    """Makes the functions that `fit` and `evaluate` call.

    Args:
        model: compiled and built.
        **keywords: see `instep.Options`.
    """

    def __init__(self, model: Any, **keywords: Any) -> None:
        self._model = model
        self._combiner = Combiner(
            model,
            lambda: self.pool.shards,
            lambda data: forward(model, data, False),
            self._compiled,
        )
        loss = tf.autograph.experimental.do_not_convert(self._loss)
        self.pool = GradientPool(model, loss, has_aux=True, **keywords)
        self._number = 0

    def compiled(self) -> None:
        """The model has been compiled again; what was traced before is no more."""
        self._number += 1
        self._combiner.forget()

    def train_function(self) -> Function:
        """For `model.train_function`."""
        finish = self._flat(self._finish)
        return self._function(lambda data: self._train(data, finish))

    def test_function(self) -> Function:
        """For `model.test_function`."""
        finish = self._flat(lambda data, aux: measured(self._model, data, aux))
        return self._function(lambda data: finish(data, self._evaluated(data, False)))

    def check(self, *batch: Any) -> Report:
        """Of the pool, for one batch."""
        return self.pool.check(*self._arguments(Data(*batch), True))

    def _function(self, step: Callable[[Data], Any]) -> Function:
        """Takes `steps_per_execution` batches; the logs of the last one count."""

        def function(iterator: Any) -> Any:
            batches = itertools.islice(iterator, self._model.steps_per_execution)
            logs = [step(unpacked(_without_optionals(batch))) for batch in batches]
            if not logs:
                raise StopIteration
            return logs[-1]

        return function

    def _train(self, data: Data, finish: Callable[..., Any]) -> Any:
        if not self._model.trainable_weights:
            warn_if_all_are_frozen()
            return finish([], data, self._evaluated(data, True))
        arguments = self._arguments(data, True)
        (_, aux), gradients = self.pool.gradient(*arguments)
        return finish(gradients, data, aux)

    def _evaluated(self, data: Data, training: bool) -> Any:
        return self.pool.evaluate(*self._arguments(data, training))[1]

    def _arguments(self, data: Data, training: bool) -> tuple[Any, ...]:
        """Of `_loss`. What is no tensor there belongs to the trace."""
        combine, totals = self._combiner.of(data)
        scale = scale_of(self._model) if training else None
        return *data, totals, scale, training, combine.name, str(self._number)

    def _loss(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        totals: Any,
        scale: Any,
        training: bool,
        combine: str,
        number: str,
    ) -> Any:
        del number  # which `compile` the trace is of
        return shard_loss(
            self._model,
            lambda data: forward(self._model, data, training),
            (x, y, sample_weight),
            combine,
            totals,
            scale,
        )

    def _finish(self, gradients: Any, data: Data, aux: Any) -> Any:
        model = self._model
        if gradients:
            pairs = zip(gradients, model.trainable_weights, strict=True)
            model.optimizer.apply_gradients(pairs)
        return measured(model, data, aux)

    def _flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self._model.run_eagerly else FlatFunction(function)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return function
        return tf.function(function, autograph=False, reduce_retracing=True)  # type: ignore[no-any-return]


def _without_optionals(batch: Any) -> Any:
    """None where TensorFlow has an `Optional` for it."""
    optional = tf.experimental.Optional
    return tree.map_structure(lambda i: None if isinstance(i, optional) else i, batch)
