"""Training steps on MPI: instep beside `Allreduce` by hand.

    python benchmarks/machines.py [--rounds N] [--models A,B] [--ranks A,B]
                                  [--json PATH]

Contenders, all with the same model, batches and initial weights (peers_models.py):

    instep 2      `mpirun -n 3 instep run --engine mpi`: rank 0 and two that compute
    by hand 2     two ranks that Allreduce the flattened gradient with mpi4py

and the same with four. They take turns as in peers.py, on this machine; so ratios say
what the engine costs, not what a network does.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from crew import Crew, at_work, mpirun
from machine import describe, load
from peers import take_turns
from peers_models import TASKS
from peers_ranks import ON_MPI
from records import Record, Records, print_facts, print_row, ratio, write_json

MODELS = ("MLP", "25 M weights")
WARM_UP = 2
INSTEP = ["-m", "instep", "run", "--engine", "mpi"]


def main() -> None:
    options = parse_options()
    facts = {**describe(("instep", "numpy", "torch", "mpi4py", "openmpi"))}
    facts["rounds"] = str(options.rounds)
    results: dict[str, Records] = {}
    for task in options.models:
        before = load()
        results[task] = measure(task, options.ranks, options.rounds)
        facts[f"load, {task}"] = f"{before} before, {load()} after"
        if options.json:  # as far as it is
            write_json(options.json, results, facts)
    print_facts(facts)
    for task, records in results.items():
        print(f"\n{task}: median over the rounds; instep's time over that by hand")
        print_row("ranks", ["instep, ms", "by hand, ms", "ratio"])
        for ranks in options.ranks:
            print_row(str(ranks), cells(records, ranks))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", metavar="A,B", default=",".join(MODELS))
    parser.add_argument("--ranks", metavar="A,B", default="2,4", help="that compute")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write all times"
    )
    options = parser.parse_args()
    options.models = options.models.split(",")
    options.ranks = [int(word) for word in options.ranks.split(",")]
    if unknown := set(options.models) - set(TASKS):
        parser.error(f"unknown models {sorted(unknown)}; known: {', '.join(TASKS)}")
    return options


def measure(task: str, ranks: list[int], rounds: int) -> Records:
    """What each contender did."""
    names = [f"{kind} {number}" for number in ranks for kind in ("instep", "by hand")]
    with at_work({name: partial(crew, name, task) for name in names}) as running:
        records = {name: Record() for name in running}
        for number in range(-WARM_UP, rounds):
            if number == 0:
                for record in records.values():
                    record.seconds.clear()
            take_turns(running, records, number, TASKS[task]().steps)
    return records


def crew(name: str, task: str) -> Crew:
    """The processes of a contender."""
    way, number = ON_MPI[name], int(name.split()[-1])
    launcher = mpirun(number)
    if way.ranks == 1:  # the script's, besides those that compute
        launcher = [*mpirun(number + 1), *INSTEP]
    words = [name, task, ""]
    return Crew(
        "peers_ranks.py",
        words,
        way.ranks,
        launcher=launcher,
        environment={"OMP_NUM_THREADS": "1"},
    )


def cells(records: Records, ranks: int) -> list[str]:
    ours, other = records[f"instep {ranks}"], records[f"by hand {ranks}"]
    times = [
        f"{1e3 * sorted(r.seconds)[len(r.seconds) // 2]:.3f}" for r in (ours, other)
    ]
    return [*times, f"{ratio(ours, other):.2f}"]


if __name__ == "__main__":
    sys.exit(main())
