"""Updates of sleeping workers in every mode, beside what `instep.simulate` predicts.

    python benchmarks/modes.py [--seconds S] [--quick] [--json PATH] [--picture PATH]

Each portion sleeps for a prescribed time: the batch carries them, drawn once from a
Gamma distribution of mean 30 ms and shape 4. The simulation is given the very same time
for the very same portion, so that chance is the same on both sides, and what a portion
and an update cost besides, as one worker at a time shows it. Sleeping needs no core:
more workers than cores do not slow each other down. Three tables:

    modes      1 to 8 equal workers in every mode
    one slow   four workers, one of which sleeps three times as long (shape 100)
    backup     Synchronous(backup=b) beside the N-th of N + b sleeping times, in order

The column "chance" is the standard deviation of the predicted step time over other
draws of as many sleeping times: that exact is a figure by itself. Ratios of equal
workers do not have this error, but that of whatever else the machine does meanwhile.
As many workers as cores notice that most: each has a core of its own, and wakes up late
where another program uses it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
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
# Of times that scatter by 10 %. Beside a slow worker, it is not the same on both sides
# who is given which portion, and so chance is not the same either: this keeps it small.
STEADY_SHAPE = 100
# Turns whose times are drawn; more begin again with the first.
TURNS = 4096
# What is left out at first: several portions of every worker.
SETTLE_S = 0.15
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


class Run(NamedTuple):
    """A case, measured from update number `first` to `last`."""

    case: Case
    first: int
    last: int
    figures: Figures


class Costs(NamedTuple):
    """Seconds beyond the sleep.

    Attributes:
        portion: the worker's and the system's: sleeping too long, waking up.
        update: the master's, which makes one after the other.
    """

    portion: float
    update: float


FREE = Costs(0.0, 0.0)


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
    cases = {"modes": [case for size in options.workers for case in equal_cases(size)]}
    if not options.quick:
        cases |= {"one slow": slow_cases(), "backup": backup_cases()}
    measured = {name: measure_all(cases[name], options.seconds) for name in cases}
    costs = least(costs for _, seen in measured.values() for costs in seen)
    tables = {
        name: [compare(run, costs) for run in runs]
        for name, (runs, _) in measured.items()
    }
    facts["load after"] = load()
    facts["beyond the sleep"] = (
        f"{1e3 * costs.portion:.2f} ms a portion, {1e3 * costs.update:.2f} ms an update"
    )
    print_report(tables, facts)
    if options.json:
        write_json(options.json, tables, facts)
    if options.picture:
        draw(options.picture, tables["modes"])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.9, help="of each run")
    parser.add_argument("--quick", action="store_true", help="1, 2 and 4 workers")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write it all")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="also draw it")
    options = parser.parse_args()
    options.workers = (1, 2, 4) if options.quick else WORKERS
    if options.quick:
        options.seconds = min(options.seconds, 0.2)
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


def compare(run: Run, costs: Costs) -> Result:
    """What was measured, beside the prediction."""
    case, first, last, figures = run
    naps = draw_naps(case)
    predicted = predict(case, naps, first, last, costs)
    others = [
        predict(case, draw_naps(case, seed), 1, 1 + last - first, costs).step_s
        for seed in range(1, 9)
    ]
    return Result(
        label(case.mode),
        case.workers,
        case.shards,
        last - first,
        figures,
        predicted,
        statistics.stdev(others) / predicted.step_s,
        order_statistic(case, naps[first:last], costs),
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
    shape = STEADY_SHAPE if case.has_slow else SHAPE
    return np.random.default_rng(seed).gamma(shape, MEAN_S / shape, size)


def order_statistic(case: Case, naps: np.ndarray, costs: Costs) -> float | None:
    """Mean of the N-th of each turn's N + b times, and what comes to that."""
    backup = getattr(case.mode, "backup", None)
    if backup is None:
        return None
    return float(np.sort(naps, axis=1)[:, -1 - backup].mean()) + sum(costs)


# Measured


def measure_all(cases: list[Case], seconds: float) -> tuple[list[Run], list[Costs]]:
    """Each case; those of equal size, which follow each other, share their workers."""
    runs, costs = [], []
    for size, chosen in itertools.groupby(cases, lambda case: case[1:3]):
        with start(*size) as pool:
            costs.append(measure_costs(pool, seconds / 2))
            runs += [measure(pool, case, seconds) for case in chosen]
    return runs, costs


def start(workers: int, shards: int) -> Any:
    """A pool whose workers are all there."""
    options = {"workers": workers, "shards": shards}
    pool = instep.numpy.value_and_grad(modes_losses.nap, **options)
    while len(pool.statistics().pids) < workers:
        pool.evaluate(PARAMS, np.zeros(shards), 0)
    return pool


