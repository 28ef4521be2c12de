"""The Ray engine, on a cluster of this machine."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import instep
from helpers import bits, make
from instep import testing
from losses import least_squares

ray = pytest.importorskip("ray")

X = np.random.default_rng(0).normal(size=(31, 3))
Y = X @ np.array([1.0, -2.0, 0.5])


@pytest.fixture(autouse=True)
def cluster():
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def descend(pool, steps, between=lambda step: None):
    w = np.zeros(3)
    for step in range(steps):
        w = w - 0.1 * pool(w, X, Y)[1]
        between(step)
    return bits(w)


def streamed(pool, mode, between=lambda step: None, **options):
    w = np.zeros(3)
    stream = pool.stream([(X, Y)] * 8, mode, params=w, **options)
    for step, update in enumerate(stream):
        w -= 0.1 * update.grads
        between(step)
    return bits(w)


@pytest.mark.guard(120)
def test_facts_kills_and_streams(tmp_path):
    """One cluster for all: it takes seconds to start."""
    testing.check_engine("ray", [1, 3])

    with make(least_squares, shards=5, engine="serial") as serial:
        expected = descend(serial, 12)
        local = streamed(serial, instep.Local(2, 0.1))
    engine = instep.engines.Ray(workers=2)
    with make(least_squares, shards=5, engine=engine) as pool:
        assert pool.statistics().workers == 2

        def kill(step):
            if step in (3, 7) and pool.statistics().pids:
                os.kill(pool.statistics().pids[0], signal.SIGKILL)

        assert descend(pool, 12, kill) == expected
        assert pool.statistics().workers_lost >= 1
        assert streamed(pool, instep.Local(2, 0.1)) == local
        record = tmp_path / "run"
        recorded = streamed(pool, instep.Asynchronous(), record=record)
        assert streamed(pool, instep.Replay(record)) == recorded

        def kill_actor(step):  # with answers that were not averaged yet
            if step in (2, 5):
                ray.kill(next(iter(engine._actors.values())))

        assert streamed(pool, instep.Local(2, 0.1), kill_actor) == local
        expected_stream = streamed(pool, instep.Synchronous())
        assert streamed(pool, instep.Synchronous(), kill_actor) == expected_stream
        recorded = streamed(pool, instep.Asynchronous(), kill_actor, record=record)
        assert streamed(pool, instep.Replay(record)) == recorded
        assert descend(pool, 12, kill_actor) == expected
        pool.resize(1)
        assert descend(pool, 12) == expected
