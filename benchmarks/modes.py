"""Updates of sleeping workers in every mode, beside what `instep.simulate` predicts.

    python benchmarks/modes.py [--seconds S] [--quick] [--json PATH] [--picture PATH]

Each portion sleeps for a prescribed time: the batch carries them, drawn once from a
Gamma distribution of mean 30 ms and shape 4. The simulation is given the very same time
for the very same portion, so that chance is the same on both sides, and the master's
time per update as a single worker shows it. Three tables:

    modes      1 to 8 equal workers in every mode
    one slow   four workers, one of which sleeps three times as long
    backup     Synchronous(backup=b) beside the N-th of N + b sleeping times, in order

A table's last column is chance: how far a predicted step time lies from that of other
draws of as many times, one standard deviation. The ratios do not have it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import modes_losses
import numpy as np
from machine import describe, load

import instep.numpy

WORKERS = tuple(range(1, 9))
MEAN_S = 0.03
SHAPE = 4
# Turns whose times are drawn; more begin again with the first.
TURNS = 4096
# What is left out at first: several portions of every worker.
SETTLE_S = 0.25
PARAMS = np.zeros(16, np.float32)
FIGURES = ("step_s", "staleness", "dropped")
PACKAGES = ("instep", "numpy", "simpy")


class Case(NamedTuple):
    """A mode, and who keeps to it."""

    mode: Any
    workers: int
    shards: int
    has_slow: bool = False


class Figures(NamedTuple):
    """What a run comes to.

    Attributes:
        step_s: mean seconds from one update to the next.
        staleness: mean of the updates'.
        dropped: share of the portions that did not count.
    """

    step_s: float
    staleness: float
    dropped: float


@dataclass(frozen=True)
class Result:
    """A case, measured and predicted.

    Attributes:
        updates: that were counted, after those that were left out.
        chance: standard deviation of the predicted step time over other draws, as a
            part of it.
        order_s: mean of the N-th of N + b sleeping times, where that was asked for.
    """

    mode: str
    workers: int
    shards: int
    updates: int
    measured: Figures
    predicted: Figures
    chance: float
    order_s: float | None = None


def main() -> None:
    options = parse_options()
    facts = {**describe(PACKAGES), "load before": load()}
    update_s = time_per_update(options.seconds)
    tables = {
        "modes": [
            result
            for workers in options.workers
            for result in compare_all(equal_cases(workers), options.seconds, update_s)
        ],
        "one slow": compare_all(slow_cases(), options.seconds, update_s),
        "backup": compare_all(backup_cases(), options.seconds, update_s),
    }
    facts["load after"] = load()
    facts["time per update"] = f"{1e3 * update_s:.2f} ms"
    print_report(tables, facts)
    if options.json:
        write_json(options.json, tables, facts)
    if options.picture:
        draw(options.picture, tables["modes"])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.2, help="of each run")
    parser.add_argument("--quick", action="store_true", help="1, 2 and 4 workers")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write it all")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="also draw it")
    options = parser.parse_args()
    options.workers = (1, 2, 4) if options.quick else WORKERS
    if options.quick:
        options.seconds = min(options.seconds, 0.3)
    return options


# What is compared


def equal_cases(workers: int) -> list[Case]:
    """Every mode."""
    modes = [
        instep.Synchronous(),
        *([instep.Synchronous(backup=1)] if workers > 1 else []),
        instep.Asynchronous(),
        instep.Asynchronous(max_staleness=1),
        instep.StaleSynchronous(1),
        instep.Local(2, 0.01),
    ]
    cases = [Case(mode, workers, workers) for mode in modes]
    return [*cases, Case(instep.StaleSynchronous(math.inf), workers, shards=1)]


def slow_cases() -> list[Case]:
    """Who waits for a slow worker, and who does not."""
    modes = [
        instep.Synchronous(),
        instep.Synchronous(backup=1),
        instep.Asynchronous(),
        instep.Asynchronous(max_staleness=3),
        instep.StaleSynchronous(1),
        instep.StaleSynchronous(4),
    ]
    return [Case(mode, 4, 4, has_slow=True) for mode in modes]


def backup_cases() -> list[Case]:
    """Four shards count; with as many workers as shards, and with some for the late.

    A late worker is not interrupted. Where there is nobody else, its next portion
    begins late, too, so that an update takes longer than the order statistic.
    """
    return [
        Case(instep.Synchronous(backup), 4 + backup + spare, 4 + backup)
        for backup in (0, 1, 2)
        for spare in sorted({0, backup})
    ]


def compare_all(cases: list[Case], seconds: float, update_s: float) -> list[Result]:
    """Each case, measured and predicted; those of equal size share their workers."""
    with ExitStack() as stack:
        pools: dict[tuple[int, int], Any] = {}
        results = []
        for case in cases:
            size = case.workers, case.shards
            if size not in pools:
                pools[size] = stack.enter_context(start(*size))
            results.append(compare(pools[size], case, seconds, update_s))
    return results


def compare(pool: Any, case: Case, seconds: float, update_s: float = 0.0) -> Result:
    """One case, measured for about so long."""
    naps = draw_naps(case)
    first, last = window(case, naps, seconds)
    predicted = predict(case, naps, first, last, update_s)
    others = [
        predict(case, draw_naps(case, seed), first, last, update_s).step_s
        for seed in range(1, 13)
    ]
    return Result(
        label(case.mode),
        case.workers,
        case.shards,
        last - first,
        measure(pool, case, naps, first, last),
        predicted,
        statistics.stdev(others) / predicted.step_s,
        order_statistic(case, naps[first:last]),
    )


def label(mode: Any) -> str:
    """The mode as one would write it: without what is as by default."""
    values = {field.name: getattr(mode, field.name) for field in fields(mode)}
    defaults = {field.name: field.default for field in fields(mode)}
    given = [f"{k}={v!r}" for k, v in values.items() if v != defaults[k]]
    return f"{type(mode).__name__}({', '.join(given)})"


def draw_naps(case: Case, seed: int = 0) -> np.ndarray:
    """Seconds of every portion, shape (turns, parts)."""
    size = TURNS, case.mode.parts(case.shards)
    return np.random.default_rng(seed).gamma(SHAPE, MEAN_S / SHAPE, size)


def window(case: Case, naps: np.ndarray, seconds: float) -> tuple[int, int]:
    """(first, last): the updates between these take about so long."""
    step_s = predict(case, naps, 0, 50).step_s
    first = math.ceil(SETTLE_S / step_s)
    return first, first + math.ceil(seconds / step_s)


def order_statistic(case: Case, naps: np.ndarray) -> float | None:
    """Mean of the N-th of each turn's N + b times."""
    backup = getattr(case.mode, "backup", None)
    if backup is None:
        return None
    return float(np.sort(naps, axis=1)[:, -1 - backup].mean())


