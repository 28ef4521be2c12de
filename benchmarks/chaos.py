"""Trains twice from the same start, undisturbed and in chaos: the bits must be equal.

    python benchmarks/chaos.py [--framework torch|numpy] [--steps N] [--kills N]
        [--stops N] [--resizes N] [--workers N] [--shards N] [--seed N]
        [--timeout SECONDS] [--json PATH]

In the second training, workers are ended by SIGKILL and stopped by SIGSTOP (some go on
later, the others have to be replaced by the pool's `timeout`) in every phase of a step,
the pool is resized, and a few times the process that starts the workers is killed, too.
The seed decides what happens when; which process is hit at what instruction, chance.

Exit status 1: the parameters differ in a bit, or something is left behind.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos_agent import Agent, Hit, plan
from chaos_tasks import TRAININGS, Training
from machine import describe, load

# Seconds a shard may take: long beside a shard's milliseconds, on a busy machine, too.
TIMEOUT_S = 5.0
# The signals come from outside and say nothing about a shard.
RETRIES = 20
# One end of the template for this many kills.
KILLS_PER_TEMPLATE = 60
# Seconds that processes may take to be gone after the pool was closed.
END_S = 10.0


@dataclass
class Run:
    """What one training gave.

    Attributes:
        digest: SHA-256 of the parameters at its end.
        start_s: from the pool's making until the first workers were all ready.
        losses: of every step.
        spans: begin and end of every step.
        statistics: of the pool, at its end.
        agent: who disturbed it.
    """

    digest: str
    start_s: float
    losses: list[float]
    spans: list[tuple[float, float]]
    statistics: Any
    agent: Agent | None = None

    def step_s(self) -> list[float]:
        """Seconds per step."""
        return [end - begin for begin, end in self.spans]


@dataclass
class Report:
    """What is printed; see `LABELS`."""

    framework: str
    steps: int
    kills_survived: int
    kills_by_phase: dict[str, int]
    stops_survived: int
    stops_by_phase: dict[str, int]
    stops_continued: int
    templates_killed: int
    resizes: int
    resize_longest_s: float
    workers_lost: int
    shards_recomputed: int
    shards_late: int
    step_undisturbed_s: tuple[float, float]
    step_disturbed_s: tuple[float, float, float]
    kill_steps_compared: int
    lost_per_kill_s: float
    successor_ready_s: float
    first_start_s: float
    kill_steps: int
    kill_steps_not_waiting: int
    processes_left: list[str]
    memory_left: int
    descriptors_left: int
    dev_shm_left: list[str]
    first_loss_that_differs: int | None
    digest: str
    digest_undisturbed: str
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether the bits are the same and nothing is left."""
        left = self.processes_left or self.dev_shm_left or self.memory_left
        is_equal = self.digest == self.digest_undisturbed
        return is_equal and not left and self.descriptors_left <= 0


def main() -> None:
    options = parse_options()
    before = load()
    report = measure(options)
    report.facts = {
        **describe(["instep", options.framework]),
        "load before, after": f"{before}, {load()}",
        "workers, shards": f"{options.workers}, {options.shards}",
        "timeout": f"{options.timeout} s",
        "seed": str(options.seed),
    }
    print_report(report)
    if options.json:
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    sys.exit(not report.is_good)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of these arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--framework", choices=TRAININGS, default="torch")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--resizes", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all this")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> Report:
    """Both trainings, and what the second one left."""
    make_pool(options).close()  # loads all that stays loaded
    descriptors, memory = count_descriptors(), count_memory()
    names = dev_shm()
    calm = train(options)
    rough = train(options, disturbed_beside=calm)
    agent = rough.agent
    assert agent is not None
    gc.collect()
    left = processes_left(agent.pids)
    return summarize(
        options,
        calm,
        rough,
        agent,
        processes_left=left,
        memory_left=count_memory() - memory,
        descriptors_left=count_descriptors() - descriptors,
        dev_shm_left=sorted(dev_shm() - names),
    )


def make_pool(options: argparse.Namespace) -> Training:
    """A training at its start."""
    return TRAININGS[options.framework](
        workers=options.workers,
        shards=options.shards,
        threads=1,
        seed=options.seed,
        timeout=options.timeout,
        retries=RETRIES,
    )


