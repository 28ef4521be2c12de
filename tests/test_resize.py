"""The number of workers changes between steps and the bits do not."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

import instep
from conftest import wait_until
from helpers import bits, both_engines, make, started
from losses import least_squares, toy

X = np.random.default_rng(0).normal(size=(31, 3))
Y = X @ np.array([1.0, -2.0, 0.5])


def descend(pool, w, steps):
    for _ in range(steps):
        _, grad = pool(w, X, Y)
        w = w - 0.1 * grad
    return w


def workers_at_work(pool):
    return sum(count > 0 for count in pool.statistics().shards_computed)


def test_a_run_resized_up_and_down_has_the_bits_of_one_that_was_not():
    with make(least_squares, shards=7, engine="serial") as serial:
        expected = bits(descend(serial, np.zeros(3), 12))
    with make(least_squares, workers=2, shards=7) as pool:
        w = np.zeros(3)
        for workers in (4, 1, 3, 7):  # more than there are cores, too
            w = descend(pool, w, 3)
            pool.resize(workers)
            assert pool.statistics().workers == workers
            assert pool.statistics().shards == 7
        assert bits(w) == expected


def test_a_new_worker_joins_while_the_others_go_on():
    with make(toy, workers=1, shards=6) as pool:
        expected = started(pool, np.float64(1), X[:, 0])(np.float64(1), X[:, 0])
        pool.resize(3)
        assert pool(np.float64(1), X[:, 0]) == expected
        wait_until(
            lambda: (
                pool(np.float64(1), X[:, 0]) == expected and workers_at_work(pool) == 3
            ),
            "not all new workers take part",
        )
        assert len(pool.statistics().pids) == 3


def cores(pool):
    return [os.sched_getaffinity(pid) for pid in pool.statistics().pids]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="not on this system")
def test_workers_that_take_all_cores_have_one_each():
    usable = os.sched_getaffinity(0)
    with make(toy, workers=len(usable)) as pool:
        started(pool, np.float64(1), X[:, 0])
        assert cores(pool) == [{core} for core in sorted(usable)]
        assert all(
            os.sched_getscheduler(pid) == os.SCHED_BATCH
            for pid in pool.statistics().pids
        )
        pool.resize(len(usable) + 1)
        started(pool, np.float64(1), X[:, 0])
        assert cores(pool) == [usable] * (len(usable) + 1)
    with make(toy, workers=1, threads=len(usable)) as pool:
        started(pool, np.float64(1), X[:, 0])
        assert cores(pool) == [usable]


def test_workers_that_are_not_needed_any_more_end():
    with make(toy, workers=4) as pool:
        started(pool, np.float64(1), X[:, 0])
        pids = pool.statistics().pids
        pool.resize(1)
        assert pool.statistics().pids == pids[:1]
        pool(np.float64(1), X[:, 0])
        pool.resize(4)
        assert pool.statistics().pids[0] == pids[0]
        assert pool.statistics().workers_lost == 0


def test_a_resize_from_another_thread_waits_for_the_step(tmp_path):
    def fun(w, x):
        (tmp_path / "computes").touch()
        while x[0] == 0.0 and not (tmp_path / "goes on").exists():
            time.sleep(0.01)
        return toy(w, x)

    rows = np.arange(4.0)
    with make(fun, workers=2) as pool:
        answers = []
        step = threading.Thread(
            target=lambda: answers.append(pool(np.float64(1), rows))
        )
        step.start()
        wait_until((tmp_path / "computes").exists, "the step does not begin")
        resize = threading.Thread(target=lambda: pool.resize(1))
        resize.start()
        (tmp_path / "goes on").touch()
        step.join()
        resize.join()
        assert answers == [toy(np.float64(1), rows)]
        assert pool(np.float64(1), rows + 1) == toy(np.float64(1), rows + 1)
        assert pool.statistics().workers == 1


def test_another_program_starts_as_many_workers_as_there_are_now():
    with make(toy, workers=1, shards=4) as pool:
        pool.resize(3)
        pool._ship(instep.numpy.NumpyProgram(least_squares, False))
        started(pool, np.zeros(3), X, Y)
        wait_until(lambda: len(pool.statistics().pids) == 3, "workers are missing")


@both_engines
def test_a_number_of_workers_that_makes_no_sense_is_an_error(engine):
    with make(toy, workers=2, engine=engine) as pool:
        for workers in (0, -1, 1.5, "two", True):
            with pytest.raises(instep.ArgumentError, match="workers="):
                pool.resize(workers)
        assert pool.statistics().workers == 2
    with pytest.raises(instep.PoolClosedError):
        pool.resize(3)


# Saving and going on


def draws(w, x):
    """A loss with a random number of its own in every shard of every step."""
    noise = np.random.random()
    return w * x.mean() + noise, x.mean() + noise


def train(pool, w, epochs):
    for epoch in epochs:
        for rows in instep.shuffled(len(X), 8, seed=5, epoch=epoch):
            _, grad = pool(w, X[rows, 0])
            w = w - 0.1 * grad
    return w


def test_a_run_that_is_resumed_on_other_workers_has_the_same_bits():
    with make(draws, workers=3, shards=4, seed=9) as pool:
        expected = bits(train(pool, np.float64(1), range(4)))
    with make(draws, workers=2, shards=4, seed=9) as first:
        w = train(first, np.float64(1), range(2))
        state = first.state_dict()
    assert state == {
        "steps": 8,
        "seed": 9,
        "shards": 4,
        "threads": 1,
        "reduction": "mean",
    }
    with make(draws, workers=1, engine="serial") as second:  # one shard, seed 0
        second.load_state_dict(state)
        assert bits(train(second, w, range(2, 4))) == expected


@pytest.mark.parametrize(
    ("options", "name"), [({"threads": 2}, "threads"), ({"reduction": "sum"}, "red")]
)
def test_a_state_that_would_give_other_bits_is_refused(options, name):
    with make(toy, engine="serial", threads=1) as pool:
        state = pool.state_dict()
    with make(toy, engine="serial", **{"threads": 1, **options}) as pool:
        with pytest.raises(instep.ArgumentError, match=name):
            pool.load_state_dict(state)
        assert pool.state_dict()["steps"] == 0


def test_a_state_of_something_else_is_refused():
    with make(toy, engine="serial") as pool:
        for state in ({}, {"steps": 3}, None):
            with pytest.raises(instep.ArgumentError, match="state_dict"):
                pool.load_state_dict(state)


# Shuffling


def test_every_epoch_has_each_row_once_in_an_order_of_its_own():
    orders = [
        np.concatenate(list(instep.shuffled(50, 17, seed=1, epoch=epoch)))
        for epoch in range(3)
    ]
    for order in orders:
        assert sorted(order) == list(range(50))
    assert len({tuple(order) for order in orders}) == 3
    sizes = [len(batch) for batch in instep.shuffled(50, 17, seed=1)]
    assert sizes == [17, 17, 16]


def test_the_order_is_the_same_for_ever():
    batches = [list(b) for b in instep.shuffled(7, 4, seed=3, epoch=2)]
    assert batches == [[1, 5, 4, 2], [6, 3, 0]]
    assert list(instep.shuffled(0, 4)) == []


def test_seeds_of_any_size_and_sign_are_seeds():
    orders = {
        tuple(next(instep.shuffled(20, 20, seed=seed))) for seed in (0, -1, 2**70, 1)
    }
    assert len(orders) == 4


@pytest.mark.parametrize("arguments", [(-1, 4), (4, 0), (4, 2, 0, -1)])
def test_sizes_that_make_no_sense_are_errors(arguments):
    with pytest.raises(instep.ArgumentError, match="expected whole numbers"):
        instep.shuffled(*arguments)
