"""Fast workers may be some batches ahead of the slowest, and no more.

Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", 2013.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from instep._errors import ArgumentError
from instep.modes._rules import Group, Job, Portion, Rules


@dataclass(frozen=True)
class StaleSynchronous:
    """Workers may be `bound` batches ahead of the oldest batch that is not finished.

    A batch is split into the pool's `shards`, and its number is the clock of Ho et al.:
    a shard of batch c may be begun once all shards of batch c - bound - 1 are done. It
    reads the newest parameters, in which all finished shards of earlier batches have
    been applied, its worker's own among them. A gradient is applied when it arrives;
    where nobody may go on to the next batch, what arrives is averaged into one update.

    So `bound=0` is the synchronous mode, bit for bit, and with one shard a bound that
    is never reached is the asynchronous one.

    Args:
        bound: batches; `math.inf` for no bound.

    Raises:
        ArgumentError: not a whole number of at least 0.

    Example:
        >>> import instep
        >>> instep.StaleSynchronous(bound=2)
        StaleSynchronous(bound=2)
    """

    bound: float

    def __post_init__(self) -> None:
        is_whole = type(self.bound) is int or self.bound == math.inf
        if not is_whole or self.bound < 0:
            raise ArgumentError(
                f"bound={self.bound!r}; expected a whole number of batches, at least "
                "0, or math.inf"
            )

    def rules(self, workers: int) -> StaleSynchronousRules:
        """The rules of a new run."""
        return StaleSynchronousRules(self.bound)

    def parts(self, shards: int) -> int:
        """As many as the pool has shards."""
        return shards

    def batches(self, turn: int) -> int:
        """One."""
        return 1


class StaleSynchronousRules(Rules):
    """Holds what arrives until somebody may go on to another batch."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._issued = 0
        self._next = 0  # the turn of the next portion
        self._missing: dict[int, int] = {}  # turn -> shards that have not arrived
        self._held: list[Job] = []

    def may_start(self, worker: int, portion: Portion, version: int) -> bool:
        return version == self._issued and self._is_in_bound()

    def start(self, job: Job) -> None:
        turn, shard, shards = job.portion
        self._missing.setdefault(turn, shards)
        self._next = turn if shard + 1 < shards else turn + 1

    def arrive(self, job: Job) -> Sequence[Group]:
        self._missing[job.portion.turn] -= 1
        if not self._missing[job.portion.turn]:
            del self._missing[job.portion.turn]
        self._held.append(job)
        is_older = any(held.portion.turn < self._next for held in self._held)
        return self.finish() if is_older and self._is_in_bound() else []

    def finish(self) -> Sequence[Group]:
        if not self._held:
            return []
        jobs, self._held = tuple(sorted(self._held)), []
        self._issued += 1
        return [Group(jobs)]

    def _is_in_bound(self) -> bool:
        oldest = min(self._missing, default=self._next)
        return self._next - oldest <= self._bound
