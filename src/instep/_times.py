"""How long workers compute and bytes travel, for `instep.simulate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from instep._errors import ArgumentError
from instep._statistics import Statistics

Seconds = Callable[[int, np.random.Generator], float]  # (worker, generator) -> seconds
Compute = float | Sequence[float] | Statistics | Seconds


@dataclass(frozen=True)
class Network:
    """The links between the master and the workers.

    The master has one line out and one line in; on each of them one transfer follows
    the other, so that P gradients take P times as long as one.

    Args:
        latency: seconds until the first byte arrives; other transfers go on meanwhile.
        bandwidth: bytes per second, in each direction.

    Raises:
        ArgumentError: a negative latency, or no bandwidth.

    Example:
        >>> import instep
        >>> gigabit = instep.Network(latency=1e-4, bandwidth=125e6)
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        check_not_negative(latency=self.latency)
        check_positive(bandwidth=self.bandwidth)


@dataclass(frozen=True)
class Constant:
    """Every portion takes the same time.

    Args:
        seconds: for a portion.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_not_negative(seconds=self.seconds)

    def __call__(self, worker: int, generator: np.random.Generator) -> float:
        return self.seconds


@dataclass(frozen=True)
class Gamma:
    """Times that scatter by `1 / sqrt(shape)` of their mean.

    Ali, Siegel, Maheswaran and Hensgen, "Representing Task and Machine Heterogeneities
    for Heterogeneous Computing Systems", 2000.

    Args:
        mean: seconds.
        shape: 1: the exponential distribution; 100: a scatter of 10 %.
    """

    mean: float
    shape: float

    def __post_init__(self) -> None:
        check_positive(mean=self.mean, shape=self.shape)

    def __call__(self, worker: int, generator: np.random.Generator) -> float:
        return generator.gamma(self.shape, self.mean / self.shape)


@dataclass(frozen=True)
class HeavyTail:
    """Mostly the same time, and now and then a very long one: Pareto's distribution.

    The shortest time is `mean * (alpha - 1) / alpha`, and times longer than t have the
    probability `(shortest / t) ** alpha`. Dean and Barroso, "The Tail at Scale", 2013,
    say why clusters have such times.

    Args:
        mean: seconds.
        alpha: above 1; the smaller, the longer the tail.
    """

    mean: float
    alpha: float

    def __post_init__(self) -> None:
        check_positive(mean=self.mean)
        if not self.alpha > 1:
            raise ArgumentError(
                f"alpha={self.alpha!r}; expected a number above 1: with less, the "
                "times have no mean"
            )

    def __call__(self, worker: int, generator: np.random.Generator) -> float:
        shortest = self.mean * (self.alpha - 1) / self.alpha
        return shortest * (1 + generator.pareto(self.alpha))


@dataclass(frozen=True)
class OneSlow:
    """One worker is slower than the others.

    Args:
        base: times of the others; whatever `simulate` takes as `compute`.
        factor: that one's times are so many times longer.
        worker: its number.
    """

    base: Compute
    factor: float
    worker: int = 0

    def __post_init__(self) -> None:
        sampler(self.base)
        check_positive(factor=self.factor)

    def __call__(self, worker: int, generator: np.random.Generator) -> float:
        seconds = sampler(self.base)(worker, generator)
        return seconds * self.factor if worker == self.worker else seconds


def sampler(compute: Compute) -> Seconds:
    """Whatever says how long it takes, as a function of worker and generator."""
    if isinstance(compute, Statistics):
        return sampler(_measured(compute))
    if callable(compute):
        return compute
    if isinstance(compute, int | float):
        return Constant(compute)
    is_list = isinstance(compute, Sequence | np.ndarray) and len(compute) > 0
    if isinstance(compute, str) or not is_list:
        raise ArgumentError(
            f"compute={compute!r}; expected seconds, seconds for each worker, a "
            "distribution, pool.statistics(), or compute(worker, generator)"
        )
    each = [float(seconds) for seconds in compute]
    check_not_negative(**{f"compute[{k}]": seconds for k, seconds in enumerate(each)})
    return lambda worker, generator: each[worker % len(each)]


def _measured(statistics: Statistics) -> list[float]:
    """Each worker's seconds per shard; the mean of all for one that has had none."""
    numbers = statistics.shards_computed
    if not sum(numbers):
        raise ArgumentError(
            "compute=pool.statistics() of a pool that has computed nothing; take some "
            "steps first"
        )
    mean = sum(statistics.seconds) / sum(numbers)
    pairs = zip(statistics.seconds, numbers, strict=True)
    return [seconds / number if number else mean for seconds, number in pairs]


def check_whole(**numbers: Any) -> None:
    """An error for a number that is none, or below 1."""
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise ArgumentError(
                f"{name}={value!r}; expected a whole number, at least 1"
            )


def check_positive(**numbers: float) -> None:
    """An error for a number that is not above 0."""
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not value > 0:
            raise ArgumentError(f"{name}={value!r}; expected a number above 0")


def check_not_negative(**numbers: float) -> None:
    """An error for a number below 0."""
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not value >= 0:
            raise ArgumentError(f"{name}={value!r}; expected a number of at least 0")
