"""What each Keras loss of a model is a mean over, so that shards can be combined.

    reduction                        over a shard             to be combined by
    mean, no mask                    values of its rows       rows
    mean, masked                     unmasked values          their number
    mean_with_sample_weight          sum of weights           that sum
    sum                              1                        adding

Keras computes all of them in one function, `reduce_weighted_values`, which is watched
while a model's loss is computed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from keras import ops
from keras.src.losses import loss as keras_loss

from instep._errors import LossError


class Kind(enum.Enum):
    """By what a loss is combined."""

    ROWS = "rows"
    OWN = "its own denominator"
    SUM = "adding"


class Reduction(NamedTuple):
    """One loss of the model, as it was reduced.

    Attributes:
        denominator: a scalar tensor where the kind is OWN.
    """

    kind: Kind
    denominator: Any = None


class Totals(NamedTuple):
    """Denominators over the whole batch.

    Attributes:
        rows: of the batch.
        own: one for each loss with a denominator of its own, in order.
    """

    rows: Any
    own: tuple[Any, ...] = ()


def no_factor(reduction: Reduction, index: int) -> None:
    """Leaves losses as they are."""


@contextmanager
def watched(
    factor: Callable[[Reduction, int], Any] = no_factor,
) -> Iterator[list[Reduction]]:
    """Inside, every loss that is reduced is listed, and multiplied by its factor.

    Args:
        factor: (reduction, how many of kind OWN came before) -> scalar; None: 1.
    """
    original, seen = keras_loss.reduce_weighted_values, list[Reduction]()

    def reduce(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        value = original(values, sample_weight, mask, reduction, dtype)
        _check_reduced(reduction, value)
        index = sum(1 for before in seen if before.kind is Kind.OWN)
        seen.append(_reduction(value, sample_weight, mask, reduction))
        scale = factor(seen[-1], index)
        return value if scale is None else value * ops.cast(scale, value.dtype)

    keras_loss.reduce_weighted_values = reduce
    try:
        yield seen
    finally:
        keras_loss.reduce_weighted_values = original


def share_of(totals: Totals, rows: Any) -> Callable[[Reduction, int], Any]:
    """Factors that make the mean by rows exact for losses of every kind.

    With N rows in the batch and n in the shard, a loss of denominator d in the shard
    and D in the batch counts for d/D of the whole, and the mean gives it n/N.
    """

    def factor(reduction: Reduction, index: int) -> Any:
        if reduction.kind is Kind.ROWS:
            return None
        by_rows = ops.cast(totals.rows, "float32") / ops.cast(rows, "float32")
        if reduction.kind is Kind.SUM:
            return by_rows
        total = ops.cast(totals.own[index], reduction.denominator.dtype)
        return ops.divide_no_nan(reduction.denominator, total) * by_rows

    return factor


def _reduction(value: Any, sample_weight: Any, mask: Any, reduction: Any) -> Reduction:
    if reduction == "sum":
        return Reduction(Kind.SUM)
    weighted = reduction == "mean_with_sample_weight"
    if mask is None and (sample_weight is None or not weighted):
        return Reduction(Kind.ROWS)
    if not weighted:
        return Reduction(Kind.OWN, ops.sum(ops.cast(mask, value.dtype)))
    if sample_weight is not None:
        sample_weight = ops.convert_to_tensor(sample_weight, dtype=value.dtype)
    merged = keras_loss.apply_mask(
        sample_weight, mask, dtype=value.dtype, reduction=reduction
    )
    return Reduction(Kind.OWN, ops.sum(ops.cast(merged, value.dtype)))


def _check_reduced(reduction: Any, value: Any) -> None:
    if reduction in (None, "none") and len(value.shape):
        raise LossError(
            f"a loss was compiled with reduction={reduction!r} and has the shape "
            f"{tuple(value.shape)}; expected a scalar: use 'sum_over_batch_size', "
            "'mean_with_sample_weight' or 'sum'"
        )
