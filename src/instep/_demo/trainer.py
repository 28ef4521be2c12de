"""A way of training the network: a framework, in this process or with a pool."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from instep._demo.frameworks import FRAMEWORKS
from instep._demo.parabola import Parameters


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many processes a pool has, and parts a batch."""

    workers: int
    shards: int


class Trainer(Protocol):
    """Gradient descent on the whole batch of points, one step at a time."""

    def step(self) -> float:
        """Takes a step; the loss before it."""

    def value_and_grad(self) -> tuple[float, Parameters]:
        """The loss and its gradient where training stands."""

    def parameters(self) -> Parameters:
        """Where training stands, as arrays of its own."""

    def close(self) -> None:
        """Ends the pool, if there is one."""


# Parameters to start from and the pool's size; None: no pool, this process alone.
Maker = Callable[[Parameters, PoolSize | None], Trainer]


def load_maker(framework: str) -> Maker:
    """The function that makes a framework's trainers; imports the framework."""
    trainer = FRAMEWORKS[framework].trainer
    return cast(Maker, importlib.import_module(f"instep._demo.{trainer}").make)


def wait_for_workers(pool: Any, compute: Callable[[], object]) -> None:
    """Computes until every worker has started, so that no start is timed."""
    while len(pool.statistics().pids) < pool.statistics().workers:
        compute()
