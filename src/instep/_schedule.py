"""Which worker computes which shard: a value that is told what happened.

No I/O and no clock, so every engine and every test drives the same rules:

* each worker starts with a run of neighbouring shards;
* a worker that has none left takes one from the end of the longest run (stealing);
* the shard of a lost worker goes first to whoever is idle, `retries` times;
* a shard that is late is handed to an idle worker as well; the first answer counts.

The bits of a result do not depend on any of this.
"""

from __future__ import annotations

from collections import Counter, deque
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
        self._num_waiting = self._num_unfinished = shards
        self._finished: set[int] = set()
        self._losses: Counter[int] = Counter()
        self._retries = retries

    @property
    def is_finished(self) -> bool:
        """Whether every shard has an answer."""
        return self._num_unfinished == 0

    @property
    def recomputed(self) -> int:
        """How many times a shard was handed out again after a loss."""
        return self._losses.total()

    @property
    def has_waiting(self) -> bool:
        """Whether there is a shard that nobody computes."""
        return self._num_waiting > 0

    def assign(self, idle: Iterable[int]) -> list[tuple[int, int]]:
        """(worker, shard) for every idle worker there is work for."""
        started = []
        for worker in idle:
            if not self.has_waiting:
                break
            self._running[worker] = shard = self._take(worker)
            self._num_waiting -= 1
            started.append((worker, shard))
        return started

    def alone(self) -> list[int]:
        """Workers whose shard has no answer and nobody else who computes it."""
        times = Counter(self._running.values())
        return [
            worker
            for worker, shard in self._running.items()
            if times[shard] == 1 and shard not in self._finished
        ]

    def double(self, late: int, idle: int) -> int:
        """Has an idle worker compute a late worker's shard too; returns which."""
        self._running[idle] = self._running[late]
        return self._running[idle]

    def finish(self, worker: int) -> int | None:
        """The worker has answered; returns which shard, None if that had an answer."""
        shard = self._running.pop(worker, None)
        if shard is None or shard in self._finished:
            return None
        self._finished.add(shard)
        self._num_unfinished -= 1
        return shard

    def lose(self, worker: int) -> int | None:
        """The worker is gone; returns the shard it was computing, if that is needed.

        The shard is handed out again, unless another worker computes it too or
        `is_exhausted` says otherwise.
        """
        shard = self._running.pop(worker, None)
        if shard is None or shard in self._finished:
            return None
        self._losses[shard] += 1
        if shard not in self._running.values():
            self._again.append(shard)
            self._num_waiting += 1
        return shard

    def is_exhausted(self, shard: int) -> bool:
        """Whether the shard has ended more workers than `retries` allows."""
        return self._losses[shard] > self._retries

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
