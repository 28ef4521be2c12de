"""The fixed tree that turns shard results into the batch's result.

A node is (weight, mean). Two nodes combine to

    (wa + wb, (wa * a + wb * b) / (wa + wb)),

and to exactly (a + b) / 2 where the weights are equal. So no total has to be known
in advance, one shard comes back untouched, and half precision cannot overflow by
summing. Siblings are paired by shard index, never by arrival: floating-point
addition is not associative, so the tree alone decides the bits.

float16 and bfloat16 are combined in float32 and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from instep._layout import Layout, Segment
from instep._program import Array, Rule

# Bytes per source that a block of the tree works on: a few of them fit in a core's
# L2 cache, and NumPy's cost per call (1 us) is small beside the work.
BLOCK = 1 << 16


def reduce_scalar(values: Sequence[Any], weights: Sequence[float], rule: Rule) -> Any:
    """Combines one number per shard along the tree, in the numbers' own dtype.

    Integers and booleans are combined as float64.

    Example:
        >>> float(reduce_scalar([9.0, 26.0, 42.5], [17, 17, 16], "mean"))
        25.5
    """
    vector = np.asarray(values)
    if vector.dtype.kind in "biu":
        vector = vector.astype(np.float64)
    out = np.empty(1, vector.dtype)
    reduce_vector(vector.reshape(-1, 1), weights, rule, out)
    return out[0]


def average_slots(
    slots: Sequence[Array], weights: Sequence[float], layout: Layout
) -> list[Array | None]:
    """All outputs combined over slots, in fresh memory; None where no shard has one."""
    out = np.empty(layout.nbytes, np.uint8)
    reduce_slots(slots, weights, layout, out)
    return present_views(slots, layout, out)


def present_views(
    slots: Sequence[Array], layout: Layout, out: Array
) -> list[Array | None]:
    """`out` as one array per output; None where no slot has it."""
    present = np.any([layout.present(slot) for slot in slots], axis=0)
    views = layout.views(out)
    return [view if has else None for view, has in zip(views, present, strict=True)]


def reduce_slots(
    slots: Sequence[Array],
    weights: Sequence[float],
    layout: Layout,
    out: Array,
    part: tuple[int, int] | None = None,
) -> None:
    """Combines whole slots (or bytes `part` of them) into `out`, segment by segment.

    Args:
        slots: one uint8 vector of `layout.nbytes` per shard, in shard order.
        weights: one weight per shard.
        layout: the segments.
        out: uint8 vector of `layout.nbytes`; not one of `slots`.
        part: bytes (start, stop), multiples of the alignment.
    """
    for segment in layout.segments:
        start, stop = _clip(segment, part)
        if start < stop:
            sources = [slot[start:stop].view(segment.dtype) for slot in slots]
            target = out[start:stop].view(segment.dtype)
            reduce_vector(sources, weights, segment.rule, target)


def reduce_vector(
    sources: Sequence[Array] | Array, weights: Sequence[float], rule: Rule, out: Array
) -> None:
    """Combines equally long vectors along the tree, a cache-sized block at a time."""
    work = _working_dtype(out.dtype)
    step = max(1, BLOCK // work.itemsize)
    tree = _Tree(weights, rule, min(step, len(out)), work)
    with np.errstate(all="ignore"):  # a NaN or an overflow is the user's to see
        for start in range(0, len(out), step):
            block = [source[start : start + step] for source in sources]
            out[start : start + step] = tree.reduce(block)


def _clip(segment: Segment, part: tuple[int, int] | None) -> tuple[int, int]:
    if part is None:
        return segment.start, segment.stop
    return max(segment.start, part[0]), min(segment.stop, part[1])


def _working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    is_half = dtype.itemsize == 2 and dtype.kind in "fV"  # bfloat16 has kind V
    return np.dtype(np.float32) if is_half else dtype


class _Tree:
    """The tree over one block; its scratch is reused from block to block."""

    def __init__(
        self, weights: Sequence[float], rule: Rule, size: int, dtype: np.dtype[Any]
    ) -> None:
        self._weights = [float(weight) for weight in weights]
        self._rule = rule
        depth = (len(weights) - 1).bit_length()
        self._scratch = np.empty((depth + 2, size), dtype)

    def reduce(self, block: Sequence[Array]) -> Array:
        """The root's mean for this block."""
        return self._node(block, 0, len(block), 0)[1]

    def _node(
        self, block: Sequence[Array], start: int, stop: int, top: int
    ) -> tuple[float, Array]:
        """Weight and mean of shards `start` to `stop`, in scratch row `top`."""
        if stop - start == 1:
            return self._weights[start], self._widened(block[start])
        # The largest power of two below the count: pairs of neighbours, level by
        # level, the odd one passing up.
        middle = start + (1 << (stop - start - 1).bit_length() - 1)
        left = self._node(block, start, middle, top)
        right = self._node(block, middle, stop, top + 1)
        out, spare = self._scratch[top : top + 2, : len(block[start])]
        return combine(*left, *right, self._rule, out, spare)

    def _widened(self, source: Array) -> Array:
        return source.astype(self._scratch.dtype, copy=False)


def combine(
    wa: float, a: Array, wb: float, b: Array, rule: Rule, out: Array, spare: Array
) -> tuple[float, Array]:
    """One node from two, in `out`; `a` may be `out` and `b` may be `spare`."""
    if rule == "sum":
        np.add(a, b, out=out)
    elif wa == wb:
        np.add(a, b, out=out)
        np.multiply(out, 0.5, out=out)  # a power of two: exact
    elif wa == 0 or wb == 0:  # 0 * NaN is NaN: a mean over nothing must not count
        np.copyto(out, b if wa == 0 else a)
    else:
        np.multiply(a, wa, out=out)
        np.multiply(b, wb, out=spare)
        np.add(out, spare, out=out)
        np.divide(out, wa + wb, out=out)
    return wa + wb, out
