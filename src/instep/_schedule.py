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

_EMPTY = [0, 0]


class Schedule:
    """The shards of one call: waiting, running, finished."""

    def __init__(self, shards: int, workers: Sequence[int], retries: int) -> None:
        runs = map(list, shard_bounds(shards, len(workers)))
        self._runs = dict(zip(workers, runs, strict=False))  # worker: [next, stop]
        self._again: deque[int] = deque()
        self._running: dict[int, int] = {}
        self._num_unfinished = shards
        self._losses: dict[int, int] = {}
        self._retries = retries

    @property
    def is_finished(self) -> bool:
        """Whether every shard has an answer."""
        return self._num_unfinished == 0

    @property
    def recomputed(self) -> int:
        """How many times a shard was handed out again after a loss."""
        return sum(self._losses.values())

    @property
    def has_waiting(self) -> bool:
        """Whether there is a shard that nobody computes."""
        return len(self._running) < self._num_unfinished

    def assign(self, idle: Iterable[int]) -> list[tuple[int, int]]:
        """(worker, shard) for every idle worker there is work for."""
        started = []
        for worker in idle:
            if not self.has_waiting:
                break
            self._running[worker] = shard = self._take(worker)
            started.append((worker, shard))
        return started

    def finish(self, worker: int) -> int:
        """The worker has answered; returns which shard it was."""
        shard = self._running.pop(worker)
        self._num_unfinished -= 1
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
        own = self._runs.get(worker, _EMPTY)
        if own[0] < own[1]:
            own[0] += 1
            return own[0] - 1
        longest = max(self._runs.values(), key=lambda run: run[1] - run[0])
        longest[1] -= 1
        return longest[1]
