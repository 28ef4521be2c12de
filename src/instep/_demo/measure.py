"""Trains in one process and with a pool, and compares what comes out."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import statistics
import time
from dataclasses import dataclass

import numpy as np

from instep._demo.display import Display
from instep._demo.parabola import Array, Parameters, initial_parameters
from instep._demo.trainer import Maker, PoolSize, Trainer
from instep._demo.words import counted, name

# Runs that must end with the same bits, group by group; None: without a pool.
CHECKED_SIZES = (
    (None, PoolSize(workers=1, shards=1)),
    (PoolSize(1, 4), PoolSize(2, 4), PoolSize(4, 4)),
)
CHECKED_STEPS = 200


@dataclass(frozen=True, slots=True)
class Probe:
    """A gradient, and the parameters it belongs to."""

    parameters: Parameters
    gradient: Parameters


@dataclass(frozen=True, slots=True)
class Run:
    """A training run.

    Attributes:
        losses: the loss before each step, and the one after the last.
        steps_per_second: by the median step, which other programs disturb least.
        begin: the gradient before the first step.
        end: the gradient after the last.
        digest: SHA-256 of the parameters after `CHECKED_STEPS`, or the last step.
    """

    losses: list[float]
    steps_per_second: float
    begin: Probe
    end: Probe
    digest: str


@dataclass(frozen=True, slots=True)
class Results:
    """What the demo found out.

    Attributes:
        size: of the pool.
        one: the run in one process.
        pooled: the run with the pool.
        gradient: largest entry of one process's gradient, where the pool began and
            where it ended.
        difference: largest difference between an entry of it and the pool's.
        digests: groups that should be equal: name of a run -> its digest.
        checked_steps: steps after which these were taken.
    """

    size: PoolSize
    one: Run
    pooled: Run
    gradient: float
    difference: float
    digests: list[dict[str, str]]
    checked_steps: int

    @property
    def has_equal_bits(self) -> bool:
        """Whether each group of runs has one digest."""
        return all(len(set(group.values())) == 1 for group in self.digests)


def measure(make: Maker, size: PoolSize, steps: int, display: Display) -> Results:
    """Runs all of it; 2000 steps take seconds, TensorFlow's start-up more."""
    runs = {s: _run(make, s, steps, display) for s in (None, size)}
    probes = [runs[size].begin, runs[size].end]
    expected = [_gradient(make, probe.parameters) for probe in probes]
    gradients = [_flat(probe.gradient) for probe in probes]
    checked_steps = min(steps, CHECKED_STEPS)
    for s in itertools.chain(*CHECKED_SIZES):
        if s not in runs:
            runs[s] = _run(make, s, checked_steps, display)
    return Results(
        size,
        runs[None],
        runs[size],
        float(np.max(np.abs(expected))),
        float(np.max(np.abs(np.subtract(gradients, expected)))),
        [{name(s): runs[s].digest for s in group} for group in CHECKED_SIZES],
        checked_steps,
    )


def _run(make: Maker, size: PoolSize | None, steps: int, display: Display) -> Run:
    """Trains from the initial parameters."""
    with contextlib.closing(_start(make, size, display)) as trainer:
        begin = _probe(trainer)
        losses, seconds, digest = [], [], ""
        with display.training(name(size), steps) as show:
            for step in range(1, steps + 1):
                start = time.perf_counter()
                losses.append(trainer.step())
                seconds.append(time.perf_counter() - start)
                if step == min(steps, CHECKED_STEPS):
                    digest = _digest(trainer.parameters())
                show(losses, seconds)
        losses.append(trainer.value_and_grad()[0])
        speed = 1 / statistics.median(seconds)
        return Run(losses, speed, begin, _probe(trainer), digest)


def _start(make: Maker, size: PoolSize | None, display: Display) -> Trainer:
    if size is None:
        return make(initial_parameters(), None)
    with display.waiting(f"starting {counted(size.workers, 'worker')}"):
        return make(initial_parameters(), size)


def _probe(trainer: Trainer) -> Probe:
    return Probe(trainer.parameters(), trainer.value_and_grad()[1])


def _gradient(make: Maker, parameters: Parameters) -> Array:
    """One process's gradient, all entries in a row."""
    with contextlib.closing(make(parameters, None)) as trainer:
        return _flat(trainer.value_and_grad()[1])


def _flat(arrays: Parameters) -> Array:
    return np.concatenate([array.ravel() for array in arrays])


def _digest(parameters: Parameters) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in parameters)).hexdigest()
