"""Many steps with new contents each: do memory and descriptors stay as they were?

    python benchmarks/soak.py [--steps N] [--workers N] [--framework numpy|torch]
        [--json PATH]

Samples the descriptors, the shared memory and the resident memory of the script and of
every worker. Resident memory is judged without its shared pages: these count in every
process that has touched them, and are judged by themselves.

Exit status 1: one of them is not flat.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from chaos_tasks import TRAININGS, Training
from machine import describe, load

SAMPLE_STEPS = 500
# One line of the table for so many samples.
SAMPLES_PER_LINE = 4
# Caches fill and memory is laid out in the first steps: what comes later is compared
# with the state after these.
WARM_STEPS = 1000
# Allocators keep a little more or less: resident memory may change by this part.
TOLERANCE = 0.02
SHARDS = 4
MEBI = 1 << 20


@dataclass(frozen=True)
class Sample:
    """What the processes hold after some steps; workers in the order of their pids."""

    step: int
    seconds: float
    master_descriptors: int
    worker_descriptors: tuple[int, ...]
    shared_bytes: int
    master_rss: int
    worker_rss: tuple[int, ...]
    master_own: int
    worker_own: tuple[int, ...]


def main() -> None:
    options = parse_options()
    facts = {
        **describe(["instep", options.framework]),
        "framework": options.framework,
        "load before": load(),
    }
    for fact, value in facts.items():
        print(f"{fact:<20} {value}")
    samples = soak(options.framework, options.workers, options.steps)
    room = options.workers * TRAININGS[options.framework].gradient_nbytes
    verdicts = judge(samples, room)
    for name, is_flat in verdicts.items():
        print(f"{name:<22} {'flat' if is_flat else 'NOT FLAT'}")
    if options.json:
        rows = [asdict(sample) for sample in samples]
        text = {"facts": facts, "flat": verdicts, "samples": rows}
        options.json.write_text(json.dumps(text, indent=1) + "\n")
    sys.exit(not all(verdicts.values()))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--framework", choices=TRAININGS, default="numpy")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write samples")
    options = parser.parse_args()
    if options.steps < WARM_STEPS + SAMPLE_STEPS:
        parser.error(f"--steps: at least {WARM_STEPS + SAMPLE_STEPS}")
    return options


def soak(framework: str, workers: int, steps: int) -> list[Sample]:
    """Takes the steps; prints a line now and then."""
    training: Training = TRAININGS[framework](workers=workers, shards=SHARDS, threads=1)
    samples: list[Sample] = []
    print_row(HEAD)
    with closing(training):
        while len(training.pool.statistics().pids) < workers:
            training.evaluate()
        begin = time.perf_counter()
        for step in range(1, steps + 1):
            training.step()
            if step % SAMPLE_STEPS == 0:
                seconds = time.perf_counter() - begin
                samples.append(sample(step, seconds, training.pool.statistics().pids))
                if len(samples) % SAMPLES_PER_LINE == 0 or len(samples) == 2:
                    print_row(cells(samples[-1]))
    return samples


def sample(step: int, seconds: float, pids: Iterable[int]) -> Sample:
    """What master and workers hold now."""
    master = psutil.Process()
    workers = [psutil.Process(pid) for pid in sorted(pids)]
    return Sample(
        step=step,
        seconds=seconds,
        master_descriptors=master.num_fds(),
        worker_descriptors=tuple(worker.num_fds() for worker in workers),
        shared_bytes=shared_memory(),
        master_rss=master.memory_info().rss,
        worker_rss=tuple(worker.memory_info().rss for worker in workers),
        master_own=own_memory(master),
        worker_own=tuple(map(own_memory, workers)),
    )


def own_memory(process: psutil.Process) -> int:
    """Bytes of resident memory without pages of files and shared memory."""
    memory = process.memory_info()
    return memory.rss - memory.shared


def shared_memory() -> int:
    """Bytes of all shared memory that this process has a descriptor of, each once."""
    sizes: dict[int, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:" in os.readlink(entry):
                status = entry.stat()
                sizes[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue  # the listing's own descriptor
    return sum(sizes.values())


def judge(samples: list[Sample], room: int) -> dict[str, bool]:
    """What has stayed as it was after the first steps.

    Args:
        samples: of the whole run.
        room: bytes of shared memory that may be added, once: a worker that is late
            holds a slot of a gradient's size while another computes its shard.
    """
    first, *rest = [s for s in samples if s.step >= WARM_STEPS]
    descriptors = first.master_descriptors, first.worker_descriptors
    return {
        "descriptors": all(
            (s.master_descriptors, s.worker_descriptors) == descriptors for s in rest
        ),
        "shared memory": all(
            0 <= s.shared_bytes - first.shared_bytes <= room for s in rest
        ),
        "memory of the script": all(
            is_near(s.master_own, first.master_own) for s in rest
        ),
        "memory of the workers": all(
            is_near(now, then)
            for s in rest
            for now, then in zip(s.worker_own, first.worker_own, strict=True)
        ),
    }


def is_near(now: int, then: int) -> bool:
    """Whether resident memory is what it was."""
    return abs(now - then) <= TOLERANCE * then


HEAD = (
    *("step", "seconds", "descriptors", "of workers", "shared MiB"),
    *("RSS MiB", "of workers", "own MiB", "of workers"),
)


def cells(one: Sample) -> tuple[str, ...]:
    """A sample in the columns of `HEAD`."""
    return (
        *(str(one.step), f"{one.seconds:.0f}", str(one.master_descriptors)),
        " ".join(map(str, one.worker_descriptors)),
        f"{one.shared_bytes / MEBI:.2f}",
        f"{one.master_rss / MEBI:.1f}",
        " ".join(f"{rss / MEBI:.1f}" for rss in one.worker_rss),
        f"{one.master_own / MEBI:.2f}",
        " ".join(f"{own / MEBI:.2f}" for own in one.worker_own),
    )


def print_row(texts: Iterable[str]) -> None:
    print(*(f"{text:>11}" for text in texts), flush=True)


if __name__ == "__main__":
    main()
