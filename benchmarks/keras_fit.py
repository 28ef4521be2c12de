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
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from keras_models import TASKS
from keras_processes import Trainer
from keras_trainers import WAYS
from machine import describe, load
from overhead import idle_cpu, turns
from records import TOLERANCE, Record, Records, print_facts, print_table, write_json

# Rounds that are not measured: functions are traced, workers started.
WARM_UP = 2
PACKAGES = ("instep", "numpy", "tensorflow", "keras")


def main() -> None:
    options = parse_options()
    facts = {**describe(PACKAGES), "rounds": str(options.rounds)}
    results: dict[str, Records] = {}
    for task in TASKS:
        before = load()
        results[task], idle = measure(task, options.rounds)
        facts[f"load, {task}"] = f"{before} before, {load()} after"
        facts[f"idle, {task}"] = f"{100 * idle:.1f} % of a core"
    print_facts(facts)
    for task in TASKS:
        print_table(task, results[task])
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


def doubts(task: str, records: Records) -> Iterator[str]:
    """What is wrong with the losses, one line each."""
    reference = records["fit"].losses
    for name, record in records.items():
        first, last = record.losses[0], record.losses[-1]
        if not last < first:
            yield f"{task}, {name}: the loss went from {first} to {last}"
        if not abs(last - reference[-1]) <= TOLERANCE * reference[0]:
            yield f"{task}, {name}: the loss is {last}, that of fit {reference[-1]}"


if __name__ == "__main__":
    main()
