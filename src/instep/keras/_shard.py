"""The loss of one shard, as Keras's own `train_step` and `test_step` compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from keras import Model, ops, tree
from keras.src import backend

from instep._values import Weighted
from instep.keras._combine import Combine
from instep.keras._reductions import Totals, no_factor, share_of, watched
from instep.keras._updates import noted, replay

Forward = Callable[["Data"], tuple[Any, Any]]
"""Computes loss and predictions, in one framework."""


class Data(NamedTuple):
    """A batch as Keras has it; parts may be trees, or None."""

    x: Any
    y: Any = None
    sample_weight: Any = None

    @property
    def rows(self) -> Any:
        """The number of rows, as Keras counts them."""
        return ops.shape(next(i for i in tree.flatten(self.x) if i is not None))[0]


def forward(model: Any, data: Data, training: bool) -> tuple[Any, Any]:
    """Loss and predictions, as in Keras's own step on TensorFlow and PyTorch."""
    x, y, sample_weight = data
    flag = {"training": training} if model._call_has_training_arg else {}
    predictions = model(x, **flag)
    loss = model._compute_loss(x, y, predictions, sample_weight, training=training)
    return loss, predictions


def shard_loss(
    model: Any,
    forward: Forward,
    data: Sequence[Any],
    combine: str,
    totals: Sequence[Any] | None,
    scale: Any,
) -> tuple[Any, dict[str, Any]]:
    """The scalar to differentiate, and aux for the master.

    Args:
        model: compiled.
        forward: data -> loss, predictions.
        data: the parts of a `Data`, of the shard's rows.
        combine: the name of a `Combine`.
        totals: the parts of the batch's `Totals`, where that is SHARES.
        scale: of the optimizer (mixed precision); None: 1.

    Returns:
        The loss (`Weighted` where `combine` is OWN) and
        {"loss": unscaled, "predictions": or None, "masks": ..., "updates": ...}.
    """
    data = Data(*data)
    shares = share_of(Totals(*totals), data.rows) if totals else no_factor
    with watched(shares) as reductions, noted(metrics_in_loss(model)) as updates:
        loss, predictions = forward(data)
    wanted = predictions if needs_predictions(model) else None
    aux = {
        "loss": loss,
        "predictions": wanted,
        "masks": tree.map_structure(backend.get_keras_mask, wanted),
        "updates": tuple(map(tuple, updates)),  # no lists: those are rows
    }
    scaled = loss if scale is None else loss * ops.cast(scale, loss.dtype)
    if combine == Combine.OWN.name:
        return Weighted(scaled, reductions[0].denominator), aux
    return scaled, aux


def measured(model: Any, data: Data, aux: dict[str, Any]) -> Any:
    """Updates the metrics with what the shards gave; returns Keras's logs."""
    replay(metrics_in_loss(model), aux["updates"])
    model._loss_tracker.update_state(aux["loss"], sample_weight=data.rows)
    x, y, sample_weight = data
    if aux["masks"] is not None:
        tree.map_structure(_set_mask, aux["predictions"], aux["masks"])
    return model.compute_metrics(x, y, aux["predictions"], sample_weight=sample_weight)


def _set_mask(prediction: Any, mask: Any) -> None:
    if mask is not None:
        backend.set_keras_mask(prediction, mask)


def metrics_in_loss(model: Any) -> list[Any]:
    """Metrics that computing the loss may update: all but those of `compile`."""
    compiled = [model._loss_tracker, model._compile_metrics]
    return [m for m in model.metrics if all(m is not other for other in compiled)]


def needs_predictions(model: Any) -> bool:
    """Whether the master needs them, to update metrics."""
    overridden = type(model).compute_metrics is not Model.compute_metrics
    return overridden or model._compile_metrics is not None
