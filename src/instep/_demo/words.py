"""How the demo calls things."""

from __future__ import annotations

from instep._demo.trainer import PoolSize


def name(size: PoolSize | None) -> str:
    """A way to train: "4 workers, 4 shards"."""
    if size is None:
        return "one process"
    return f"{counted(size.workers, 'worker')}, {counted(size.shards, 'shard')}"


def counted(number: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
