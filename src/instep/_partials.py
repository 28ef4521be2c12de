"""Parts of the tree, combined where their shards are.

    shards            0 1 2 3 4 5 6 7
    held here         0 1 2 . . . . .
    nodes             (0 1) (2)

The largest subtrees whose shards one machine holds are combined there. Only these nodes
travel; the rest of the tree is combined from them, pair by pair as before, so where a
shard was computed changes no bit. Nodes lie as in the layout's `working` one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from instep._layout import Layout, Segment
from instep._program import Array
from instep._reduction import Rows, reduce_segments


class Node(NamedTuple):
    """The subtree over shards `start` to `stop`."""

    start: int
    stop: int


def largest_nodes(held: Collection[int], shards: int) -> list[Node]:
    """The largest subtrees of the tree over so many shards that are held whole.

    Example:
        >>> largest_nodes({0, 1, 2, 5}, 6)
        [Node(start=0, stop=2), Node(start=2, stop=3), Node(start=5, stop=6)]
    """

    def find(start: int, size: int) -> list[Node]:
        node = Node(start, min(start + size, shards))
        if start >= shards:
            return []
        if all(shard in held for shard in range(*node)):
            return [node]
        half = size // 2
        return [*find(start, half), *find(start + half, half)] if half else []

    return find(0, _power_of_two(shards))


def root(
    nodes: Mapping[Node, Array], weights: Sequence[float], segments: Sequence[Segment]
) -> Array:
    """The whole tree's result from nodes that cover all shards.

    Args:
        nodes: equally long uint8 vectors.
        weights: of all shards.
        segments: what in the vectors is combined, and how.
    """

    def find(start: int, size: int) -> tuple[float, Array]:
        node = Node(start, min(start + size, len(weights)))
        if node in nodes:
            return _weight(weights[start : node.stop]), nodes[node]
        left, middle = find(start, size // 2), start + size // 2
        if middle >= len(weights):
            return left
        right = find(middle, size // 2)
        out = np.empty_like(left[1])
        pair = [left[1], right[1]], [left[0], right[0]]
        reduce_segments(*pair, segments, out)
        return left[0] + right[0], out

    return find(0, _power_of_two(len(weights)))[1]


def any_present(slots: Rows, layout: Layout) -> Array:
    """One byte per output: 1 where a slot has it."""
    present: Array = np.bitwise_or.reduce([layout.present(slot) for slot in slots])
    return present


def segments_of(layout: Layout, start: int, stop: int) -> list[Segment]:
    """The segments between these bytes, as they lie in a vector of them alone."""
    clipped = (segment.clipped(start, stop) for segment in layout.segments)
    return [replace(s, start=s.start - start, stop=s.stop - start) for s in clipped]


def _weight(weights: Sequence[float]) -> float:
    """Added up along the tree: other orders give other bits."""
    level = list(weights)
    while len(level) > 1:
        pairs = [sum(level[k : k + 2]) for k in range(0, len(level), 2)]
        level = pairs
    return level[0]


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
