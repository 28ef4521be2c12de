"""What an adapter hands to the engine: the half of it that runs in the workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from instep._seeding import shard_seed

Rule = Literal["mean", "sum"]
Array = np.ndarray[Any, np.dtype[Any]]


class Task(NamedTuple):
    """One shard of one step, to be computed by one worker.

    Attributes:
        step: the pool's step counter when the call was made.
        shard: index of the shard, `0 <= shard < shards`.
        shards: number of shards that are not empty.
        rows: number of rows in the shard, at least 1.
        pool_seed: the pool's seed.
        gradient: False for an evaluation: loss and aux only.
        version: changes whenever the parameters may have changed.
    """

    step: int
    shard: int
    shards: int
    rows: int
    pool_seed: int
    gradient: bool
    version: int

    @property
    def seeds(self) -> tuple[int, int, int]:
        """What `seed` is hashed from."""
        return self.pool_seed, self.step, self.shard

    @property
    def seed(self) -> int:
        """64-bit hash of (pool's seed, step, shard), for every random generator."""
        return shard_seed(self.pool_seed, self.step, self.shard)


@dataclass(frozen=True, slots=True)
class Output:
    """Shape, dtype and combining rule of one array that every shard returns.

    A gradient follows the pool's reduction; state (a running mean) is a "mean" in
    every pool. bfloat16 is NumPy's `ml_dtypes.bfloat16`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rule: Rule = "mean"
    name: str = ""


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What one shard gave.

    Attributes:
        loss: the mean over the shard (its sum where the pool's reduction is "sum").
        weight: what the shard counts for; None: its rows.
        outputs: one array per `Output`, or None for a gradient that does not exist.
            They are copied at once; views of reused memory are fine.
        aux: anything that pickles.
    """

    loss: Any
    weight: float | None
    outputs: Sequence[Array | None]
    aux: Any = None


class Program(Protocol):
    """Computes shards in a worker; shipped there once, by cloudpickle."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that are imported once, before the workers are forked."""

    def start(self, threads: int) -> None:
        """Called once in every worker before the first shard."""

    def preserved(self) -> AbstractContextManager[None]:
        """Puts the framework's global state back; the serial engine computes inside.

        There, the process is the user's.
        """

    def compute(self, params: Any, batch: tuple[Any, ...], task: Task) -> ShardResult:
        """The loss and gradient of one shard.

        `params` and `batch` have the structure the adapter passed in the master.
        Their arrays are read-only views of shared memory, 64-byte aligned, and are
        only good until this call returns.
        """