def time_per_update(seconds: float) -> float:
    """What a single worker's update takes beyond its sleep."""
    case = Case(instep.Asynchronous(), workers=1, shards=1)
    with closing(start(1, 1)) as pool:
        result = compare(pool, case, seconds)
    return result.measured.step_s - result.predicted.step_s


# Measured


def start(workers: int, shards: int) -> Any:
    """A pool whose workers are all there."""
    options = {"workers": workers, "shards": shards}
    pool = instep.numpy.value_and_grad(modes_losses.nap, **options)
    while len(pool.statistics().pids) < workers:
        pool.evaluate(PARAMS, np.zeros(shards), 0)
    return pool


def measure(pool: Any, case: Case, naps: np.ndarray, first: int, last: int) -> Figures:
    """From update number `first` to `last`, with updates under way before and after."""
    slow = pool.statistics().pids[0] if case.has_slow else 0
    given = batches(case.mode, naps, slow)
    with pool.stream(given, case.mode, params=PARAMS) as stream:
        for _ in itertools.islice(stream, first):
            pass
        begin = time.perf_counter()
        updates = list(itertools.islice(stream, last - first))
        seconds = time.perf_counter() - begin
    num_dropped = sum(len(update.dropped) for update in updates)
    num_counted = sum(update.weight for update in updates)
    return Figures(
        seconds / len(updates),
        statistics.fmean(update.staleness for update in updates),
        num_dropped / (num_dropped + num_counted),
    )


def batches(mode: Any, naps: np.ndarray, slow: int) -> Iterator[tuple[np.ndarray, int]]:
    """A row for each portion; where a worker takes several batches, they are equal."""
    for turn in itertools.count():
        yield from [(naps[turn % TURNS], slow)] * mode.batches(turn)


# Predicted


class Prescribed:
    """A mode of which the simulation takes each portion's prescribed time.

    `simulate` asks for times in the order in which portions begin, which the mode's
    rules are told.
    """

    def __init__(self, mode: Any, naps: np.ndarray) -> None:
        self.parts, self.batches = mode.parts, mode.batches
        self._mode, self._naps = mode, naps
        self._begun: deque[Any] = deque()

    def rules(self, workers: int) -> Any:
        rules = self._mode.rules(workers)
        start = rules.start

        def noted(job: Any) -> None:
            self._begun.append(job.portion)
            start(job)

        rules.start = noted
        return rules

    def seconds(self, worker: int, generator: Any) -> float:
        turn, shard, _ = self._begun.popleft()
        return float(self._naps[turn % TURNS, shard])


