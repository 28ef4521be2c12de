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

from instep._layout import Layout, Segment, working_dtype
from instep._program import Array, Rule

# Bytes of all sources that one block of the tree works on: they stay in a core's L2
# cache, and NumPy's cost per call (1 us) is small beside the work.
BLOCK = 1 << 20

# Slots or vectors to combine: a matrix with one row per shard, or a list of rows that
# lie anywhere. The matrix is faster: one call of NumPy for all pairs of a level.
Rows = Sequence[Array] | Array


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
        reduce_rows(vector.reshape(-1, 1), weights, rule, out)
    return out[0]


def reduce_arrays(
    arrays: Sequence[Array], weights: Sequence[float], rule: Rule
) -> Array:
    """Combines arrays of one shape and dtype along the tree, in fresh memory."""
    out = np.empty(arrays[0].size, arrays[0].dtype)
    with np.errstate(all="ignore"):
        reduce_rows([array.reshape(-1) for array in arrays], weights, rule, out)
    return out.reshape(arrays[0].shape)


def average_slots(
    slots: Rows, weights: Sequence[float], layout: Layout
) -> list[Array | None]:
    """All outputs combined over slots, in fresh memory; None where no shard has one."""
    out = np.empty(layout.nbytes, np.uint8)
    reduce_slots(slots, weights, layout, out)
    return present_views(slots, layout, out)


def present_views(slots: Rows, layout: Layout, out: Array) -> list[Array | None]:
    """`out` as one array per output; None where no slot has it."""
    marks = [bytes(layout.present(slot)) for slot in slots]
    views = layout.views(out)
    if all(0 not in mark for mark in marks):
        return list(views)
    present = map(any, zip(*marks, strict=True))
    return [view if has else None for view, has in zip(views, present, strict=True)]


def reduce_slots(
    slots: Rows,
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
    start, stop = part or (0, layout.nbytes)
    segments = [segment.clipped(start, stop) for segment in layout.segments]
    reduce_segments(slots, weights, segments, out)


def reduce_segments(
    slots: Rows, weights: Sequence[float], segments: Sequence[Segment], out: Array
) -> None:
    """Combines these segments of slots into the same places of `out`."""
    with np.errstate(all="ignore"):  # a NaN or an overflow is the user's to see
        for segment in segments:
            start, stop = segment.start, segment.stop
            if start < stop:
                rows = _columns(slots, start, stop, segment.dtype)
                target = out[start:stop].view(segment.dtype)
                reduce_rows(rows, weights, segment.rule, target)


def reduce_rows(rows: Rows, weights: Sequence[float], rule: Rule, out: Array) -> None:
    """Combines equally long vectors along the tree, a cache-sized block at a time."""
    work, number = working_dtype(out.dtype), len(weights)
    if number < 3 and out.nbytes <= BLOCK // 3 and work == out.dtype:
        return _reduce_few(rows, weights, rule, out)
    step = min(len(out), max(1024, BLOCK // (number * work.itemsize)))
    scratch = np.empty((2, (number + 1) // 2, step), work)
    for start in range(0, len(out), step or 1):
        stop = min(start + step, len(out))
        block = _block(rows, start, stop).astype(work, copy=False)
        _root(block, weights, rule, scratch[..., : stop - start], out[start:stop])


def _reduce_few(rows: Rows, weights: Sequence[float], rule: Rule, out: Array) -> None:
    """The same for one or two short vectors, without the work around a large tree."""
    if len(weights) == 1:
        np.copyto(out, rows[0])
    else:
        (wa, wb), spare = weights, out if weights[0] == weights[1] else out.copy()
        combine(wa, rows[0], wb, rows[1], rule, out, spare)


def _columns(rows: Rows, start: int, stop: int, dtype: np.dtype[Any]) -> Rows:
    """Bytes `start` to `stop` of every row, as vectors of this dtype."""
    if isinstance(rows, np.ndarray):
        return rows[:, start:stop].view(dtype)
    return [row[start:stop].view(dtype) for row in rows]


def _block(rows: Rows, start: int, stop: int) -> Array:
    if isinstance(rows, np.ndarray):
        return rows[:, start:stop]
    return np.stack([row[start:stop] for row in rows])


def _root(
    nodes: Array, weights: Sequence[float], rule: Rule, scratch: Array, out: Array
) -> None:
    """The tree's root for one block, into `out`: pairs of neighbours by level."""
    weights, level = list(weights), 0
    while len(weights) > 2:
        above, spare = scratch[level % 2], scratch[(level + 1) % 2][0]
        nodes, weights = _parents(nodes, weights, rule, above, spare)
        level += 1
    root = nodes[0]
    if len(weights) == 2:
        first, second = scratch[level % 2][0], scratch[(level + 1) % 2][0]
        root = (
            out if out.dtype == first.dtype else first
        )  # half precision: rounded once
        combine(weights[0], nodes[0], weights[1], nodes[1], rule, root, second)
    if root is not out:
        out[:] = root


def _parents(
    nodes: Array, weights: list[float], rule: Rule, out: Array, spare: Array
) -> tuple[Array, list[float]]:
    """One level up; a node without a sibling passes up as it is."""
    paired = len(weights) // 2 * 2
    left, right = weights[0:paired:2], weights[1:paired:2]
    out = out[: (len(weights) + 1) // 2]
    if left == right:
        pairs = left[0], nodes[0:paired:2], right[0], nodes[1:paired:2]
        combine(*pairs, rule, out[: len(left)], spare)
    else:
        for k, (wa, wb) in enumerate(zip(left, right, strict=True)):
            combine(wa, nodes[2 * k], wb, nodes[2 * k + 1], rule, out[k], spare)
    if paired < len(weights):
        out[-1] = nodes[-1]
    above = [wa + wb for wa, wb in zip(left, right, strict=True)]
    return out, above + weights[paired:]


def combine(
    wa: float, a: Array, wb: float, b: Array, rule: Rule, out: Array, spare: Array
) -> None:
    """The mean (or sum) of two nodes, into `out`; `spare` is room for one vector."""
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
