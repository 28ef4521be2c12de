"""Four ways to have P processes compute a gradient each, and to get the average.

The gradient is empty, 16 float32 zeros, so what is measured is all the rest: instep
and Pool.map hand out parameters and rows and bring the average to this process, gloo
and MPI leave it in every rank, whose script would have to update in step.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
from ranks import NUM_FLOATS

import instep.numpy

PARAMS = np.zeros(NUM_FLOATS, np.float32)
# Seconds ranks may take to import and meet, or to take their steps.
ANSWER_TIMEOUT_S = 60.0


def empty(params: Any, rows: Any) -> Any:
    """A loss and a gradient that cost nothing."""
    return np.float32(0), params


def empty_of_pair(pair: tuple[Any, Any]) -> Any:
    """The same for `map`, which passes one argument."""
    return empty(*pair)


class Contender(Protocol):
    """Something that can take steps."""

    def take(self, steps: int) -> float:
        """Takes steps; the seconds they took."""

    def pids(self) -> list[int]:
        """Its processes, without this one."""

    def close(self) -> None:
        """Ends them."""


class Instep:
    """A pool of this library."""

    def __init__(self, workers: int) -> None:
        self._rows = np.zeros(workers, np.float32)
        self._pool = instep.numpy.value_and_grad(empty, workers=workers, shards=workers)
        while len(self.pids()) < workers:
            self.take(1)

    def take(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            self._pool(PARAMS, self._rows)
        return time.perf_counter() - begin

    def pids(self) -> list[int]:
        return list(self._pool.statistics().pids)

    def close(self) -> None:
        self._pool.close()


class PoolMap:
    """The standard library's pool: arguments and gradients are pickled."""

    def __init__(self, workers: int) -> None:
        self._arguments = [(PARAMS, np.zeros(1, np.float32))] * workers
        self._pool = multiprocessing.get_context("spawn").Pool(workers)
        self.take(10)

    def take(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            answers = self._pool.map(empty_of_pair, self._arguments, chunksize=1)
            np.mean([gradient for _, gradient in answers], axis=0)
        return time.perf_counter() - begin

    def pids(self) -> list[int]:
        return [process.pid for process in multiprocessing.active_children()]

    def close(self) -> None:
        self._pool.terminate()
        self._pool.join()


class Ranks:
    """Peers that all-reduce among themselves, and sleep while others are measured."""

    def __init__(self, command: list[str], size: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="overhead-"))
        self._orders = [self._pipe(f"orders.{rank}") for rank in range(size)]
        self._answers = self._pipe("answers")
        script = str(Path(__file__).with_name("ranks.py"))
        self._process = subprocess.Popen(
            [*command, sys.executable, script, str(self._folder), str(size)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for this process to handle
        )
        try:
            self.take(10)
        except BaseException:
            self.close()
            raise

    def take(self, steps: int) -> float:
        for orders in self._orders:
            os.write(orders, b"%d\n" % steps)
        ready, _, _ = select.select([self._answers], [], [], ANSWER_TIMEOUT_S)
        if not ready:
            raise TimeoutError(f"no answer from {self._process.args!r}")
        return float(os.read(self._answers, 100))

    def pids(self) -> list[int]:
        children = psutil.Process(self._process.pid).children(recursive=True)
        return [self._process.pid, *(child.pid for child in children)]

    def close(self) -> None:
        for pipe in (*self._orders, self._answers):
            os.close(pipe)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        shutil.rmtree(self._folder)

    def _pipe(self, name: str) -> int:
        os.mkfifo(self._folder / name)
        # Both ends: opening one would wait for a rank, which may never come.
        return os.open(self._folder / name, os.O_RDWR)


def gloo(size: int) -> Ranks:
    """Ranks of torch.distributed."""
    return Ranks([], size)


def mpi(size: int) -> Ranks:
    """Ranks of Open MPI; as many as asked for, on however few cores."""
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    return Ranks(
        [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(size)], size
    )


CONTENDERS: dict[str, Callable[[int], Contender]] = {
    "instep": Instep,
    "Pool.map": PoolMap,
    "gloo": gloo,
    "MPI": mpi,
}
