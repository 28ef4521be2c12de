"""What a loss may return besides a plain number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Weighted:
    """A mean together with what it is a mean over.

    A shard normally counts for its number of rows. A loss whose denominator is
    something else (valid tokens, the sum of sample weights) says so by returning
    `Weighted(mean, denominator)`; shards are then averaged by that weight, which
    gives the mean over the whole batch.

    Args:
        value: the mean over this shard, a scalar of the framework.
        weight: the mean's denominator, a scalar >= 0. A shard of weight 0 counts
            for nothing, even where its mean is NaN (0/0).

    Example:
        >>> import numpy as np
        >>> import instep
        >>> def fun(w, x, mask):
        ...     total = mask.sum()
        ...     loss = (w * x * mask).sum() / total
        ...     return instep.Weighted(loss, total), (x * mask).sum() / total
        >>> x, mask = np.array([1.0, 2.0, 9.0]), np.array([1.0, 1.0, 0.0])
        >>> with instep.numpy.value_and_grad(fun, shards=2, engine="serial") as pool:
        ...     loss, grad = pool(np.float64(2.0), x, mask)
        >>> float(loss), float(grad)
        (3.0, 1.5)
    """

    value: Any
    weight: Any


@dataclass(frozen=True, slots=True)
class Sum:
    """Marks aux that is added over shards instead of averaged: counts, histograms.

    Example:
        >>> import numpy as np
        >>> import instep
        >>> def fun(w, x):
        ...     return (w * x.mean(), instep.Sum((x > 1).sum())), x.mean()
        >>> with instep.numpy.value_and_grad(
        ...     fun, shards=2, engine="serial", has_aux=True
        ... ) as pool:
        ...     (loss, above_one), grad = pool(np.float64(1.0), np.arange(5.0))
        >>> int(above_one)
        3
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Mean:
    """Marks an aux array that is averaged over shards, element by element, by weight.

    Without it an array counts as one entry per row, and is put together in their
    order. Arrays of the same shape in every shard.

    Example:
        >>> import numpy as np
        >>> import instep
        >>> def fun(w, x):
        ...     return (w * x.mean(), instep.Mean(x.mean(axis=0))), x.mean()
        >>> with instep.numpy.value_and_grad(
        ...     fun, shards=2, engine="serial", has_aux=True
        ... ) as pool:
        ...     (loss, column_means), grad = pool(np.float64(1.0), np.eye(3))
        >>> bool(np.allclose(column_means, 1 / 3))
        True
    """

    value: Any


Marker = type[Sum] | type[Mean] | None
"""How an aux value is combined, where its form does not say it."""


def is_marked(leaf: Any) -> bool:
    """Whether a value is in a marker."""
    return isinstance(leaf, Sum | Mean)


def marker_of(leaf: Any) -> Marker:
    """The marker of an aux value, if it has one."""
    return type(leaf) if isinstance(leaf, Sum | Mean) else None


def unmarked(leaf: Any) -> Any:
    """The value without its marker."""
    return leaf.value if isinstance(leaf, Sum | Mean) else leaf


def marked(marker: Marker, value: Any) -> Any:
    """The value with this marker."""
    return value if marker is None else marker(value)