def measure(pool: Any, case: Case, seconds: float) -> Run:
    """About so long, with updates under way before and after."""
    naps = draw_naps(case)
    step_s = predict(case, naps, 1, 50).step_s
    first = math.ceil(SETTLE_S / step_s)
    last = first + math.ceil(seconds / step_s)
    times, updates = take(pool, case, naps, last)
    updates = updates[first:]
    num_dropped = sum(len(update.dropped) for update in updates)
    num_counted = sum(update.weight for update in updates)
    figures = Figures(
        (times[-1] - times[first - 1]) / len(updates),
        statistics.fmean(update.staleness for update in updates),
        num_dropped / (num_dropped + num_counted),
    )
    return Run(case, first, last, figures)


def measure_costs(pool: Any, seconds: float) -> Costs:
    """As one worker at a time shows them."""
    number = 3 + math.ceil(seconds / MEAN_S)
    case = Case(instep.Asynchronous(warm_start=number), workers=1, shards=1)
    naps = draw_naps(case)
    times, updates = take(pool, case, naps, number)
    waited = np.array([update.wait_seconds for update in updates])
    beyond = waited - naps[:number, 0]
    return Costs(
        float(np.median(beyond[1:])), float(np.median(np.diff(times) - waited[1:]))
    )


def least(costs: Iterable[Costs]) -> Costs:
    """The least of each: a busy moment of the machine is no cost."""
    portion, update = zip(*costs, strict=True)
    return Costs(min(portion), min(update))


def take(
    pool: Any, case: Case, naps: np.ndarray, number: int
) -> tuple[list[float], list[Any]]:
    """(times, updates): so many, and when they came; more would be under way."""
    slow = pool.statistics().pids[-1] if case.has_slow else 0
    given, times, updates = batches(case.mode, naps, slow), [], []
    with pool.stream(given, case.mode, params=PARAMS) as stream:
        for update in itertools.islice(stream, number):
            times.append(time.perf_counter())
            updates.append(update)
    return times, updates


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
    case: Case, naps: np.ndarray, first: int, last: int, costs: Costs = FREE
) -> Figures:
    """What `measure` would find, from two simulations: one goes on where one ends."""
    before, after = (simulated(case, naps, steps, costs) for steps in (first, last))
    number = last - first
    return Figures(
        (after.seconds - before.seconds) / number,
        (total_staleness(after) - total_staleness(before)) / number,
        after.dropped,
    )


def simulated(
    case: Case, naps: np.ndarray, steps: int, costs: Costs
) -> instep.Simulation:
    mode = Prescribed(case.mode, naps)
    sleep: Any = mode.seconds
    if case.has_slow:
        # The last: who is idle first is given a portion first, here and there.
        sleep = instep.OneSlow(sleep, modes_losses.SLOW_FACTOR, case.workers - 1)

    def seconds(worker: int, generator: Any) -> float:
        return float(sleep(worker, generator)) + costs.portion

    options: Any = {"steps": steps, "shards": case.shards, "update": costs.update}
    return instep.simulate(mode, case.workers, seconds, **options)


def total_staleness(simulation: instep.Simulation) -> int:
    return sum(stale * number for stale, number in simulation.staleness.items())


# What it says


def print_report(tables: dict[str, list[Result]], facts: dict[str, str]) -> None:
    for fact, value in facts.items():
        print(f"{fact:<20} {value}")
    for name, results in tables.items():
        print_table(name, results)
    if "backup" in tables:
        print_order_statistics(tables["backup"])


def print_table(name: str, results: list[Result]) -> None:
    """Measured, predicted and their ratio, for each of the three figures."""
    heads = "".join(f"{head:>24}" for head in ("ms per update", "staleness", "dropped"))
    print(f"\n{name:<47}{heads}")
    columns = f"{'measured':>10}{'pred.':>7}{'ratio':>7}" * 3
    print(f"{'':<31}{'workers':>8}{'shards':>8}{columns}{'chance':>8}")
    for result in sorted(results, key=lambda result: result.mode):
        pairs = zip((1e3, 1, 1), result.measured, result.predicted, strict=True)
        cells = "".join(triple(*pair) for pair in pairs)
        size = f"{result.workers:>8}{result.shards:>8}"
        print(f"{result.mode:<31}{size}{cells}{result.chance:>8.1%}")


def triple(scale: float, measured: float, predicted: float) -> str:
    ratio = f"{measured / predicted:>7.3f}" if predicted else f"{'':>7}"
    return f"{scale * measured:>10.2f}{scale * predicted:>7.2f}{ratio}"


def print_order_statistics(results: list[Result]) -> None:
    """The N-th of N + b, as far as workers for the late ones make it reachable."""
    print("\nms per update, beside the N-th of N + b sleeping times (N = 4)")
    print(f"{'b':>3}{'workers':>9}{'measured':>10}{'pred.':>8}{'N-th':>8}{'ratio':>8}")
    for result in results:
        order_s = result.order_s or math.nan
        times = result.measured.step_s, result.predicted.step_s, order_s
        measured, predicted, order = (1e3 * seconds for seconds in times)
        print(
            f"{result.shards - 4:>3}{result.workers:>9}{measured:>10.2f}"
            f"{predicted:>8.2f}{order:>8.2f}{measured / order:>8.3f}"
        )


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
