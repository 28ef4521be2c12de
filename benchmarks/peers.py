"""Whole training steps: instep beside its peers, and beside what is possible.

    python benchmarks/peers.py [--quick] [--models A,B] [--rounds N] [--json PATH]
                               [--picture PATH]

Contenders (peers_ranks.py), all with the same model and batches (peers_models.py), the
same initial weights and optimizer:

    instep        `instep.torch.GradientPool`, two workers with a thread each
    1 thread      PyTorch in one process
    all threads   the same with as many threads as cores
    DDP           DistributedDataParallel over gloo, two ranks with a thread each
    limit         two processes that compute their half of the batch and take their
                  own step, and exchange nothing: no data-parallel step can be faster
    mpi4py        two ranks that Allreduce the flattened gradient
    joblib        two workers of loky that get parameters and rows as arrays
    Ray           the same with two actors; left out where Ray is not installed
    JAX           one process, rows sharded over two CPU devices; dense models only
    MWMS          TensorFlow's MultiWorkerMirroredStrategy, two ranks with a thread
                  each; dense models and the CNN

Each has processes of its own, started once per model; starting is not part of a step.
Then, in every round, each contender in turn takes some steps and the others sleep, so
that a busy moment of the machine hits all alike. Ratios are formed within a round, for
the same reason. All but the limit have to have the same losses but for rounding; if
not, the script fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from crew import Crew, at_work, mpirun
from keras_processes import free_ports
from machine import describe, load
from overhead import idle_cpu, turns
from peers_models import TASKS
from peers_ranks import WAYS, Way
from records import (
    TOLERANCE,
    Record,
    Records,
    print_facts,
    print_row,
    print_table,
    ratio,
    write_json,
)

# Rounds that are not measured: functions are compiled, caches filled.
WARM_UP = 2
PACKAGES = (
    *("instep", "numpy", "torch", "mpi4py", "openmpi", "joblib"),
    *("jax", "tensorflow", "keras"),
)


def main() -> None:
    options = parse_options()
    facts = {**describe(PACKAGES), "rounds": str(options.rounds)}
    results: dict[str, Records] = {}
    for name, way in WAYS.items():
        if reason := way.missing():
            print(f"{name} is left out: {reason}")
    for task in options.models:
        before = load()
        results[task], idle = measure(task, options.rounds)
        facts[f"load, {task}"] = f"{before} before, {load()} after"
        facts[f"idle, {task}"] = f"{100 * idle:.1f} % of a core"
        print_table(task, results[task])
        if options.json:  # as far as it is
            write_json(options.json, results, facts)
    print_report(results, facts)
    if options.picture:
        draw(options.picture, results)
    if wrong := [line for task in results for line in doubts(task, results[task])]:
        sys.exit("\n".join(wrong))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="3 rounds at most")
    parser.add_argument(
        "--models", metavar="A,B", help=f"some of: {', '.join(TASKS)}", default=""
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write all times and losses"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="PATH", help="also draw the ratios"
    )
    options = parser.parse_args()
    options.models = options.models.split(",") if options.models else list(TASKS)
    if unknown := set(options.models) - set(TASKS):
        parser.error(f"unknown models {sorted(unknown)}; known: {', '.join(TASKS)}")
    if options.quick:
        options.rounds = min(options.rounds, 3)
    return options


def measure(task: str, rounds: int) -> tuple[Records, float]:
    """What each contender did, and the share of a core that all use while they wait."""
    steps = TASKS[task]().steps
    makers = {
        name: partial(crew, name, way, task)
        for name, way in WAYS.items()
        if not way.missing() and task in (way.tasks or TASKS)
    }
    with at_work(makers) as running:
        records = {name: Record() for name in running}
        for number in range(WARM_UP):
            take_turns(running, records, number, steps)
        idle = idle_cpu(running)
        for record in records.values():
            record.seconds.clear()
        for number in range(rounds):
            take_turns(running, records, number, steps)
    return records, idle


def crew(name: str, way: Way, task: str) -> Crew:
    """The processes of a contender."""
    threads = {"OMP_NUM_THREADS": str(way.threads)} if way.threads else {}
    return Crew(
        "peers_ranks.py",
        [name, task, ",".join(free_ports(way.ranks))],
        way.ranks,
        launcher=mpirun(way.ranks) if name == "mpi4py" else (),
        environment={**threads, **way.environment},
    )


def take_turns(
    running: dict[str, Crew], records: Records, number: int, steps: int
) -> None:
    """A turn of each: the time of its slowest process, the mean of their losses."""
    for name in turns(list(running), number):
        answers = running[name].carry_out({"steps": steps})
        losses = [answer["loss"] for answer in answers]
        records[name].seconds.append(max(answer["seconds"] for answer in answers))
        records[name].losses.append(statistics.fmean(losses))


def print_report(results: dict[str, Records], facts: dict[str, str]) -> None:
    """Prints the facts and the ratios of all models."""
    print()
    print_facts(facts)
    print("\ninstep's time over the other's, median of the rounds' ratios")
    print_row("", results)
    for name in WAYS:
        ratios = [
            f"{ratio(records['instep'], records[name]):.2f}" if name in records else "-"
            for records in results.values()
        ]
        print_row(name, ratios)


def doubts(task: str, records: Records) -> Iterator[str]:
    """What is wrong with the losses, one line each."""
    reference = records["1 thread"].losses
    for name, record in records.items():
        first, last = record.losses[0], record.losses[-1]
        if not last < first:
            yield f"{task}, {name}: the loss went from {first} to {last}"
        if not WAYS[name].is_exact:
            continue
        pairs = zip(record.losses, reference, strict=True)
        if not max(abs(a - b) for a, b in pairs) <= TOLERANCE * reference[0]:
            yield f"{task}, {name}: loss {last}, that of 1 thread {reference[-1]}"


def draw(path: Path, results: dict[str, Records]) -> None:
    """Bars of instep's time over the other's, a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.6 * columns, 3.0 * rows), squeeze=False
    )
    for panel in axes.flat[len(results) :]:
        panel.axis("off")
    for panel, (task, records) in zip(axes.flat, results.items(), strict=False):
        draw_panel(panel, task, records)
    figure.suptitle(
        "instep's time per training step over the other's; left of 1: instep is faster"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_panel(panel: object, task: str, records: Records) -> None:
    """One model: a bar from 1 to the ratio for each contender, on a log scale."""
    others = [name for name in records if name != "instep"]
    ratios = [ratio(records["instep"], records[name]) for name in others]
    colors = ["tab:green" if x <= 1 else "tab:red" for x in ratios]
    panel.barh(others, [x - 1 for x in ratios], left=1, color=colors)
    for place, value in enumerate(ratios):
        side = "left" if value >= 1 else "right"
        panel.text(value, place, f" {value:.2f} ", va="center", ha=side, fontsize=8)
    panel.set_xscale("log")
    low, high = min(1, *ratios), max(1, *ratios)
    panel.set_xlim(low / 2.5, high * 2.5)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.minorticks_off()
    panel.set_xticks([1], ["1"])
    panel.invert_yaxis()
    step = 1e3 * statistics.median(records["instep"].seconds)
    panel.set_title(f"{task} ({step:.3g} ms)", fontsize=10)


if __name__ == "__main__":
    main()
