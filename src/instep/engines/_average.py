"""An average over machines: each combines its share, then a part of everyone's.

    machine 0 ── its nodes' part 1 ──> machine 1 ── part 1 of the result ──> master
              <── their part 0 ──────

Nodes are the subtrees whose shards a machine holds, combined there before anything is
sent. A large vector is cut into as many parts as there are machines, so that each sends
and combines about as much as every other (reduce-scatter: Thakur, Rabenseifner, Gropp,
2005); of a small one the master combines all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from instep._frame import aligned
from instep._layout import Layout
from instep._partials import Node, any_present, largest_nodes, root, segments_of
from instep._program import Array
from instep.engines._orders import Average, Part, Share
from instep.engines.processes import Processes

MASTER = 0  # the station that the result goes to
# Bytes from which a vector is cut into parts; below, one message more costs more.
CUT = 1 << 18
# The least that a part has, for the same reason.
PART = 1 << 16


def shares_of(
    places: Sequence[int], keys: Sequence[int], weights: Sequence[float]
) -> dict[int, Share]:
    """What each station combines.

    Args:
        places: the station that holds each shard's outputs.
        keys: of these outputs.
        weights: of the shards.
    """
    shares = {}
    for station in sorted(set(places)):
        held = {shard for shard, place in enumerate(places) if place == station}
        nodes = largest_nodes(held, len(places))
        order = [shard for node in nodes for shard in range(*node)]
        parts = [keys[shard] for shard in order], [weights[shard] for shard in order]
        shares[station] = Share(nodes, *parts)
    return shares


def plan(
    number: int, shares: dict[int, Share], weights: Sequence[float], layout: Layout
) -> Average:
    """Who combines which bytes of slots that lie so."""
    owners = [MASTER, *(station for station in shares if station != MASTER)]
    owners = owners[: max(1, layout.nbytes // PART)]
    if layout.nbytes < CUT or len(owners) < 3:  # two: as many bytes, fewer messages
        owners = [MASTER]
    first = len(layout.outputs)  # which outputs there are is the master's to combine
    step = (layout.nbytes - first) / len(owners)
    cuts = [aligned(first + int(step * k)) for k in range(1, len(owners))]
    return Average(number, shares, weights, [0, *cuts, layout.nbytes], owners)


def parts_of(
    stations: Sequence[int], nbytes: int
) -> Iterator[tuple[int, tuple[int, int], list[int]]]:
    """Which station gets which bytes from the master, and whom it passes them on to."""
    number = len(stations)
    if number < 2 or nbytes < CUT:
        for station in stations:
            yield station, (0, nbytes), []
        return
    number = min(number, nbytes // PART)
    cuts = [aligned(nbytes * k // number) for k in range(number)] + [nbytes]
    for station, bounds in zip(stations, itertools.pairwise(cuts), strict=False):
        yield station, bounds, _after(station, stations)


def nodes_of(
    engine: Processes, share: Share, *, by_key: bool = True
) -> dict[Node, Array]:
    """The nodes of a share, combined where their outputs lie.

    Args:
        engine: that has the outputs.
        share: of the average.
        by_key: its keys are of kept frames; False: they are shards of the call.
    """
    nodes: dict[Node, Array] = {}
    begin = 0
    for node in share.nodes:
        end = begin + node.stop - node.start
        keys, weights = share.keys[begin:end], share.weights[begin:end]
        offsets = engine.offsets((), keys) if by_key else engine.offsets(keys)
        nodes[node] = engine.node(offsets, weights)
        begin = end
    return nodes


class Combining:
    """What one of the owners has, and what it makes of it."""

    def __init__(self, order: Average, me: int, layout: Layout) -> None:
        index = order.owners.index(me)
        self.start, self.stop = order.cuts[index : index + 2]
        self._order, self._layout = order, layout
        self._missing = {n for share in order.shares.values() for n in share.nodes}
        self._nodes: dict[Node, Array] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all nodes are there."""
        return not self._missing

    def take(self, node: Node, part: Array) -> None:
        """The part of a node that this one combines."""
        self._missing.remove(node)
        self._nodes[node] = part

    def result(self) -> Array:
        """The part of the result."""
        segments = segments_of(self._layout, self.start, self.stop)
        return root(self._nodes, self._order.weights, segments)

    def present(self) -> Array:
        """Which outputs any shard has; told by the first part."""
        return any_present(list(self._nodes.values()), self._layout)


def parts_for(
    order: Average, me: int, nodes: Mapping[Node, Array]
) -> Iterator[tuple[int, Part, Array]]:
    """Whom to tell which part of one's nodes."""
    bounds = dict(zip(order.owners, itertools.pairwise(order.cuts), strict=True))
    for owner in _after(me, order.owners):
        start, stop = bounds[owner]
        for node, array in nodes.items():
            yield owner, Part(order.number, node, start), array[start:stop]


def _after(me: int, stations: Sequence[int]) -> list[int]:
    """All but one, those after it first: not everyone begins with the same."""
    later = [station for station in stations if station > me]
    return later + [station for station in stations if station < me]


def assembled(
    order: Average, parts: Mapping[int, Array], present: Array, layout: Layout
) -> Array:
    """The result from the parts that begin at these bytes."""
    if len(parts) == 1:
        (out,) = parts.values()
    else:
        out = np.empty(layout.nbytes, np.uint8)
        for start, part in parts.items():
            out[start : start + len(part)] = part
    layout.present(out)[:] = present
    return out
