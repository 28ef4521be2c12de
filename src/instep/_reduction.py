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
from typing import Any, NamedTuple

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
    with np.errstate(all="ignore"):
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
    marks = [bytes(layout.present(slot)) for slot in slots]
    views = layout.views(out)
    if all(0 not in mark for mark in marks):
        return list(views)
    present = map(any, zip(*marks, strict=True))
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
    with np.errstate(all="ignore"):  # a NaN or an overflow is the user's to see
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
    step = min(len(out), BLOCK // work.itemsize)
    scratch = np.empty(((len(weights) - 1).bit_length() + 2, step), work)
    for start in range(0, len(out), step or 1):
        block = [source[start : start + step] for source in sources]
        node = _Node(block, weights, rule, scratch[:, : len(block[0])])
        out[start : start + step] = node.combine(0, len(block), 0)[1]


def _clip(segment: Segment, part: tuple[int, int] | None) -> tuple[int, int]:
    if part is None:
        return segment.start, segment.stop
    return max(segment.start, part[0]), min(segment.stop, part[1])


def _working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    is_half = dtype.itemsize == 2 and dtype.kind in "fV"  # bfloat16 has kind V
    return np.dtype(np.float32) if is_half else dtype


class _Node(NamedTuple):
    """The tree over one block of all shards, with room for what is under way."""

    block: Sequence[Array]
    weights: Sequence[float]
    rule: Rule
    scratch: Array

    def combine(self, start: int, stop: int, top: int) -> tuple[float, Array]:
        """Weight and mean of shards `start` to `stop`, in scratch row `top`."""
        if stop - start == 1:
            leaf = self.block[start].astype(self.scratch.dtype, copy=False)
            return self.weights[start], leaf
        # The largest power of two below the count: pairs of neighbours, level by
        # level, the odd one passing up.
        middle = start + (1 << (stop - start - 1).bit_length() - 1)
        left = self.combine(start, middle, top)
        right = self.combine(middle, stop, top + 1)
        return combine(
            *left, *right, self.rule, self.scratch[top], self.scratch[top + 1]
        )


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
