"""The time of one step with an empty gradient: what handing out the work costs.

    python benchmarks/overhead.py [--rounds N] [--quick] [--json PATH]

For 1, 2, 4 and 8 processes, instep stands beside `multiprocessing.Pool.map` and the
all-reduces of gloo and Open MPI (contenders.py says what each does). All processes
are started once. Then, in every round, each contender in turn takes steps for a short
while and the others sleep, so that a busy moment of the machine hits all alike. The
ratios are formed within a round, for the same reason.

Ranks of MPI spin while they wait for each other: with a core for each they are fast,
and no other program gets these cores.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import psutil
from contenders import CONTENDERS, Contender
from machine import describe, load

SIZES = (1, 2, 4, 8)
# Seconds one contender takes steps in one round.
TURN_S = 0.04
PACKAGES = ("instep", "numpy", "torch", "mpi4py", "openmpi")

# Contender and number of processes -> seconds per step, one per round.
Times = dict[tuple[str, int], list[float]]


def main() -> None:
    options = parse_options()
    with ExitStack() as stack:
        running = {
            (name, size): stack.enter_context(closing(CONTENDERS[name](size)))
            for size in options.sizes
            for name in CONTENDERS
        }
        idle = idle_cpu(running)
        before = load()
        times = measure(running, options.rounds)
    facts = {
        **describe(PACKAGES),
        "load before, after": f"{before}, {load()}",
        "idle peers": f"{100 * idle:.1f} % of a core",
        "rounds": str(options.rounds),
    }
    print_report(times, options.sizes, facts)
    if options.json:
        write_json(options.json, times, facts)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="1 and 2 processes only")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write all times"
    )
    options = parser.parse_args()
    options.sizes = SIZES[:2] if options.quick else SIZES
    if options.quick:
        options.rounds = min(options.rounds, 10)
    return options


def idle_cpu(running: dict[tuple[str, int], Contender]) -> float:
    """Share of a core that all the waiting processes use together."""
    pids = {pid for contender in running.values() for pid in contender.pids()}
    processes = [psutil.Process(pid) for pid in pids]
    begin, used = time.perf_counter(), cpu_seconds(processes)
    time.sleep(1)
    return (cpu_seconds(processes) - used) / (time.perf_counter() - begin)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(running: dict[tuple[str, int], Contender], rounds: int) -> Times:
    """Seconds per step of every contender in every round."""
    times: Times = {key: [] for key in running}
    steps = dict.fromkeys(running, 10)
    for number in range(rounds):
        for key in turns(list(running), number):
            per_step = running[key].take(steps[key]) / steps[key]
            times[key].append(per_step)
            steps[key] = max(1, min(100_000, int(TURN_S / per_step)))
    return times


def turns(keys: list[tuple[str, int]], number: int) -> Iterator[tuple[str, int]]:
    """All contenders in the order of this round."""
    random.Random(number).shuffle(keys)
    yield from keys


def print_report(times: Times, sizes: tuple[int, ...], facts: dict[str, str]) -> None:
    """Prints the facts and the two tables."""
    for fact, value in facts.items():
        print(f"{fact:<20} {value}")
    print("\nmicroseconds per step, median over the rounds")
    print_row("processes", CONTENDERS)
    for size in sizes:
        print_row(size, [f"{1e6 * median(times, n, size):.1f}" for n in CONTENDERS])
    print_row(
        "per process", [f"{1e6 * slope(times, n, sizes):.1f}" for n in CONTENDERS]
    )
    print("\ninstep's time over the other's, median of the rounds' ratios")
    print_row("processes", CONTENDERS)
    for size in sizes:
        print_row(size, [f"{ratio(times, n, size):.2f}" for n in CONTENDERS])


def print_row(first: object, cells: Iterable[str]) -> None:
    print(f"{first:<12}" + "".join(f"{cell:>10}" for cell in cells))


def median(times: Times, name: str, size: int) -> float:
    return statistics.median(times[name, size])


def ratio(times: Times, name: str, size: int) -> float:
    pairs = zip(times["instep", size], times[name, size], strict=True)
    return statistics.median(ours / other for ours, other in pairs)


def slope(times: Times, name: str, sizes: tuple[int, ...]) -> float:
    """Seconds that each further process adds: of a line through the medians."""
    medians = [median(times, name, size) for size in sizes]
    return float(np.polyfit(sizes, medians, 1)[0])


def write_json(path: Path, times: Times, facts: dict[str, str]) -> None:
    rows = [
        {"contender": name, "processes": size, "seconds_per_step": seconds}
        for (name, size), seconds in times.items()
    ]
    path.write_text(json.dumps({"facts": facts, "times": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
