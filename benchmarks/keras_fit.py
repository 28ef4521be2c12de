"""The time of one training step of Keras: alone, with instep, with TensorFlow's own.

    python benchmarks/keras_fit.py [--rounds N] [--quick] [--json PATH]

Two models (keras_models.py), a parabola with 31 weights and a small CNN, are trained
on TensorFlow in five ways (keras_trainers.py):

    fit              `model.fit`, one process, as many threads as TensorFlow likes
    fit, 1 thread    the same with one thread inside operations
    instep           `model.fit` within `instep.keras.parallel(model, workers=2)`
    MWMS             `tf.distribute.MultiWorkerMirroredStrategy`, two processes
    MWMS, 1 thread   the same with one thread inside operations, as instep's workers

All take the same steps: same batches in the same order, same initial weights, same
optimizer. Each has processes of its own, started once per model. Then, in every round,
each in turn takes some steps and the others sleep, so that a busy moment of the machine
hits all alike. The ratios are formed within a round, for the same reason. Losses have
to go down, and to be those of plain `fit` but for rounding; if not, the script fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from keras_models import TASKS
from keras_processes import Trainer
from keras_trainers import WAYS
from machine import describe, load
from overhead import idle_cpu, turns

# Rounds that are not measured: functions are traced, workers started.
WARM_UP = 2
# How far losses may be apart, as a part of the first one: sums of float32 in another
# order differ in the last bits, and hundreds of steps make more of that.
TOLERANCE = 1e-3
PACKAGES = ("instep", "numpy", "tensorflow", "keras")


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


def main() -> None:
    options = parse_options()
    facts = {**describe(PACKAGES), "rounds": str(options.rounds)}
    results: dict[str, Records] = {}
    for task in TASKS:
        before = load()
        results[task], idle = measure(task, options.rounds)
        facts[f"load, {task}"] = f"{before} before, {load()} after"
        facts[f"idle, {task}"] = f"{100 * idle:.1f} % of a core"
    print_report(results, facts)
    if options.json:
        write_json(options.json, results, facts)
    if wrong := [line for task in results for line in doubts(task, results[task])]:
        sys.exit("\n".join(wrong))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="5 rounds at most")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write all times and losses"
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 5)
    return options


def measure(task: str, rounds: int) -> tuple[Records, float]:
    """What each contender did, and the share of a core that all use while they wait."""
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(closing(Trainer(name, task))) for name in WAYS
        }
        records = {name: Record() for name in running}
        for number in range(WARM_UP):
            take_turns(running, records, number)
        idle = idle_cpu(running)
        for record in records.values():
            record.seconds.clear()
        for number in range(rounds):
            take_turns(running, records, number)
    return records, idle


def take_turns(running: dict[str, Trainer], records: Records, number: int) -> None:
    for name in turns(list(running), number):
        seconds, loss = running[name].take()
        records[name].seconds.append(seconds)
        records[name].losses.append(loss)


def print_report(results: dict[str, Records], facts: dict[str, str]) -> None:
    """Prints the facts and a table per model."""
    for fact, value in facts.items():
        print(f"{fact:<20} {value}")
    for task, records in results.items():
        print(f"\n{task}: median over the rounds; instep's time over the other's")
        print_row("", ["ms / step", "ratio", "first loss", "last loss"])
        for name, record in records.items():
            print_row(name, cells(record, ratio(records["instep"], record)))


def print_row(first: str, cells: Iterable[str]) -> None:
    print(f"{first:<16}" + "".join(f"{cell:>12}" for cell in cells))


def cells(record: Record, ratio: float) -> Iterator[str]:
    yield f"{1e3 * statistics.median(record.seconds):.3f}"
    yield f"{ratio:.2f}"
    yield f"{record.losses[0]:.6f}"
    yield f"{record.losses[-1]:.6f}"


def ratio(ours: Record, other: Record) -> float:
    pairs = zip(ours.seconds, other.seconds, strict=True)
    return statistics.median(a / b for a, b in pairs)


def doubts(task: str, records: Records) -> Iterator[str]:
    """What is wrong with the losses, one line each."""
    reference = records["fit"].losses
    for name, record in records.items():
        first, last = record.losses[0], record.losses[-1]
        if not last < first:
            yield f"{task}, {name}: the loss went from {first} to {last}"
        if not abs(last - reference[-1]) <= TOLERANCE * reference[0]:
            yield f"{task}, {name}: the loss is {last}, that of fit {reference[-1]}"


def write_json(path: Path, results: dict[str, Records], facts: dict[str, str]) -> None:
    rows = [
        {"task": task, "contender": name, **asdict(record)}
        for task, records in results.items()
        for name, record in records.items()
    ]
    path.write_text(json.dumps({"facts": facts, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
