"""Where the time of a step goes, and how it grows with workers, shards and bytes.

    python benchmarks/cost.py [--quick] [--json PATH] [--picture PATH]

    pipes      1 to 64 processes that are told to sleep by a pipe each and answer by
               one for all, and nothing else; beyond the longest sleep
    workers    as many workers that sleep instead of computing, so that two cores are
               enough for all; what a step takes beyond the longest sleep
    shards     two workers and 2 to 64 shards with an empty gradient
    bytes      two workers whose gradients have been there since before
    parts      training steps of PyTorch with two workers, taken apart

The first three are fitted: the constants of the cost model in docs/performance.md. All
cases of a kind take turns in every round, so that a busy moment hits all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cost_losses
import numpy as np
from machine import describe, load
from overhead import turns

import instep.numpy

WORKERS = (1, 2, 4, 8, 16, 32, 64)
SHARDS = (2, 4, 8, 16, 32, 64)
NBYTES = (64, 16_000, 256_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)
MODELS = ("parabola", "MLP", "CNN", "LSTM", "25 M weights")
PARTS = ("hand out", "compute", "wake up, store", "average", "hand over", "optimizer")
# From so many bytes on memory decides, not waking up.
LARGE_NBYTES = 4_000_000
PACKAGES = ("instep", "numpy", "torch")

# A case's number -> seconds, one per round.
Times = dict[int, list[float]]
# Takes a few steps; seconds of one.
Turn = Callable[[], float]


def main() -> None:
    options = parse_options()
    facts = {**describe(PACKAGES), "load before": load()}
    quick = 3 if options.quick else None
    growth = {
        "pipes": measure(pipes, WORKERS[:quick], options.rounds),
        "workers": measure(sleepers, WORKERS[:quick], options.rounds),
        "shards": measure(splitters, SHARDS[:quick], options.rounds),
        "bytes": measure(carriers, NBYTES[:quick], options.rounds),
    }
    parts = {name: parts_of(name, options.rounds) for name in MODELS[:quick]}
    facts["load after"] = load()
    print_report(growth, parts, facts)
    if options.json:
        record = {"facts": facts, "growth": growth, "parts": parts}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.picture:
        draw(options.picture, growth, parts)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="three cases of each")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write it all")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="also draw it")
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 3)
    return options


def measure(
    make: Callable[[ExitStack, int], Turn], numbers: tuple[int, ...], rounds: int
) -> Times:
    """Seconds of a step of every case in every round."""
    times: Times = {number: [] for number in numbers}
    with ExitStack() as stack:
        cases = {number: make(stack, number) for number in numbers}
        for take in cases.values():
            take()
        for count in range(rounds):
            for number in turns(list(cases), count):
                times[number].append(cases[number]())
    return times


def pipes(stack: ExitStack, processes: int) -> Turn:
    """What can be had with so many sleeping processes and pipes alone."""
    answers, answer = os.pipe()
    children = [cost_losses.sleep_when_told(answer) for _ in range(processes)]
    commands = [command for _, command in children]
    for descriptor in (answers, answer, *commands):
        stack.callback(os.close, descriptor)
    for pid, _ in children:
        stack.callback(cost_losses.end, pid)

    def take() -> float:
        begin = time.perf_counter()
        for command in commands:
            os.write(command, bytes(100))
        slept = cost_losses.sleeps(answers, processes)
        return time.perf_counter() - begin - max(slept)

    return lambda: statistics.median(take() for _ in range(5))


def sleepers(stack: ExitStack, workers: int) -> Turn:
    """A step of so many sleeping workers, without the longest sleep."""
    options = {"workers": workers, "shards": workers}
    pool = started(stack, cost_losses.sleep, **options)
    rows, params = np.zeros(workers), np.zeros(16, np.float32)
    return lambda: statistics.median(
        seconds - slowest for seconds, slowest in steps(pool, params, rows, 5)
    )


def splitters(stack: ExitStack, shards: int) -> Turn:
    """A step of two workers with so many shards that cost nothing."""
    pool = started(stack, cost_losses.empty, workers=2, shards=shards)
    rows, params = np.zeros(shards), np.zeros(16, np.float32)
    return lambda: statistics.median(s for s, _ in steps(pool, params, rows, 40))


def carriers(stack: ExitStack, nbytes: int) -> Turn:
    """A step of two workers that only have to deliver so many bytes."""
    pool = started(stack, cost_losses.preset, workers=2, shards=2)
    rows = np.zeros(2)
    pool(np.zeros(nbytes // 4, np.float32), rows)
    params = pool._resident()[0]  # where a model's parameters are: not copied
    count = 3 if nbytes >= LARGE_NBYTES else 40
    return lambda: statistics.median(s for s, _ in steps(pool, params, rows, count))


def started(stack: ExitStack, loss: Any, **options: int) -> Any:
    """A pool whose workers are all there."""
    pool = stack.enter_context(instep.numpy.value_and_grad(loss, **options))
    rows, params = np.zeros(options["shards"]), np.zeros(16, np.float32)
    while len(pool.statistics().pids) < options["workers"]:
        pool(params, rows)
    return pool


def steps(
    pool: Any, params: Any, rows: Any, count: int
) -> Iterator[tuple[float, float]]:
    """Seconds of each step, and of its slowest worker; the first is not counted."""
    pool(params, rows)
    before = pool.statistics().seconds
    for _ in range(count):
        begin = time.perf_counter()
        pool(params, rows)
        seconds = time.perf_counter() - begin
        now = pool.statistics().seconds
        yield seconds, max(b - a for a, b in zip(before, now, strict=True))
        before = now


# A training step, taken apart


class Watch:
    """Seconds spent inside some methods of a pool."""

    def __init__(self, pool: Any) -> None:
        self.seconds: dict[str, float] = {}
        for owner, name in (
            (pool._engine, "publish"),
            (pool._engine, "average"),
            (pool._dispatcher, "run"),
        ):
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, method: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds[name] = time.perf_counter() - begin

        return timed


def parts_of(name: str, rounds: int) -> dict[str, float]:
    """Median seconds of each part of a training step with two workers."""
    import torch
    from peers_models import TASKS

    import instep.torch

    torch.set_num_threads(1)
    task = TASKS[name]()
    model = task.model()
    optimizer, batches = task.optimizer(model), task.tensors()
    with instep.torch.GradientPool(model, task.loss, workers=2) as pool:
        watch, taken = Watch(pool), []
        for number in range(5 + rounds * task.steps):
            before = pool.statistics().seconds
            begin = time.perf_counter()
            optimizer.zero_grad()
            pool.backward(*batches[number % len(batches)])
            middle = time.perf_counter()
            optimizer.step()
            end = time.perf_counter()
            pairs = zip(before, pool.statistics().seconds, strict=True)
            slowest = max(b - a for a, b in pairs)
            taken.append(split(watch.seconds, slowest, middle - begin, end - middle))
    columns = zip(*taken[5:], strict=True)
    return dict(zip(PARTS, map(statistics.median, columns), strict=True))


def split(
    seconds: dict[str, float], slowest: float, backward: float, optimizer: float
) -> tuple[float, ...]:
    """The parts, in the order of PARTS."""
    publish, run, average = (seconds[name] for name in ("publish", "run", "average"))
    rest = backward - publish - run - average
    return publish, slowest, run - slowest, average, rest, optimizer


# What it says


def line(times: Times, least: int = 0) -> tuple[float, float]:
    """(start, slope) of a line through the medians, each weighted by 1 / its value."""
    numbers = np.array([number for number in times if number >= least])
    medians = np.array([statistics.median(times[number]) for number in numbers])
    slope, start = np.polyfit(numbers, medians, 1, w=1 / medians)
    return float(start), float(slope)


def print_report(
    growth: dict[str, Times],
    parts: dict[str, dict[str, float]],
    facts: dict[str, str],
) -> None:
    for fact, value in facts.items():
        print(f"{fact:<20} {value}")
    for kind, times in growth.items():
        print(f"\n{kind:>12}{'us':>12}")
        for number, seconds in times.items():
            print(f"{number:>12,}{1e6 * statistics.median(seconds):>12,.1f}")
        least = LARGE_NBYTES if max(times) > LARGE_NBYTES else 0
        start, slope = line(times, least)
        unit = "us" if slope > 1e-7 else "ns"
        scaled = slope * (1e6 if unit == "us" else 1e9)
        print(f"    about {1e6 * start:,.0f} us + {scaled:,.3f} {unit} each")
    print(f"\n{'ms':<16}" + "".join(f"{part:>16}" for part in PARTS))
    for name, seconds in parts.items():
        cells = "".join(f"{1e3 * seconds[part]:>16.3f}" for part in PARTS)
        print(f"{name:<16}{cells}")


def draw(
    path: Path, growth: dict[str, Times], parts: dict[str, dict[str, float]]
) -> None:
    """The parts of a step, stacked, and the growth with workers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    draw_parts(left, parts)
    times = growth["workers"]
    medians = [1e6 * statistics.median(seconds) for seconds in times.values()]
    right.plot(list(times), medians, "o-")
    right.set_ylim(bottom=0)
    right.set_xlabel("workers, asleep instead of computing")
    right.set_title(f"a step beyond the longest sleep, us ({os.cpu_count()} cores)")
    right.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_parts(panel: Any, parts: dict[str, dict[str, float]]) -> None:
    """A bar per model, as parts of the whole step."""
    done = np.zeros(len(parts))
    totals = [sum(seconds.values()) for seconds in parts.values()]
    labels = [
        f"{name}\n{1e3 * total:.1f} ms"
        for name, total in zip(parts, totals, strict=True)
    ]
    for part in PARTS:
        values = [seconds[part] for seconds in parts.values()]
        shares = 100 * np.divide(values, totals)
        panel.barh(labels, shares, left=done, label=part)
        done += shares
    panel.invert_yaxis()
    panel.set_xlabel("% of a training step, two workers")
    panel.legend(ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.45, 1.2))


if __name__ == "__main__":
    main()
