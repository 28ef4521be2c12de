"""The waist between the pool and whatever moves bytes to workers.

An engine decides nothing: the pool tells it what to publish, which worker computes
which shard and when to average, and is told what happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from instep._layout import Layout
from instep._program import Array, Program, Task
from instep._sharding import Batch


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
    """

    worker: int
    error: BaseException
    text: str
    at_start: bool = False


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


class Engine(Protocol):
    """What a pool needs from an engine."""

    def start(self, program: Program, workers: int, threads: int) -> None:
        """Begins to start workers with this program and returns at once.

        Those that run another program are replaced.
        """

    def publish(self, params: Batch, batch: Batch, layout: Layout) -> int:
        """Makes parameters and batch readable by all workers; returns bytes moved."""

    def idle(self) -> list[int]:
        """Workers that wait for a shard."""

    def busy(self) -> list[int]:
        """Workers that compute or average, even if nobody waits for it any more."""

    def submit(self, worker: int, task: Task) -> None:
        """Has an idle worker compute a shard."""

    def wait(self, timeout: float | None) -> list[Event]:
        """What happened since the last call; waits for it up to `timeout` seconds.

        None: until something happens. An empty list: nothing did.
        """

    def average(self, weights: Sequence[float]) -> list[Array | None]:
        """The outputs of the published call, combined over shards 0, 1, ..."""

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
