"""What contenders did in the benchmarks of training steps, and how it is shown."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

# How far losses may be apart, as a part of the first one: sums of float32 in another
# order differ in the last bits, and hundreds of steps make more of that.
TOLERANCE = 1e-3


@dataclass
class Record:
    """What a contender did.

    Attributes:
        seconds: per step, one per measured round.
        losses: one per round, those of the warm-up too.
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


Records = dict[str, Record]


def ratio(ours: Record, other: Record) -> float:
    """The median of the rounds' ratios."""
    pairs = zip(ours.seconds, other.seconds, strict=True)
    return statistics.median(a / b for a, b in pairs)


def print_facts(facts: dict[str, str]) -> None:
    for fact, value in facts.items():
        print(f"{fact:<20} {value}")


def print_table(task: str, records: Records) -> None:
    """A line per contender: time, ratio, first and last loss."""
    print(f"\n{task}: median over the rounds; instep's time over the other's")
    print_row("", ["ms / step", "ratio", "first loss", "last loss"])
    for name, record in records.items():
        print_row(name, _cells(record, ratio(records["instep"], record)))
    sys.stdout.flush()


def print_row(first: str, cells: Iterable[str]) -> None:
    print(f"{first:<16}" + "".join(f"{cell:>14}" for cell in cells))


def _cells(record: Record, ratio: float) -> Iterator[str]:
    yield f"{1e3 * statistics.median(record.seconds):.3f}"
    yield f"{ratio:.2f}"
    yield f"{record.losses[0]:.6f}"
    yield f"{record.losses[-1]:.6f}"


def write_json(path: Path, results: dict[str, Records], facts: dict[str, str]) -> None:
    """All times and losses."""
    rows = [
        {"task": task, "contender": name, **asdict(record)}
        for task, records in results.items()
        for name, record in records.items()
    ]
    path.write_text(json.dumps({"facts": facts, "results": rows}, indent=1) + "\n")
