"""Which split of the cores is the fastest? Measures them in turns and decides.

A machine's speed changes while one measures. So every way to compute a step has its
turn in each round, a few steps long: what disturbs the machine disturbs all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

ONE_PROCESS, PROCESSES = "one process", "processes"
# How much slower one process may be and still be chosen: it has fewer moving parts.
MARGIN = 0.03
MIN_ROUNDS = 3
# The length of a turn: many quick steps, one of a slow model.
TURN_S, TURN_STEPS = 0.1, 200

NOTE = "the bits of a result depend on shards and threads: another split, other bits"

# Computes so many steps and returns the seconds of each.
Turn = Callable[[int], list[float]]
# Called now and then with the part that is done, 0.0 to 1.0.
Progress = Callable[[float], object]


class Setting(NamedTuple):
    """One way to compute a step; shards are as many as workers.

    Attributes:
        engine: "one process" (this one) or "processes".
        workers: processes that compute.
        threads: of each, inside one operation.
    """

    engine: str
    workers: int
    threads: int

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of a pool that computes so."""
        return {
            "engine": "serial" if self.engine == ONE_PROCESS else "processes",
            "workers": self.workers,
            "shards": self.workers,
            "threads": self.threads,
        }

    def __str__(self) -> str:
        threads = _counted(self.threads, "thread")
        if self.engine == ONE_PROCESS:
            return f"one process with {threads}"
        each = " each" if self.workers > 1 else ""
        return f"{_counted(self.workers, 'worker')} with {threads}{each}"


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one setting.

    Attributes:
        setting: engine, workers, threads.
        seconds: of a step; the median.
        ratio: to the fastest, 1.0 or more.
    """

    setting: Setting
    seconds: float
    ratio: float

    @property
    def workers(self) -> int:
        return self.setting.workers

    @property
    def threads(self) -> int:
        return self.setting.threads

    @property
    def engine(self) -> str:
        """Its label: "one process" or "processes"."""
        return self.setting.engine

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of a pool that computes so."""
        return self.setting.options


@dataclass(frozen=True, slots=True)
class Tuning:
    """What `pool.tune` measured; prints as a table.

    Attributes:
        rows: one per setting, the fastest first.
    """

    rows: tuple[Row, ...]

    @property
    def best(self) -> Row:
        """The fastest; one process, where that is less than 3 % slower."""
        alone = self._fastest(ONE_PROCESS)
        return alone if alone and alone.ratio <= 1 + MARGIN else self.rows[0]

    @property
    def verdict(self) -> str:
        """Which is the fastest, and by how much, in a sentence."""
        fastest, best, alone = self.rows[0], self.best, self._fastest(ONE_PROCESS)
        if best.engine == ONE_PROCESS:
            is_first = best is fastest
            how = "the" if is_first else f"within {MARGIN:.0%} of the"
            other = "" if is_first else f" ({fastest.setting})"
            return (
                f"{best.setting} is {how} fastest{other}: processes do not pay for "
                "this model and batch"
            )
        verb = "is" if best.workers == 1 else "are"
        ratio = f": {alone.ratio:.2f} times as fast as {alone.setting}" if alone else ""
        return f"{best.setting} {verb} the fastest{ratio}"

    def table(self) -> list[tuple[str, ...]]:
        """The head and a line per row, as text."""
        head = ("", "workers", "threads", "ms per step", "times the fastest")
        return [head, *map(_cells, self.rows)]

    def __str__(self) -> str:
        lines = self.table()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines
        ]
        return "\n".join([*text, self.verdict, f"note: {NOTE}"])

    def _fastest(self, engine: str) -> Row | None:
        return next((row for row in self.rows if row.engine == engine), None)


def settings(cores: int, rows: int, alone: Sequence[int]) -> list[Setting]:
    """The settings to measure.

    Args:
        cores: that may be used.
        rows: of the batch; a worker without rows has nothing to do.
        alone: numbers of threads to measure one process with.

    Left out is what leaves more than half of the cores without work: it cannot win
    but where one core is as fast as all, and that is measured.

    Example:
        >>> [(w, t) for _, w, t in settings(2, 100, [])]
        [(1, 1), (1, 2), (2, 1)]
    """
    divisors = [n for n in range(1, cores + 1) if cores % n == 0]
    pairs = [
        (workers, threads)
        for workers in divisors
        for threads in divisors
        if workers <= rows and cores <= 2 * workers * threads <= 2 * cores
    ]
    pairs = sorted({(1, 1), *pairs})
    one = [Setting(ONE_PROCESS, 1, threads) for threads in alone]
    return one + [Setting(PROCESSES, *pair) for pair in pairs]


def measure(
    turns: Mapping[Setting, Turn], seconds: float, show: Progress
) -> dict[Setting, list[float]]:
    """The seconds of every step, after a first turn that is not counted."""
    length = min(TURN_S, seconds / (2 * MIN_ROUNDS * len(turns)))
    steps = {s: _steps(turn(1)[-1], length) for s, turn in turns.items()}
    times: dict[Setting, list[float]] = {setting: [] for setting in turns}
    order, begin, last, rounds = list(turns), time.monotonic(), 0.0, 0
    while rounds < MIN_ROUNDS or _since(begin) + last <= seconds:
        start = time.monotonic()
        for setting in order:
            times[setting] += turns[setting](steps[setting])
            show(min(1.0, _since(begin) / seconds))
        order.reverse()  # nobody always comes after the same one
        last, rounds = _since(start), rounds + 1
    show(1.0)
    return times


def decide(times: Mapping[Setting, Sequence[float]]) -> Tuning:
    """Compares medians, which what else the machine does disturbs least.

    Among equals the one that comes first is the faster.
    """
    medians = {setting: statistics.median(times[setting]) for setting in times}
    order = sorted(medians, key=medians.__getitem__)
    fastest = medians[order[0]]
    return Tuning(tuple(Row(s, medians[s], medians[s] / fastest) for s in order))


def _steps(seconds: float, length: float) -> int:
    """How many steps fill a turn."""
    return max(1, min(TURN_STEPS, int(length / max(seconds, 1e-9))))


def _since(moment: float) -> float:
    return time.monotonic() - moment


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.engine,
        str(row.workers),
        str(row.threads),
        f"{1e3 * row.seconds:.3f}",
        f"{row.ratio:.2f}",
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
