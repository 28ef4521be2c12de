"""The averaging of P vectors alone, from 64 B to 1 GB, beside what memory allows.

    python benchmarks/averaging.py [--rounds N] [--quick] [--json PATH]

For 2, 3 and 4 processes with different float32 vectors (averaging_ranks.py):

    step       a whole step of instep with a gradient that each worker has ready: hand
               out a row per worker, wake it up, copy its gradient into its slot, wake
               the master up, average, hand over the average
    instep     of that the averaging alone: from the moment the last worker has
               answered to the average in the master's hand
    gloo       `torch.distributed.all_reduce` of P ranks, in place
    MPI        `Allreduce` of P ranks of Open MPI, from one vector into another
    bound      P processes that together read P vectors and write one, each its part
               in memory of its own, and wait for nobody: the least memory traffic that
               an average needs, with as much speed as memory gives

gloo and MPI need no copy into a slot, since their vector is where it has to be; they
leave the sum in every rank, and are not charged for dividing it. Sizes lie on both
sides of the threshold from which the workers average instead of the master.

All vectors of a size are made before it is measured, and all results are checked.
Then, in every round, each contender in turn takes steps for a short while and the
others sleep, so that a busy moment of the machine hits all alike. Ratios are formed
within a round, for the same reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import psutil
from averaging_ranks import AVERAGERS
from crew import Crew, at_work, mpirun
from machine import describe, load
from overhead import idle_cpu, turns

from instep.engines.processes import LARGE

PROCESSES = (2, 3, 4)
# Beside the vector, a slot has a line of 64 bytes; so the first of the two is below.
AROUND_LARGE = LARGE - 128, LARGE + 64
SIZES = (64, 4096, 1 << 18, 1 << 20, 2_700_000, *AROUND_LARGE, 16_000_000)
LARGE_SIZES = (100_000_000, 400_000_000, 1_000_000_000)
# Seconds one contender takes steps in one round.
TURN_S = 0.05
# From this size on a third of the rounds will do: a step outlasts a busy moment.
FEW_ROUNDS = 50_000_000
# Part of the free memory that all vectors may take.
MEMORY_SHARE = 0.85
SINGLE = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
PACKAGES = ("instep", "numpy", "torch", "mpi4py", "openmpi")
COLUMNS = ("step", "instep", "gloo", "MPI", "bound")

# Column -> seconds per step, one per round.
Times = dict[str, list[float]]
# Number of processes and bytes of a vector.
Case = tuple[int, int]


def main() -> None:
    options = parse_options()
    facts = {**describe(PACKAGES), "rounds": str(options.rounds)}
    results: dict[Case, Times] = {}
    for processes in options.processes:
        before = load()
        idle = measure(processes, options, results, facts)
        facts[f"load, {processes} processes"] = f"{before} before, {load()} after"
        facts[f"idle, {processes} processes"] = f"{100 * idle:.1f} % of a core"
    if options.json:
        write_json(options.json, results, facts)
    print_report(results, facts)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--quick", action="store_true", help="2 processes, 16 MB at most, 3 rounds"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write all times"
    )
    options = parser.parse_args()
    options.processes = PROCESSES[:1] if options.quick else PROCESSES
    options.sizes = SIZES if options.quick else SIZES + LARGE_SIZES
    if options.quick:
        options.rounds = min(options.rounds, 3)
    return options


def measure(
    processes: int,
    options: argparse.Namespace,
    results: dict[Case, Times],
    facts: dict[str, str],
) -> float:
    """Adds the times of all sizes; the share of a core that all use while they wait."""
    makers = {name: partial(crew, name, processes) for name in AVERAGERS}
    with at_work(makers) as crews:
        for one in crews.values():
            one.carry_out({"nbytes": 64, "steps": 10})
        idle = idle_cpu(crews)
        for nbytes in options.sizes:
            if not has_room(processes, nbytes):
                print(f"{processes} x {size_text(nbytes)}: skipped, no room in memory")
                continue
            number = rounds_of(nbytes, options.rounds)
            results[processes, nbytes] = times_of(crews, nbytes, number)
            print(f"{processes} x {size_text(nbytes)} measured", flush=True)
            if options.json:  # what there is so far
                write_json(options.json, results, facts)
    return idle


def crew(name: str, processes: int) -> Crew:
    """The processes of a contender; those of instep are its own to start."""
    ranks = 1 if name == "instep" else processes
    arguments = [name, str(processes)]
    return Crew(
        "averaging_ranks.py",
        arguments,
        ranks,
        launcher=mpirun(ranks) if name == "MPI" else (),
        environment=SINGLE,
    )


def has_room(processes: int, nbytes: int) -> bool:
    """Whether all vectors of all contenders fit in the memory that is free."""
    instep = 2 * processes + 3  # gradients and slots; parameters, two results
    gloo, mpi, bound = processes, 2 * processes, processes + 1
    wanted = (instep + gloo + mpi + bound) * nbytes
    return wanted < MEMORY_SHARE * psutil.virtual_memory().available


def rounds_of(nbytes: int, rounds: int) -> int:
    return max(1, min(rounds, max(3, rounds // 3))) if nbytes >= FEW_ROUNDS else rounds


def times_of(crews: dict[str, Crew], nbytes: int, rounds: int) -> Times:
    """Seconds per step of every contender in every round, for vectors of this size."""
    times: Times = {column: [] for column in COLUMNS}
    first = {name: take(one, nbytes, 1)["step"] for name, one in crews.items()}
    steps = {name: steps_for(seconds) for name, seconds in first.items()}
    for number in range(rounds):
        for name in turns(list(crews), number):
            seconds = take(crews[name], nbytes, steps[name])
            times[name].append(seconds["averaging"])
            if name == "instep":
                times["step"].append(seconds["step"])
            steps[name] = steps_for(seconds["step"])
    return times


def take(one: Crew, nbytes: int, steps: int) -> dict[str, float]:
    """Seconds of a step and of its averaging, those of the slowest process."""
    answers = one.carry_out({"nbytes": nbytes, "steps": steps})
    return {
        "step": max(answer["seconds"] for answer in answers),
        "averaging": max(answer["averaging"] for answer in answers),
    }


def steps_for(seconds: float) -> int:
    return max(1, min(100_000, int(TURN_S / seconds)))


def print_report(results: dict[Case, Times], facts: dict[str, str]) -> None:
    """Prints the facts and the two tables."""
    for fact, value in facts.items():
        print(f"{fact:<20} {value}")
    print("\nmicroseconds, median over the rounds")
    print_row(("processes", "bytes"), COLUMNS)
    for (processes, nbytes), times in results.items():
        medians = [1e6 * statistics.median(times[column]) for column in COLUMNS]
        print_row((processes, size_text(nbytes)), [f"{x:,.1f}" for x in medians])
    print("\nthe averaging of instep over the other's time, and a whole step over it;")
    print("median of the rounds' ratios")
    others = ("gloo", "MPI", "bound")
    print_row(("processes", "bytes"), [*others, *(f"step/{name}" for name in others)])
    for (processes, nbytes), times in results.items():
        ratios = [ratio(times, ours, n) for ours in ("instep", "step") for n in others]
        print_row((processes, size_text(nbytes)), [f"{x:.2f}" for x in ratios])


def print_row(first: tuple[object, object], cells: Iterable[str]) -> None:
    row = "".join(f"{cell:>12}" for cell in cells)
    print(f"{first[0]!s:<10}{first[1]!s:>14}{row}")


def size_text(nbytes: int) -> str:
    if nbytes in AROUND_LARGE:
        return f"{LARGE >> 20} MiB {nbytes - LARGE:+d}"
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (1024, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def ratio(times: Times, ours: str, other: str) -> float:
    pairs = zip(times[ours], times[other], strict=True)
    return statistics.median(a / b for a, b in pairs)


def write_json(path: Path, results: dict[Case, Times], facts: dict[str, str]) -> None:
    rows = [
        {"processes": processes, "nbytes": nbytes, "seconds": times}
        for (processes, nbytes), times in results.items()
    ]
    path.write_text(json.dumps({"facts": facts, "times": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
