"""What a mode decides: who may begin, and which answers become an update.

    portion   a part of a batch (or of a few batches) that one worker computes at once
    job       a portion in a worker's hands, and the version of the parameters it read
    group     jobs whose gradients are averaged into one update

Version v of the parameters is what the master has after v updates. The driver asks
`may_start` for every idle worker, tells `start` and `arrive`, and turns each group that
comes back into one update, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Portion(NamedTuple):
    """Part `shard` of `shards` of one turn's batches.

    Attributes:
        turn: counts the batches, or the groups of batches where a job takes several.
    """

    turn: int
    shard: int
    shards: int


class Job(NamedTuple):
    """A portion that a worker computes.

    Attributes:
        version: of the parameters it reads.
        worker: who was given it first; another may have to finish it.
    """

    portion: Portion
    version: int
    worker: int


class Group(NamedTuple):
    """One update.

    Attributes:
        jobs: whose answers count, in the order in which they are averaged.
        dropped: portions of the same turn that do not count.
    """

    jobs: tuple[Job, ...]
    dropped: tuple[Portion, ...] = ()


class Rules:
    """The state of one run; made by a mode."""

    def may_start(self, worker: int, portion: Portion, version: int) -> bool:
        """Whether this idle worker may begin with the next portion, and read this."""
        raise NotImplementedError

    def start(self, job: Job) -> None:
        """The worker has begun."""

    def arrive(self, job: Job) -> Sequence[Group]:
        """The job's gradient is there; updates that are due now."""
        raise NotImplementedError

    def finish(self) -> Sequence[Group]:
        """Nothing is left to compute; updates of what is still held."""
        return ()

    def skips(self, portion: Portion) -> bool:
        """Whether this portion need not be computed at all."""
        return False

    def lane(self, worker: int, portion: Portion) -> int:
        """Whose steps it continues, where workers take steps of their own."""
        return worker


class Mode(Protocol):
    """How gradients become updates."""

    def rules(self, workers: int) -> Rules:
        """The rules of a new run with so many workers."""

    def parts(self, shards: int) -> int:
        """Into how many parts a batch is split, for a pool of so many shards."""

    def batches(self, turn: int) -> int:
        """How many batches a worker computes in this turn, one after the other."""
