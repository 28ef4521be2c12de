"""The processes of averaging.py: each has a vector, and they form the average.

    python averaging_ranks.py CONTENDER P FOLDER RANK

See crew.py for how they are told to. An order is {"nbytes": of a vector, "steps":
number}, the answer {"seconds": per step, ...} of this process. The first step after
a change of size is checked value by value, and each turn begins with a step that is
not timed: it wakes the others up and brings the memory in.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from crew import Answer, Order, rank_of, received_orders, serve

# Bytes of all vectors that the bound works on at a time: the sum stays in the cache.
BLOCK = 1 << 20
# After so many elements a vector repeats itself.
PERIOD = 1024
# How many elements are compared at a time.
CHUNK = 1 << 20
# How many elements are compared after each turn; all of them after a change of size.
SAMPLE = 1000


class Averager(Protocol):
    """One process of a contender."""

    def prepare(self, number: int) -> None:
        """Makes vectors of so many float32."""

    def step(self) -> Any:
        """Forms the average once."""

    def check(self, stride: int) -> None:
        """Compares every so-manieth element of what the last step gave."""


def own_values(rank: int, number: int, first: int = 0) -> np.ndarray:
    """The vector of a rank, or a part: numbers whose sums are exact in float32."""
    period = (np.arange(first, first + PERIOD) % PERIOD + 2 * rank).astype(np.float32)
    return np.resize(period, number)


def expect(
    values: np.ndarray, ranks: int, stride: int, factor: float = 1, first: int = 0
) -> None:
    """An error where this is not the average, times a factor, of all ranks' vectors."""
    chosen = values[::stride]
    for start in range(0, len(chosen), CHUNK):
        part = chosen[start : start + CHUNK]
        index = first + stride * np.arange(start, start + len(part))
        average = (index % PERIOD + (ranks - 1)) * np.float32(factor)
        if not np.allclose(part, average, rtol=1e-6):
            raise AssertionError(f"wrong: {part[:5]}, expected {average[:5]}")


def preset(params: Any, rows: Any) -> Any:
    """A loss that costs nothing, and the gradient this worker has had since before."""
    rank = int(rows[0])
    key = rank, params.size
    if key not in _gradients:
        _gradients.clear()
        _gradients[key] = own_values(*key)
    return 0.0, _gradients[key]


_gradients: dict[tuple[int, int], np.ndarray] = {}


class Instep:
    """The master of a pool with P workers, in which each has its own gradient.

    The parameters lie where the workers read them, as those of a PyTorch model do; so
    a step hands out a row for each worker, has each copy its gradient into its slot
    and averages the slots. `averaging` is the seconds of that last part.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        import averaging_ranks  # not the copy in __main__, which would travel by value

        import instep.numpy

        self._rows = np.arange(ranks, dtype=np.float32)
        self._pool = instep.numpy.value_and_grad(
            averaging_ranks.preset, workers=ranks, shards=ranks
        )
        self._average = self._pool._engine.average
        self._pool._engine.average = self._timed_average
        self.averaging = 0.0
        self.prepare(16)
        while len(self._pool.statistics().pids) < ranks:
            self.step()

    def prepare(self, number: int) -> None:
        self.gradient: Any = None
        self._params = np.zeros(number, np.float32)
        self.step()
        self.gradient, self._params = None, self._pool._resident()[0]

    def step(self) -> None:
        self.gradient = None  # before the next one: its memory is used again
        _, self.gradient = self._pool(self._params, self._rows)

    def check(self, stride: int) -> None:
        expect(self.gradient, len(self._rows), stride)

    def _timed_average(self, weights: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._average(weights)
        finally:
            self.averaging += time.perf_counter() - begin


class Gloo:
    """A rank of torch.distributed; its vector is summed in place."""

    def __init__(self, rank: int, ranks: int) -> None:
        import torch
        from torch import distributed

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        method = f"file://{sys.argv[3]}/rendezvous"
        distributed.init_process_group(
            "gloo", init_method=method, rank=rank, world_size=ranks
        )
        self._rank, self._ranks = rank, ranks
        self._all_reduce = distributed.all_reduce

    def prepare(self, number: int) -> None:
        import torch

        self._vector: Any = None
        self._vector = torch.from_numpy(own_values(self._rank, number))
        self._factor = 1.0

    def step(self) -> None:
        self._all_reduce(self._vector)
        self._factor *= self._ranks

    def check(self, stride: int) -> None:
        if self._factor < 1e30:  # it grows with each step, past what float32 holds
            expect(self._vector.numpy(), self._ranks, stride, self._factor)


class Mpi:
    """A rank of Open MPI."""

    def __init__(self, rank: int, ranks: int) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD

    def prepare(self, number: int) -> None:
        self._vector = self._sum = np.empty(0)
        self._vector = own_values(self._world.rank, number)
        self._sum = np.zeros_like(self._vector)

    def step(self) -> None:
        self._world.Allreduce(self._vector, self._sum)

    def check(self, stride: int) -> None:
        expect(self._sum, self._world.size, stride, self._world.size)


class Bound:
    """Averages its part of P vectors, all by itself: what memory allows.

    All processes together read P vectors and write one. Each has its parts in memory
    of its own, and nobody waits for anybody.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def prepare(self, number: int) -> None:
        self._parts: list[np.ndarray] = []
        cut = [number * k // self._ranks for k in (self._rank, self._rank + 1)]
        own = cut[1] - cut[0], cut[0]
        self._parts = [own_values(k, *own) for k in range(self._ranks)]
        self._first, self._mean = cut[0], np.zeros_like(self._parts[0])
        self._number = BLOCK // 4 // (self._ranks + 1)

    def step(self) -> None:
        factor = np.float32(1 / self._ranks)
        for start in range(0, len(self._mean), self._number):
            block = slice(start, start + self._number)
            out = self._mean[block]
            np.add(self._parts[0][block], self._parts[1][block], out=out)
            for part in self._parts[2:]:
                np.add(out, part[block], out=out)
            np.multiply(out, factor, out=out)

    def check(self, stride: int) -> None:
        expect(self._mean, self._ranks, stride, first=self._first)


def turns_of(averager: Averager) -> Callable[[Order], Answer]:
    """Carries out orders with it."""
    current = 0

    def carry_out(order: Order) -> Answer:
        nonlocal current
        nbytes, steps = order["nbytes"], order["steps"]
        if nbytes != current:
            averager.prepare(nbytes // 4)
        averager.step()
        if nbytes != current:
            averager.check(1)
            current = nbytes
        return timed(averager, steps, max(1, nbytes // 4 // SAMPLE))

    return carry_out


def timed(averager: Averager, steps: int, stride: int) -> Answer:
    """Takes steps; the seconds of each, and of the averaging alone if it is known."""
    if isinstance(averager, Instep):
        averager.averaging = 0.0
    begin = time.perf_counter()
    for _ in range(steps):
        averager.step()
    seconds = (time.perf_counter() - begin) / steps
    averager.check(stride)
    alone = averager.averaging / steps if isinstance(averager, Instep) else seconds
    return {"seconds": seconds, "averaging": alone}


AVERAGERS: dict[str, Callable[[int, int], Averager]] = {
    "instep": Instep,
    "gloo": Gloo,
    "MPI": Mpi,
    "bound": Bound,
}


def main() -> None:
    name, ranks, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    rank = rank_of(sys.argv[4])
    orders = received_orders(folder, rank)
    serve(orders, folder, rank, turns_of(AVERAGERS[name](rank, ranks)))


if __name__ == "__main__":
    main()