def train(options: argparse.Namespace, disturbed_beside: Run | None = None) -> Run:
    """All steps; in chaos where there is an undisturbed training to compare with."""
    begin = time.perf_counter()
    training = make_pool(options)
    agent = None
    try:
        while len(training.pool.statistics().pids) < options.workers:
            training.evaluate()
        start_s = time.perf_counter() - begin
        if disturbed_beside is not None:
            usual = statistics.median(disturbed_beside.step_s())
            agent = Agent(training.pool, events_of(options), usual)
        losses, spans = take_steps(training, options.steps, agent)
        if agent is not None:
            agent.finish(training)
        digest = training.digest()
        counted = training.pool.statistics()
    finally:
        if agent is not None:
            agent.close()
        training.close()
    return Run(digest, start_s, losses, spans, counted, agent)


def events_of(options: argparse.Namespace) -> list[Any]:
    """The plan of the chaos."""
    kinds = {
        "kill": options.kills,
        "stop": options.stops,
        "resize": options.resizes,
        "template": -(-options.kills // KILLS_PER_TEMPLATE),
    }
    return plan(options.steps, kinds, options.workers, options.seed)


def take_steps(
    training: Training, steps: int, agent: Agent | None
) -> tuple[list[float], list[tuple[float, float]]]:
    """Losses and times of all steps."""
    losses, spans = [], []
    for step in range(steps):
        if agent is not None:
            agent.begin(step)
        begin = time.perf_counter()
        losses.append(training.step())
        spans.append((begin, time.perf_counter()))
    return losses, spans


# What it came to


def summarize(
    options: argparse.Namespace, calm: Run, rough: Run, agent: Agent, **left: Any
) -> Report:
    """The figures of both trainings."""
    kills = [hit for hit in agent.hits if hit.event.kind == "kill"]
    usual, rough_s = calm.step_s(), rough.step_s()
    lone = lone_kills(agent.hits, len(rough_s))
    extra = [rough_s[step] - statistics.median(usual) for step in lone]
    ready = [hit.ready - hit.moment for hit in kills if hit.ready is not None]
    followed = [h for h in kills if h.ready is not None and h.step < len(rough_s)]
    alone = [hit for hit in followed if rough.spans[hit.step][1] < (hit.ready or 0)]
    return Report(
        framework=options.framework,
        steps=len(rough_s),
        kills_survived=len(kills),
        kills_by_phase=agent.phases("kill"),
        stops_survived=count(agent.hits, "stop"),
        stops_by_phase=agent.phases("stop"),
        stops_continued=agent.num_continued,
        templates_killed=count(agent.hits, "template"),
        resizes=count(agent.hits, "resize"),
        resize_longest_s=max(agent.resize_s, default=0.0),
        workers_lost=rough.statistics.workers_lost,
        shards_recomputed=rough.statistics.shards_recomputed,
        shards_late=rough.statistics.shards_late,
        step_undisturbed_s=(statistics.median(usual), quantile(usual, 0.9)),
        step_disturbed_s=(
            *(statistics.median(rough_s), quantile(rough_s, 0.9)),
            max(rough_s),
        ),
        kill_steps_compared=len(lone),
        lost_per_kill_s=statistics.median(extra) if extra else 0.0,
        successor_ready_s=statistics.median(ready) if ready else 0.0,
        first_start_s=rough.start_s,
        kill_steps=len(followed),
        kill_steps_not_waiting=len(alone),
        first_loss_that_differs=first_difference(calm.losses, rough.losses),
        digest=rough.digest,
        digest_undisturbed=calm.digest,
        **left,
    )


def count(hits: list[Hit], kind: str) -> int:
    """How many events of a kind were delivered."""
    return sum(hit.event.kind == kind for hit in hits)


def lone_kills(hits: list[Hit], steps: int) -> list[int]:
    """Steps in which a worker was killed, and nothing else in it nor just before."""
    kinds: dict[int, list[str]] = {}
    for hit in hits:
        kinds.setdefault(hit.step, []).append(hit.event.kind)
    return [
        step
        for step in range(steps)
        if kinds.get(step) == ["kill"] and step - 1 not in kinds
    ]


def quantile(values: list[float], part: float) -> float:
    """The value that this part of all does not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def first_difference(calm: list[float], rough: list[float]) -> int | None:
    """The first step whose losses differ."""
    pairs = zip(calm, rough, strict=True)
    return next((k for k, (one, other) in enumerate(pairs) if one != other), None)


# What is left


def processes_left(pids: set[int]) -> list[str]:
    """Child processes, and former ones of the pool, that do not end."""
    deadline = time.monotonic() + END_S
    while (left := _living(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _living(pids: set[int]) -> list[str]:
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    return [name for pid in sorted(children | pids) if (name := _worker_name(pid))]


def _worker_name(pid: int) -> str:
    """Number and command of a process of a pool; "" if there is none of this number."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid():
            return ""  # ended, and not ours to reap
        command = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    is_ours = "instep._worker" in command or process.ppid() == os.getpid()
    return f"{pid} {command}" if is_ours else ""


def count_descriptors() -> int:
    """Open descriptors of this process."""
    return psutil.Process().num_fds()


def count_memory() -> int:
    """Descriptors of this process that are shared memory of a pool."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += "memfd:instep" in os.readlink(entry)
        except OSError:
            continue  # the listing's own descriptor
    return found


def dev_shm() -> set[str]:
    """Names of shared memory that could be a pool's."""
    return {name for name in os.listdir("/dev/shm") if "instep" in name}


# Output


def print_report(report: Report) -> None:
    """Prints the facts and the figures, one a line."""
    for fact, value in report.facts.items():
        print(f"{fact:<40} {value}")
    print()
    for label, text in rows(report):
        print(f"{label:<40} {text}")


def rows(report: Report) -> list[tuple[str, str]]:
    """Labels and values."""
    r = report
    return [
        ("framework, steps", f"{r.framework}, {r.steps}"),
        ("kills survived", f"{r.kills_survived}  ({listed(r.kills_by_phase)})"),
        ("stops survived", f"{r.stops_survived}  ({listed(r.stops_by_phase)})"),
        ("  continued, others replaced", f"{r.stops_continued}"),
        ("ends of the template survived", f"{r.templates_killed}"),
        ("resizes", f"{r.resizes}  (longest call {ms(r.resize_longest_s)})"),
        ("workers lost, as the pool counts", f"{r.workers_lost}"),
        ("shards recomputed", f"{r.shards_recomputed}"),
        ("shards late", f"{r.shards_late}"),
        ("step undisturbed, median and 90 %", listed_ms(r.step_undisturbed_s)),
        ("step in chaos, median, 90 %, longest", listed_ms(r.step_disturbed_s)),
        (
            "time lost per kill, median",
            f"{ms(r.lost_per_kill_s)}  (of {r.kill_steps_compared} steps with a kill "
            "and nothing else)",
        ),
        ("successor ready after a kill, median", ms(r.successor_ready_s)),
        ("first workers ready", ms(r.first_start_s)),
        (
            "kill steps ended before the successor",
            f"{r.kill_steps_not_waiting} of {r.kill_steps}",
        ),
        ("processes left", ", ".join(r.processes_left) or "0"),
        ("shared memory left, descriptors left", f"{r.memory_left}, "
         f"{r.descriptors_left}"),
        ("/dev/shm entries left", ", ".join(r.dev_shm_left) or "0"),
        ("SHA-256 of the parameters", r.digest),
        ("  undisturbed", r.digest_undisturbed),
        ("verdict", verdict(r)),
    ]  # fmt: skip


def verdict(report: Report) -> str:
    """In words."""
    if report.digest != report.digest_undisturbed:
        return f"DIFFERENT BITS, first in the loss of {report.first_loss_that_differs}"
    return "the same bits, nothing left" if report.is_good else "SOMETHING IS LEFT"


def listed(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(numbers.items()))


def listed_ms(seconds: Sequence[float]) -> str:
    return ", ".join(map(ms, seconds))


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


if __name__ == "__main__":
    main()
