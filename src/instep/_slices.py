"""Sparse gradients (values for some rows) of the shards -> that of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from instep._aux import ShardAnswer
from instep._program import Array, Rule

Slices = tuple[Array, Array]


def merge_slices(
    parts: Sequence[Slices],
    shards: Sequence[ShardAnswer],
    rule: Rule,
    total: float | None = None,
) -> Slices:
    """(values, indices) of one parameter, in shard order; one shard's are untouched.

    values = concat(w_k / sum(w) * values_k), so that adding up what falls on one
    row gives the weighted mean. A shard of weight 0 counts for nothing.

    Args:
        parts: one per shard in `shards`.
        shards: those that have such a gradient.
        rule: "mean", or "sum", which adds.
        total: weight of all shards, with or without one; None: that of `shards`.
    """
    weights = [shard.weight for shard in shards]
    total = sum(weights) if total is None else total
    if len(parts) == 1 and total == weights[0]:
        return parts[0]
    if rule == "mean" and total > 0:
        pairs = zip(parts, weights, strict=True)
        parts = [(_scaled(v, w / total), i) for (v, i), w in pairs if w]
    values, indices = zip(*parts, strict=True)
    return np.concatenate(values), np.concatenate(indices, axis=-1)


def _scaled(values: Array, factor: float) -> Array:
    """Half precision is scaled in float32 and rounded once."""
    if values.dtype.itemsize == 2:
        return (values.astype(np.float32) * np.float32(factor)).astype(values.dtype)
    scaled: Array = values * values.real.dtype.type(factor)
    return scaled
