"""What a live page is told: the last seconds of a pool, and sums."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from instep._events import UNDER_WAY, Computed, Fault, Happening, Phase, Updated
from instep._statistics import Statistics

# Seconds that lanes and rates look back; fewer where more slices than these happen.
WINDOW_S = 10.0
SLICES = 1200
# Faults that are listed, and points of the curve of the loss.
FAULTS = 20
POINTS = 600
_MASTER = -1  # its lane

Slice = Phase | Computed


class Digest:
    """What has happened, as far as it is shown.

    Args:
        begin: seconds of `time.perf_counter` when watching began.
    """

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._slices: deque[Slice] = deque(maxlen=SLICES)
        self._updates: deque[Updated] = deque(maxlen=SLICES)
        self._faults: deque[Fault] = deque(maxlen=FAULTS)
        self._staleness: Counter[int] = Counter()
        self._dropped = 0
        self._curve = Curve()

    def note(self, happening: Happening) -> None:
        """Takes in one more."""
        if isinstance(happening, Updated):
            self._updates.append(happening)
            self._staleness[happening.staleness] += 1
            self._dropped += happening.dropped
            self._curve.add(happening.step, happening.loss)
        elif isinstance(happening, Fault):
            self._faults.append(happening)
        else:
            self._slices.append(happening)

    def view(
        self, now: float, statistics: Statistics, under_way: Sequence[Slice] = ()
    ) -> dict[str, Any]:
        """All that the page shows, for JSON."""
        since = self._since(self._slices, now)
        slices = [one for one in (*self._slices, *under_way) if one.end > since]
        return {
            "seconds": now - self._begin,
            "window": now - since,
            "options": _options(statistics),
            "steps": statistics.steps,
            "loss": _finite(self._updates[-1].loss) if self._updates else None,
            "curve": [[step, _finite(loss)] for step, loss in self._curve.points],
            **self._rates(now),
            "staleness": sorted(self._staleness.items()),
            "dropped": self._dropped,
            "lost": statistics.workers_lost,
            "recomputed": statistics.shards_recomputed,
            "late": statistics.shards_late,
            "workers": _workers(statistics, slices, since, now),
            "phases": _phases(slices, since),
            "slices": [_slice(one, since) for one in slices],
            "faults": [
                [one.end - self._begin, one.text, one.reason] for one in self._faults
            ],
        }

    def _since(self, kept: Iterable[Happening], now: float) -> float:
        """From when on everything that is shown is still known."""
        oldest = next(iter(kept), None)
        limit = max(self._begin, now - WINDOW_S)
        is_full = isinstance(kept, deque) and len(kept) == kept.maxlen
        return max(limit, oldest.end) if oldest is not None and is_full else limit

    def _rates(self, now: float) -> dict[str, float]:
        """Steps and rows per second."""
        since = self._since(self._updates, now)
        recent = [one for one in self._updates if one.end > since]
        span = max(now - since, 1e-9)
        return {
            "steps_per_second": len(recent) / span,
            "rows_per_second": sum(one.rows for one in recent) / span,
        }


class Curve:
    """Losses of a run of any length: every n-th, so that they are few.

    Attributes:
        points: (step, loss).
    """

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self._every = 1
        self._seen = 0

    def add(self, step: int, loss: float) -> None:
        """The next one."""
        if self._seen % self._every == 0:
            self.points.append((step, loss))
        self._seen += 1
        if len(self.points) > POINTS:
            self.points, self._every = self.points[::2], 2 * self._every


def _options(statistics: Statistics) -> str:
    """In which pool it happens, in words."""
    counts = (
        _number(statistics.workers, "worker"),
        _number(statistics.shards, "shard"),
        _number(statistics.threads, "thread") + " each",
    )
    return f"engine {statistics.engine}, {', '.join(counts)}"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _workers(
    statistics: Statistics, slices: Iterable[Slice], since: float, now: float
) -> list[dict[str, Any]]:
    """Of each worker: shards, seconds, and which part of the window it computed."""
    computed = [one for one in slices if isinstance(one, Computed)]
    busy = _sums((one.worker, min(one.seconds, one.end - since)) for one in computed)
    doing = {one.worker: _what(one) for one in computed if one.outcome == UNDER_WAY}
    span = max(now - since, 1e-9)
    sums = zip(statistics.shards_computed, statistics.seconds, strict=True)
    return [
        {
            "shards": shards,
            "seconds": seconds,
            "busy": min(1.0, busy.get(worker, 0.0) / span),
            "doing": doing.get(worker, ""),
        }
        for worker, (shards, seconds) in enumerate(sums)
    ]


def _phases(slices: Iterable[Slice], since: float) -> dict[str, float]:
    """Seconds of the window that the master spent on each thing."""
    phases = [one for one in slices if isinstance(one, Phase)]
    return _sums((one.name, one.end - max(since, one.begin)) for one in phases)


def _sums(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    sums: dict[Any, float] = {}
    for key, number in pairs:
        sums[key] = sums.get(key, 0.0) + number
    return sums


def _what(one: Computed) -> str:
    what = f"shard {one.shard} of step {one.step}"
    return f"{what} ({one.outcome})" if one.outcome else what


def _slice(one: Slice, since: float) -> list[Any]:
    """[lane, begin, end, what, seconds of computing]; times since the window began."""
    times = [round(max(0.0, one.begin - since), 5), round(one.end - since, 5)]
    if isinstance(one, Phase):
        return [_MASTER, *times, one.name, 0.0]
    return [one.worker, *times, _what(one), round(one.seconds, 5)]


def _finite(number: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return number if math.isfinite(number) else str(number)
