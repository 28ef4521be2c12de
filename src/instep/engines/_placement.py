"""Room for workers in a Ray cluster: a bundle of CPUs for each, spread over the nodes.

What fits is asked for at once, the rest when the cluster has grown. Bundles of a node
that dies move to others by themselves, as soon as there is room.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

# Seconds between two looks at the cluster.
_LOOK_S = 0.5


class Place(NamedTuple):
    """Where a worker is to run."""

    node: str
    group: Any
    bundle: int


class Placement:
    """The placement groups of one engine."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._groups: list[tuple[Any, list[int]]] = []  # and the workers they are for
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether it is time to look again for workers that have no place."""
        return time.monotonic() >= self._next

    def places(self, workers: int, cpus: int) -> dict[int, Place]:
        """Of so many workers, of so many CPUs each, the places that there are."""
        self._next = time.monotonic() + _LOOK_S
        self._give_back(workers)
        self._ask(workers, cpus)
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        found = {w: place for w, place in self._bundles() if place.node in alive}
        return {w: found[w] for w in sorted(found) if w < workers}

    def close(self) -> None:
        """Gives all room back."""
        self._give_back(0)

    def _give_back(self, workers: int) -> None:
        from ray.util import remove_placement_group

        for group, own in self._groups:
            if min(own) >= workers:
                remove_placement_group(group)
        self._groups = [pair for pair in self._groups if min(pair[1]) < workers]

    def _ask(self, workers: int, cpus: int) -> None:
        from ray.util import placement_group

        asked = {worker for _, own in self._groups for worker in own}
        missing = [worker for worker in range(workers) if worker not in asked]
        free = int(self._ray.available_resources().get("CPU", 0) // cpus)
        if missing[:free]:
            own = missing[:free]
            group = placement_group([{"CPU": cpus}] * len(own), strategy="SPREAD")
            self._groups.append((group, own))
            group.wait(_LOOK_S)

    def _bundles(self) -> Iterator[tuple[int, Place]]:
        from ray.util import placement_group_table

        for group, own in self._groups:
            nodes = placement_group_table(group)["bundles_to_node_id"]
            for bundle, worker in enumerate(own):
                if nodes.get(bundle):
                    yield worker, Place(nodes[bundle], group, bundle)