def predict(
    case: Case, naps: np.ndarray, first: int, last: int, update_s: float = 0.0
) -> Figures:
    """What `measure` would find, from two simulations: one goes on where one ends."""
    before = simulated(case, naps, first, update_s) if first else None
    after = simulated(case, naps, last, update_s)
    seconds, stale = after.seconds, total_staleness(after)
    if before:
        seconds, stale = seconds - before.seconds, stale - total_staleness(before)
    number = last - first
    return Figures(seconds / number, stale / number, after.dropped)


def simulated(
    case: Case, naps: np.ndarray, steps: int, update_s: float
) -> instep.Simulation:
    mode = Prescribed(case.mode, naps)
    compute: Any = mode.seconds
    if case.has_slow:
        compute = instep.OneSlow(compute, modes_losses.SLOW_FACTOR)
    options = {"steps": steps, "shards": case.shards, "update": update_s}
    return instep.simulate(mode, case.workers, compute, **options)


def total_staleness(simulation: instep.Simulation) -> int:
    return sum(stale * number for stale, number in simulation.staleness.items())


# What it says


def print_report(tables: dict[str, list[Result]], facts: dict[str, str]) -> None:
    for fact, value in facts.items():
        print(f"{fact:<20} {value}")
    for name, results in tables.items():
        print_table(name, results)
    print_order_statistics(tables["backup"])


def print_table(name: str, results: list[Result]) -> None:
    """Measured, predicted and their ratio, for each of the three figures."""
    heads = ("ms per update", "staleness", "dropped")
    triples = "".join(f"{head:>24}" for head in heads)
    print(f"\n{name:<36}{'':>14}{triples}{'chance':>9}")
    print(" " * 50 + f"{'measured':>10}{'pred.':>7}{'ratio':>7}" * 3)
    for result in sorted(results, key=lambda result: result.mode):
        cells = "".join(
            triple(scale, measured, predicted)
            for scale, measured, predicted in zip(
                (1e3, 1, 1), result.measured, result.predicted, strict=True
            )
        )
        size = f"{result.workers:>3} of {result.shards:<2}"
        print(f"{result.mode:<36}{size}{cells}{result.chance:>9.1%}")


def triple(scale: float, measured: float, predicted: float) -> str:
    ratio = f"{measured / predicted:>7.3f}" if predicted else f"{'':>7}"
    return f"{scale * measured:>10.2f}{scale * predicted:>7.2f}{ratio}"


def print_order_statistics(results: list[Result]) -> None:
    print("\nms per update, beside the N-th of N + b sleeping times")
    print(f"{'b':>3}{'workers':>9}{'measured':>10}{'N-th':>8}{'ratio':>8}")
    for result in results:
        backup = result.shards - 4
        measured, order = 1e3 * result.measured.step_s, 1e3 * (result.order_s or 0)
        ratio = f"{measured / order:>8.3f}"
        print(f"{backup:>3}{result.workers:>9}{measured:>10.2f}{order:>8.2f}{ratio}")


def write_json(
    path: Path, tables: dict[str, list[Result]], facts: dict[str, str]
) -> None:
    """NamedTuples are lists in JSON: measured and predicted, by FIGURES."""
    rows = {name: [asdict(result) for result in tables[name]] for name in tables}
    record = {"facts": facts, "figures": FIGURES, **rows}
    path.write_text(json.dumps(record, indent=1) + "\n")


def draw(path: Path, results: list[Result]) -> None:
    """Predicted as lines, measured as points, over the number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for mode in dict.fromkeys(result.mode for result in results):
        chosen = [result for result in results if result.mode == mode]
        draw_mode(left, chosen, "step_s", 1e3)
        draw_mode(right, chosen, "staleness", 1)
    left.set_title("ms per update")
    right.set_title("mean staleness")
    for panel in (left, right):
        panel.set_xlabel("workers")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    right.legend(fontsize=8, title="measured: points, predicted: lines")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_mode(panel: Any, results: list[Result], figure: str, scale: float) -> None:
    workers = [result.workers for result in results]
    predicted = [scale * getattr(result.predicted, figure) for result in results]
    measured = [scale * getattr(result.measured, figure) for result in results]
    (line,) = panel.plot(workers, predicted, label=results[0].mode)
    panel.plot(workers, measured, "o", color=line.get_color())


if __name__ == "__main__":
    main()
