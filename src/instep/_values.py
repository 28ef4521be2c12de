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
