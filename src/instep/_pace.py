"""When a shard is late: a rule over seconds, without a clock.

A shard is late once it has taken twice as long as the slowest of the shards before it,
and a moment more, since a busy machine may stop any process for that long. (Backup
tasks of MapReduce, Dean and Ghemawat 2004, for shards.)
"""

from __future__ import annotations

FACTOR = 2.0
MOMENT_S = 0.1


class Pace:
    """How long shards take: the slowest of this call and the one before."""

    def __init__(self) -> None:
        self._before: float | None = None
        self._now: float | None = None

    def begin(self) -> None:
        """Another call begins."""
        if self._now is not None:
            self._before, self._now = self._now, None

    def note(self, seconds: float) -> None:
        """A shard was answered, this long after it was handed out."""
        self._now = seconds if self._now is None else max(self._now, seconds)

    @property
    def limit(self) -> float | None:
        """Seconds after which a shard is late; None while no shard is known."""
        known = [s for s in (self._before, self._now) if s is not None]
        return FACTOR * max(known) + MOMENT_S if known else None
