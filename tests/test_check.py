"""`pool.check` passes losses that may be sharded and says what is wrong with others."""

from __future__ import annotations

import numpy as np
import pytest

import instep
from helpers import make
from instep import Weighted, _check

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(13, 6)), rng.normal(size=13)
Y[::3] = abs(Y[::3])  # at least one in every shard of four is positive
W = rng.normal(size=6)


def mean_squares(w, x, y):
    r = x @ w - y
    return np.mean(r**2), 2 / len(y) * x.T @ r


def sum_of_squares(w, x, y):
    r = x @ w - y
    return np.sum(r**2), 2 * x.T @ r


def regularised_sum(w, x, y):
    loss, grad = sum_of_squares(w, x, y)
    return loss + 0.1 * w @ w, grad + 0.2 * w


def regularised_mean(w, x, y):
    loss, grad = mean_squares(w, x, y)
    return loss + 0.1 * w @ w, grad + 0.2 * w


def mean_over_positive(w, x, y):
    keep = y > 0
    r = (x @ w - y) * keep
    return np.sum(r**2) / keep.sum(), 2 / keep.sum() * x.T @ r


def weighted_mean_over_positive(w, x, y):
    loss, grad = mean_over_positive(w, x, y)
    return Weighted(loss, np.sum(y > 0)), grad


def normalised(w, x, y):
    z = (x - x.mean(0)) / x.std(0)
    return mean_squares(w, z, y)


def spread_of_pairs(w, x, y):
    p = x @ w
    n = len(p)
    d = p[:, None] - p[None, :]
    loss = np.sum(np.exp(-(d**2))) / n
    inner = -2 * d * np.exp(-(d**2)) / n
    return loss, x.T @ (inner.sum(1) - inner.sum(0))


def with_dropout(w, x, y):
    return mean_squares(w, x * (np.random.rand(*x.shape) > 0.5), y)


def checked(fun, **options):
    with make(fun, shards=4, engine="serial", **options) as pool:
        return pool.check(W, X, Y)


@pytest.mark.parametrize(
    ("fun", "options"),
    [
        (mean_squares, {}),
        (regularised_mean, {}),
        (weighted_mean_over_positive, {}),
        (sum_of_squares, {"reduction": "sum"}),
    ],
)
def test_a_correct_loss_passes(fun, options):
    report = checked(fun, **options)
    assert report.ok
    assert report.findings == ()
    assert "gives the whole batch's loss" in str(report)


@pytest.mark.parametrize(
    ("fun", "options", "reason"),
    [
        (sum_of_squares, {}, _check.SUM),
        (mean_squares, {"reduction": "sum"}, _check.MEAN),
        (regularised_sum, {"reduction": "sum"}, _check.PER_SHARD),
        (mean_over_positive, {}, _check.WEIGHTS),
        (normalised, {}, _check.STATISTICS),
        (spread_of_pairs, {}, _check.PAIRS),
    ],
)
def test_a_faulty_loss_is_flagged_with_its_reason(fun, options, reason):
    report = checked(fun, **options)
    assert not report.ok
    assert {f.name for f in report.findings} == {"loss", "params"}
    assert {f.reason for f in report.findings} == {reason}
    assert reason in str(report)


def test_a_random_loss_passes_with_a_note():
    report = checked(with_dropout)
    assert report.ok
    assert report.notes == (_check.RANDOM,)


def test_a_loss_that_ignores_the_seed_is_flagged():
    state = iter(range(1000))

    def fun(w, x, y):
        loss, grad = mean_squares(w, x, y)
        return loss + next(state), grad * next(state)

    report = checked(fun)
    assert {f.reason for f in report.findings} == {_check.NONDETERMINISTIC}


def test_a_check_is_no_step_and_changes_nothing():
    with make(with_dropout, shards=3, engine="serial") as pool:
        first = pool(W, X, Y)
    with make(with_dropout, shards=3, engine="serial") as pool:
        pool.check(W, X, Y)
        again = pool(W, X, Y)
        assert pool.statistics().steps == 1
    assert first[0] == again[0]
    assert (first[1] == again[1]).all()


def test_a_tensorflow_loss_is_checked_by_variable():
    tf = pytest.importorskip("tensorflow")
    w = tf.Variable(tf.ones([6, 1]), name="w")

    def loss(variables, x):
        return tf.reduce_sum(x @ variables[0])

    options = {"shards": 4, "engine": "serial"}
    with instep.tensorflow.GradientPool([w], loss, **options) as pool:
        report = pool.check(X.astype(np.float32))
    assert {f.name for f in report.findings} == {"loss", "0: w:0"}
    assert {f.reason for f in report.findings} == {_check.SUM}


def test_a_graph_s_loss_is_checked_with_the_session_s_variables():
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        xs = v1.placeholder(tf.float32, [None, 6])
        w = v1.get_variable("w", initializer=tf.ones([6, 1]))
        loss = tf.reduce_mean(xs @ w) + 0.1 * tf.reduce_sum(w**2)
        options = {"shards": 4, "engine": "serial"}
        with instep.tensorflow.v1.GradientPool(loss, batch=[xs], **options) as pool:
            pool.compute_gradients(v1.train.GradientDescentOptimizer(0.1))
            session.run(v1.global_variables_initializer())
            report = pool.check(X)
    assert report.ok, str(report)
    assert report.checked == 1
