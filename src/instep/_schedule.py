"""Which worker computes which shard: a value that is told what happened.

No I/O and no clock, so every engine and every test drives the same rules:

* each worker starts with a run of neighbouring shards;
* a worker that has none left takes one from the end of the longest run (stealing);
* the shard of a lost worker goes first to whoever is idle, `retries` times.

The bits of a result do not depend on any of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from instep._sharding import shard_bounds


class Schedule:
    """The shards of one call: waiting, running, finished."""

    def __init__(self, shards: int, workers: Sequence[int], retries: int) -> None:
        runs = shard_bounds(shards, len(workers))
        self._runs: dict[int, deque[int]] = {
            worker: deque(range(start, stop))
            for worker, (start, stop) in zip(workers, runs, strict=False)
        }
        self._again: deque[int] = deque()
        self._running: dict[int, int] = {}
        self._unfinished = set(range(shards))
        self._losses: dict[int, int] = {}
        self._retries = retries

    @property
    def is_finished(self) -> bool:
        """Whether every shard has an answer."""
        return not self._unfinished

    @property
    def recomputed(self) -> int:
        """How many times a shard was handed out again after a loss."""
        return sum(self._losses.values())

    def assign(self, idle: Iterable[int]) -> list[tuple[int, int]]:
        """(worker, shard) for every idle worker there is work for."""
        started = []
        for worker in idle:
            if len(self._running) == len(self._unfinished):
                break  # all that is unfinished is running
            started.append((worker, self._take(worker)))
            self._running.update(started[-1:])
        return started

    def finish(self, worker: int) -> int:
        """The worker has answered; returns which shard it was."""
        shard = self._running.pop(worker)
        self._unfinished.discard(shard)
        return shard

    def lose(self, worker: int) -> int | None:
        """The worker is gone; returns the shard it was computing, if any.

        The shard is handed out again unless `is_exhausted` says otherwise.
        """
        shard = self._running.pop(worker, None)
        if shard is not None:
            self._losses[shard] = self._losses.get(shard, 0) + 1
            self._again.append(shard)
        return shard

    def is_exhausted(self, shard: int) -> bool:
        """Whether the shard has ended more workers than `retries` allows."""
        return self._losses.get(shard, 0) > self._retries

    def _take(self, worker: int) -> int:
        if self._again:
            return self._again.popleft()
        own = self._runs.get(worker)
        if own:
            return own.popleft()
        return max(self._runs.values(), key=len).pop()
