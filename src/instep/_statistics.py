"""What a pool has done so far, as a frozen snapshot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistics:
    """A pool's counters at one moment.

    Attributes:
        engine: its name.
        workers: processes the pool was asked for.
        shards: parts of a batch.
        threads: threads per worker inside one operation.
        steps: gradients handed over.
        pids: process ids of the workers that are alive; () for the serial engine.
        workers_lost: workers that died or were replaced after a timeout.
        shards_recomputed: shards computed again because of that.
        shards_late: shards handed to a second worker, because the first one took long;
            the first answer counted.
        bytes_moved: bytes of parameters, batches and shard results written to the
            memory that master and workers share.
        shards_computed: shards computed, per worker.
        seconds: time spent computing shards, per worker.
    """

    engine: str
    workers: int
    shards: int
    threads: int
    steps: int
    pids: tuple[int, ...]
    workers_lost: int
    shards_recomputed: int
    shards_late: int
    bytes_moved: int
    shards_computed: tuple[int, ...]
    seconds: tuple[float, ...]
