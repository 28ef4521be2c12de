"""What holds in a job of MPI, on however many machines; run by `instep run`."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import descent
import instep
from helpers import bits
from instep import testing
from instep._tree import flatten

ROWS = np.random.default_rng(1).normal(size=23)


def every_dtype(w, x):
    """Gradients of several dtypes, one of them None where the rows' sum is negative."""
    scale = np.mean(x)
    grads = {name: (value * scale).astype(value.dtype) for name, value in w.items()}
    return float(scale), grads


def weights(size):
    rng = np.random.default_rng(0)
    return {
        "double": rng.normal(size=size),
        "half": rng.normal(size=size // 2).astype(np.float16),
        "brain half": rng.normal(size=33).astype(ml_dtypes.bfloat16),
        "single": rng.normal(size=size).astype(np.float32),
    }


def computed(engine, size, shards):
    """Loss and gradient, three times: bytes."""
    with instep.numpy.value_and_grad(every_dtype, engine=engine, shards=shards) as pool:
        steps = [pool(weights(size), ROWS) for _ in range(3)]
    return [(loss, bits(flatten(grads)[0])) for loss, grads in steps]


def the_engine_facts_hold():
    testing.check_engine("mpi", [instep._options.defaults["workers"]])


def bits_are_those_of_the_serial_engine():
    for size in (50, 40_003):  # small; large enough to be combined in parts
        for shards in (1, 3, 8):
            found = [computed(engine, size, shards) for engine in ("serial", "mpi")]
            assert found[0] == found[1], (size, shards)


def so_are_those_of_200_steps():
    assert descent.digest("mpi") == descent.digest("serial")


def line(w, x, y):
    if x[0, 0] > 50:
        raise ValueError("of the loss")
    if x[0, 0] > 40:
        os._exit(7)
    residual = x @ w - y
    return np.mean(residual**2) / 2, x.T @ residual / len(y)


X = np.random.default_rng(0).normal(size=(31, 3))
Y = X @ np.array([1.0, -2.0, 0.5])


def streamed(engine, mode, **options):
    w = np.zeros(3)
    with instep.numpy.value_and_grad(line, engine=engine, shards=5) as pool:
        for update in pool.stream([(X, Y)] * 12, mode, params=w, **options):
            w -= 0.1 * update.grads
    return bits(w)


def every_mode_streams():
    for mode in (instep.Synchronous(), instep.Local(2, 0.1)):
        assert streamed("mpi", mode) == streamed("serial", mode), mode
    compensated = instep.Asynchronous(correction=instep.DelayCompensated())
    with tempfile.TemporaryDirectory() as folder:
        for number, mode in enumerate((instep.Asynchronous(), compensated)):
            record = Path(folder, str(number))
            expected = streamed("mpi", mode, record=record)
            assert streamed("serial", instep.Replay(record)) == expected


def spoiled(shard, value):
    """Rows of which those of one shard of five begin with this value."""
    rows = X.copy()
    rows[[0, 7, 13, 19, 25][shard], 0] = value
    return rows


def errors_say_where_and_deaths_change_no_bit():
    with instep.numpy.value_and_grad(line, engine="mpi", shards=5) as pool:
        loss, grad = pool(np.zeros(3), X, Y)
        for shard in range(5):
            with pytest.raises(ValueError, match="of the loss") as error:
                pool(np.zeros(3), spoiled(shard, 60), Y)
            assert f"in shard {shard} of 5, on worker" in str(error.value.__cause__)
            assert "(rank " in str(error.value.__cause__)
        with pytest.raises(instep.WorkerLostError, match=r"exit code 7"):
            pool(np.zeros(3), spoiled(4, 45), Y)
        for workers in (pool.statistics().workers, 1, 2):
            pool.resize(workers)
            for pid in pool.statistics().pids:
                os.kill(pid, 9)
            again = pool(np.zeros(3), X, Y)
            assert (again[0], bits(again[1])) == (loss, bits(grad))


def evaluating_counts_no_step_and_checks_pass():
    with instep.numpy.value_and_grad(line, engine="mpi", shards=5) as pool:
        value = pool.evaluate(np.zeros(3), X, Y)
        assert value == pool(np.zeros(3), X, Y)[0]
        assert pool.statistics().steps == 1
        assert pool.check(np.zeros(3), X, Y).ok


if __name__ == "__main__":
    for fact in (
        the_engine_facts_hold,
        bits_are_those_of_the_serial_engine,
        so_are_those_of_200_steps,
        every_mode_streams,
        errors_say_where_and_deaths_change_no_bit,
        evaluating_counts_no_step_and_checks_pass,
    ):
        begin = time.perf_counter()
        fact()
        print(f"{fact.__name__}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
    print("all facts hold")
