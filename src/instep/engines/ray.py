"""The Ray engine: workers on the nodes of a Ray cluster.

    pool = instep.torch.GradientPool(model, loss, engine=instep.engines.Ray(workers=16))

    script ── object store, calls ──> an actor on each node: a station ──> its workers

A placement group reserves the workers' CPUs. Parameters go to Ray's object store once
per step, and from there once to each node; each node's shards are combined there. A
worker, an actor or a node that dies is replaced, its shards go to others, and the bits
stay the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from instep._errors import (
    EngineUnavailableError,
    OutputsLostError,
    PoolClosedError,
    StartError,
)
from instep._frame import RESIDENT, FrameRef, FrameWriter
from instep._layout import Layout
from instep._memory import Block
from instep._partials import Node, any_present, root, segments_of
from instep._program import Array
from instep._sharding import Batch
from instep._shelf import Shelf
from instep.engines._base import Event
from instep.engines._holdings import Held
from instep.engines._machines import Machines
from instep.engines._orders import Average, Params, Share, Trouble, Word
from instep.engines._placement import Place, Placement
from instep.engines._station import Station
from instep.engines.processes import START_TIMEOUT_S
from instep.engines.serial import PrivateMemory

# Seconds after which a wait looks whether the pool was closed, or nodes have come.
_LOOK_S = 0.2
# Seconds between a station's looks at its workers.
_PAUSE_S = 2e-4


class Ray(Machines):
    """Workers on the nodes of a Ray cluster.

    Args:
        address: of the cluster, as for `ray.init`; None: the one in RAY_ADDRESS, or
            else one that is started on this machine.
        workers: of pools that name no number; None: as many as the cluster has CPUs.
        **options: for `ray.init`, where Ray is not initialised yet.

    Raises:
        EngineUnavailableError: Ray is missing, or the cluster cannot be reached.
    """

    passes_on = False  # nodes fetch from the object store

    def __init__(
        self, address: str | None = None, workers: int | None = None, **options: Any
    ) -> None:
        self._ray = _ray()
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            quiet = {"include_dashboard": False, "log_to_driver": False}
            try:
                self._ray.init(address, **{**quiet, **options})
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise EngineUnavailableError(
                    f"no Ray cluster at address={address!r}: {error}"
                ) from error
        cpus = int(self._ray.cluster_resources().get("CPU", 1))
        self.workers = workers or max(1, cpus)
        self._placement = Placement(self._ray)
        self._actors: dict[int, Any] = {}  # by station
        self._nodes: dict[str, int] = {}  # and which station is on a node
        self._last = 0  # number of a station
        self._counts: dict[int, int] = {}  # messages to each
        self._hearing: dict[Any, int] = {}  # what is awaited -> of which station
        self._stored: tuple[Any, Any] = (None, None)
        self._blocks = [Block.create() for _ in range(2)]
        self._own_shelves = Shelf(self._blocks[0]), Shelf(self._blocks[1])
        self._memory = PrivateMemory()
        self._params = FrameWriter(self._memory)
        super().__init__(None)

    def resident(self) -> list[Array]:
        return self._params.resident()

    def lay_out(self, layout: Layout) -> None:
        self._look_for_room()
        super().lay_out(layout)

    def close(self) -> None:
        if not self._blocks:
            return  # closed before
        self._is_closed = True
        for station in list(self._actors):
            self._end(station)
        self._placement.close()
        self._stored = None, None
        while self._blocks:
            self._blocks.pop().close()
        if self._is_ours:
            self._ray.shutdown()

    # Memory of the master

    def _shelves(self) -> tuple[Shelf, Shelf]:
        return self._own_shelves

    def _write(self, params: Batch, batch: Batch, layout: Layout) -> int:
        self._params_ref = self._params.write(params, layout)
        return self._params_ref.nbytes

    def _params_at(self, ref: FrameRef) -> memoryview:
        if ref.base != RESIDENT:
            return self.kept_params.view(ref)
        return self._memory.at_least(0)[: ref.nbytes]

    # Nodes

    def _placed(self, workers: int) -> dict[int, int]:
        begin = time.monotonic()
        while not (places := self._placement.places(workers, self._threads)):
            if time.monotonic() - begin > START_TIMEOUT_S:
                total = self._ray.cluster_resources().get("CPU", 0)
                free = self._ray.available_resources().get("CPU", 0)
                raise StartError(
                    f"for {START_TIMEOUT_S:.0f} s no node of the Ray cluster has had "
                    f"{self._threads} free CPUs for a worker; of {total:g} CPUs, "
                    f"{free:g} are free. Add nodes, or end what takes them."
                )
            time.sleep(_LOOK_S)
        return {worker: self._station_at(place) for worker, place in places.items()}

    def _station_at(self, place: Place) -> int:
        """The station on this node, started if there is none."""
        if place.node not in self._nodes:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            strategy = PlacementGroupSchedulingStrategy(
                placement_group=place.group, placement_group_bundle_index=place.bundle
            )
            kind = self._ray.remote(NodeStation).options(
                num_cpus=self._threads, scheduling_strategy=strategy
            )
            self._last += 1
            self._nodes[place.node] = self._last
            self._actors[self._last] = actor = kind.remote()
            self._counts[self._last] = 0
            self._hearing[actor.hear.remote()] = self._last
        return self._nodes[place.node]

    def _look_for_room(self) -> None:
        """Workers without a place get one, if there is room by now."""
        is_due = len(self._places) < self._workers and self._placement.is_due()
        if is_due and self._placement.places(self._workers, self._threads):
            self.resize(self._workers)

    def _end(self, station: int) -> None:
        """Ends a station, or what is left of it."""
        self._ray.kill(self._actors.pop(station))
        self._nodes = {node: s for node, s in self._nodes.items() if s != station}
        self._hearing = {ref: s for ref, s in self._hearing.items() if s != station}

    def _lost(self, station: int, error: Exception) -> None:
        """A station is gone."""
        if station in self._actors:
            self._end(station)
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            self._lose_station(station, reason)

    def _where(self, worker: int) -> str:
        station = self._places.get(worker)
        nodes = [node for node, other in self._nodes.items() if other == station]
        names = {
            node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes()
        }
        return (
            f"node {names.get(nodes[0], nodes[0])}" if nodes else "a node that is gone"
        )

    # Messages

    def _tell(self, station: int, message: Any, *arrays: Array) -> None:
        if station in self._actors:
            contents = [self._content(message, array) for array in arrays]
            number = self._counted(station)
            self._actors[station].tell.remote(number, message, *contents)

    def _counted(self, station: int) -> int:
        self._counts[station] += 1
        return self._counts[station]

    def _content(self, message: Any, array: Array) -> Any:
        """Parameters in the object store, once for all nodes; else the array itself."""
        if not isinstance(message, Params):
            return array
        key, stored = self._stored
        if key != (message.ref, message.version):
            stored = self._ray.put(array.copy())
            self._stored = (message.ref, message.version), stored
        return stored

    def _listen(self, timeout: float | None) -> list[Event | Word | Trouble]:
        limit = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._is_closed:
                raise PoolClosedError("the pool was closed during this call")
            left = _LOOK_S
            if limit is not None:
                left = min(left, max(0.0, limit - time.monotonic()))
            heard = [word for ref in self._ready(left) for word in self._words(ref)]
            self._look_for_room()
            is_late = limit is not None and time.monotonic() >= limit
            if heard or self._pending or is_late:
                return heard

    def _ready(self, seconds: float) -> list[Any]:
        if not self._hearing:
            time.sleep(seconds)
            return []
        refs = list(self._hearing)
        ready, rest = self._ray.wait(refs, num_returns=1, timeout=seconds)
        if ready and rest:
            ready += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return list(ready)

    def _words(self, ref: Any) -> list[Event | Word | Trouble]:
        station = self._hearing.pop(ref)
        try:
            words: list[Event | Word | Trouble] = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self._lost(station, error)
            return []
        self._hearing[self._actors[station].hear.remote()] = station
        return words

    def _combine(self, order: Average, nodes: Mapping[Node, Array]) -> Array:
        assert self._layout is not None
        layout = self._layout.working
        refs = {
            station: self._actors[station].nodes.remote(
                self._counted(station), share, self._holdings.take_spare(station)
            )
            for station, share in order.shares.items()
        }
        found: dict[Node, Array] = {}
        for station, ref in refs.items():
            share = order.shares[station]
            try:
                found.update(zip(share.nodes, self._ray.get(ref), strict=True))
            except self._ray.exceptions.RayError as error:
                self._lost(station, error)
                self._forget_call()
                raise OutputsLostError(str(error), share.keys) from error
        for station, share in order.shares.items():
            for key in share.keys:
                self._holdings.spare(Held(station, key))
        out = root(found, order.weights, segments_of(layout, 0, layout.nbytes))
        out = out if out.flags.writeable else out.copy()  # of the object store
        layout.present(out)[:] = any_present(list(found.values()), layout)
        return out


class NodeStation:
    """The actor on a node.

    Calls of one caller may overtake each other, so they are numbered.
    """

    def __init__(self) -> None:
        self._station = Station(0, _post)
        self._next = 1

    async def tell(self, number: int, message: Any, content: Any = None) -> None:
        """Carries out a message."""
        await self._turn(number)
        room = None
        if content is not None:
            room = self._station.room(message, content.nbytes)
            np.asarray(room)[:] = content.view(np.uint8).reshape(-1)
        self._station.carry_out(message, room)
        self._next += 1

    async def nodes(
        self, number: int, share: Share, spare: Sequence[int]
    ) -> list[Array]:
        """This node's share of an average; the spare outputs are given up."""
        await self._turn(number)
        self._next += 1
        self._station.forget(spare)
        return list(self._station.nodes(share).values())

    async def hear(self) -> list[Word | Trouble]:
        """What has happened, when something has."""
        while not (words := self._station.hear(0)):
            await asyncio.sleep(_PAUSE_S)
        return words

    async def _turn(self, number: int) -> None:
        while self._next < number:
            await asyncio.sleep(0)


def _post(station: int, message: Any, arrays: Sequence[Array]) -> None:
    raise AssertionError("nodes of a Ray cluster tell each other nothing")


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise EngineUnavailableError(
            "engine='ray' needs Ray, which is not installed here; install it with: "
            "pip install 'instep[ray]'"
        ) from error
    return ray
