"""Every update is the average over one batch, of gradients of the same parameters.

With backup shards the last ones are not waited for: Chen, Pan, Monga, Bengio and
Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instep._errors import ArgumentError
from instep.modes._rules import Group, Job, Portion, Rules


@dataclass(frozen=True)
class Synchronous:
    """One update per batch: the average over its shards.

    The batch is split into the pool's `shards`. Without backup shards an update is what
    `pool.backward` gives, bit for bit.

    With `backup=b`, the first `shards - b` answers count and the last b are dropped,
    whole shards at a time: an update's `dropped` are their rows, and its loss and
    gradients are averages over the others (Chen et al. 2016; TensorFlow's
    SyncReplicasOptimizer with more replicas than it aggregates). Then which rows
    count depends on time, and so do the bits; `record=` and `Replay` repeat them.

    Args:
        backup: shards that need not be waited for, fewer than the pool's `shards`.

    Raises:
        ArgumentError: `backup` is no whole number of at least 0.

    Example:
        >>> import instep
        >>> instep.Synchronous(backup=1)
        Synchronous(backup=1)
    """

    backup: int = 0

    def __post_init__(self) -> None:
        if type(self.backup) is not int or self.backup < 0:
            raise ArgumentError(
                f"backup={self.backup!r}; expected a whole number, at least 0: the "
                "shards of a batch that need not be waited for"
            )

    def rules(self, workers: int) -> SynchronousRules:
        """The rules of a new run."""
        return SynchronousRules(self.backup)

    def parts(self, shards: int) -> int:
        """As many as the pool has shards.

        Raises:
            ArgumentError: no shard would be left to count.
        """
        if self.backup >= shards:
            raise ArgumentError(
                f"backup={self.backup} of {shards} shards leaves none to count; make "
                f"the pool with more, e.g. shards={self.backup + max(1, shards)}"
            )
        return shards

    def batches(self, turn: int) -> int:
        """One."""
        return 1


class SynchronousRules(Rules):
    """Waits for all but the last few of a turn's answers."""

    def __init__(self, backup: int = 0) -> None:
        self._backup = backup
        self._turn = 0
        self._arrived: list[Job] = []

    def may_start(self, worker: int, portion: Portion, version: int) -> bool:
        return portion.turn == self._turn == version

    def arrive(self, job: Job) -> Sequence[Group]:
        if job.portion.turn != self._turn:
            return []  # too late
        self._arrived.append(job)
        needed = max(1, job.portion.shards - self._backup)  # short batches have fewer
        return [self._close()] if len(self._arrived) == needed else []

    def _close(self) -> Group:
        jobs, self._arrived = tuple(sorted(self._arrived)), []
        shards, there = jobs[0].portion.shards, {job.portion.shard for job in jobs}
        missing = [k for k in range(shards) if k not in there]
        self._turn += 1
        dropped = tuple(Portion(self._turn - 1, k, shards) for k in missing)
        return Group(jobs, dropped)
