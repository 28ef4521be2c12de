"""The waist between the pool and whatever moves bytes to workers.

An engine decides nothing: the pool tells it what to publish, which worker computes
which shard and when to average, and is told what happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from instep._frame import FrameRef
from instep._layout import Layout
from instep._program import Array, Program, Task
from instep._sharding import Batch
from instep._shelf import Shelf


class Done(NamedTuple):
    """A worker has computed a shard; its outputs wait to be averaged."""

    worker: int
    loss: Any
    weight: float
    aux: Any
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception in a worker: of the loss, after which it is idle again, or at
    its start, which it does not survive.

    Attributes:
        where: the worker runs, if that is not this machine.
    """

    worker: int
    error: BaseException
    text: str
    at_start: bool = False
    where: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker process has ended."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker is idle: it has started, or finished what was abandoned."""

    worker: int


Event = Done | Failed | Lost | Ready


class Kept(NamedTuple):
    """A shard whose frames stay until they are released.

    Attributes:
        params: on the shelf of parameters.
        batch: on the shelf of batches.
        key: of its outputs, which stay until they are averaged or forgotten.
    """

    params: FrameRef
    batch: FrameRef
    key: int


class Engine(Protocol):
    """What a pool needs from an engine."""

    def start(self, program: Program, workers: int, threads: int) -> None:
        """Begins to start workers with this program and returns at once.

        Those that run another program are replaced.
        """

    kept_params: Shelf
    kept_batches: Shelf

    def publish(self, params: Batch, batch: Batch, layout: Layout) -> int:
        """Makes parameters and batch readable by all workers; returns bytes moved.

        Forgets the call before this one.
        """

    def lay_out(self, layout: Layout) -> None:
        """Outputs lie so from now on."""

    def idle(self) -> list[int]:
        """Workers that wait for a shard, and of whom `wait` has nothing to tell."""

    def busy(self) -> list[int]:
        """Workers that compute or average, even if nobody waits for it any more."""

    def submit(self, worker: int, task: Task, kept: Kept | None = None) -> None:
        """Has an idle worker compute a shard: of the published call, or kept."""

    def wait(self, timeout: float | None) -> list[Event]:
        """What happened since the last call; waits for it up to `timeout` seconds.

        None: until something happens. An empty list: nothing did.
        """

    def average(
        self, weights: Sequence[float], keys: Sequence[int] | None = None
    ) -> list[Array | None]:
        """The outputs of the published call, combined over shards 0, 1, ...

        keys: those of kept frames with these keys instead, which are given up.
        """

    def forget(self, key: int) -> None:
        """Gives up the outputs of kept frames with this key."""

    def resident(self) -> list[Array]:
        """Where the parameters lie that the workers read; [] where they get copies.

        An array published as one of these is there already.
        """

    def resize(self, workers: int) -> None:
        """Starts the workers that are missing, or ends those of higher numbers."""

    def replace(self, worker: int) -> None:
        """Ends a worker's process, if it still runs, and starts another."""

    def abandon(self, *, at_once: bool) -> None:
        """Forgets the shards under way.

        at_once: their workers are replaced; otherwise each is idle again once it
        has finished what it does.
        """

    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that live."""

    def interrupt(self) -> None:
        """Has a `wait` in another thread end with a PoolClosedError; close follows."""

    def close(self) -> None:
        """Ends everything. Calling it twice is fine."""
