"""`pool.tune` measures the splits of the cores, decides, and leaves no trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

import instep
from conftest import wait_until
from helpers import bits, make, run_python
from instep import _pool
from instep._cores import usable_cores
from instep._tuning import (
    MIN_ROUNDS,
    ONE_PROCESS,
    PROCESSES,
    Setting,
    decide,
    measure,
    settings,
)

ALONE, ALONE_1 = Setting(ONE_PROCESS, 1, 2), Setting(ONE_PROCESS, 1, 1)
ONE, TWO = Setting(PROCESSES, 1, 1), Setting(PROCESSES, 2, 1)

rng = np.random.default_rng(0)
X, Y, W = rng.normal(size=(13, 6)), rng.normal(size=13), rng.normal(size=6)


def least_squares(w, x, y):
    r = x @ w - y + np.random.rand(len(x))  # the bits depend on seed and step, too
    return np.mean(r**2), 2 / len(y) * x.T @ r


# The decision


def test_the_fastest_is_the_best_by_medians():
    tuning = decide(
        {ALONE: [2.0, 2.0, 2.0], ONE: [3.0, 3.0, 3.0], TWO: [1.0, 9.0, 1.0]}
    )
    assert [row.setting for row in tuning.rows] == [TWO, ALONE, ONE]
    assert [row.seconds for row in tuning.rows] == [1.0, 2.0, 3.0]
    assert [row.ratio for row in tuning.rows] == [1.0, 2.0, 3.0]
    assert tuning.best is tuning.rows[0]
    assert (tuning.best.engine, tuning.best.workers, tuning.best.threads) == TWO
    assert "2 workers with 1 thread each are the fastest: 2.00 times" in str(tuning)


@pytest.mark.parametrize(
    ("seconds", "best"), [(1.0, ALONE), (1.03, ALONE), (1.031, TWO), (2.0, TWO)]
)
def test_one_process_is_chosen_within_three_percent(seconds, best):
    tuning = decide({ALONE: [seconds], ONE: [1.5], TWO: [1.0]})
    assert tuning.best.setting == best


def test_it_says_that_processes_do_not_pay():
    assert decide({TWO: [1.5], ALONE: [1.0]}).verdict == (
        "one process with 2 threads is the fastest: processes do not pay for this "
        "model and batch"
    )
    assert decide({TWO: [1.0], ALONE: [1.02]}).verdict == (
        "one process with 2 threads is within 3% of the fastest (2 workers with 1 "
        "thread each): processes do not pay for this model and batch"
    )


def test_among_equals_the_first_is_the_fastest():
    times = {ALONE: [1.0], ALONE_1: [1.0], ONE: [1.0], TWO: [1.0]}
    assert decide(times).best.setting == ALONE


def test_the_best_says_how_to_make_its_pool():
    assert decide({ALONE: [2.0], TWO: [1.0]}).best.options == {
        "engine": "processes",
        "workers": 2,
        "shards": 2,
        "threads": 1,
    }
    assert decide({ALONE: [1.0], TWO: [2.0]}).best.options["engine"] == "serial"


def test_it_prints_as_a_table():
    assert str(decide({ALONE: [0.0025], TWO: [0.002]})).splitlines() == [
        "             workers  threads  ms per step  times the fastest",
        "processes          2        1        2.000               1.00",
        "one process        1        2        2.500               1.25",
        "2 workers with 1 thread each are the fastest: 1.25 times as fast as one "
        "process with 2 threads",
        "note: the bits of a result depend on shards and threads: another split, "
        "other bits",
    ]


@pytest.mark.parametrize(
    ("cores", "rows", "expected"),
    [
        (1, 9, [(1, 1)]),
        (2, 9, [(1, 1), (1, 2), (2, 1)]),
        (2, 1, [(1, 1), (1, 2)]),
        (3, 9, [(1, 1), (1, 3), (3, 1)]),
        (4, 9, [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]),
        (8, 9, [(1, 1), (1, 4), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)]),
    ],
)
def test_the_splits_of_the_cores(cores, rows, expected):
    found = settings(cores, rows, [cores])
    assert found[0] == (ONE_PROCESS, 1, cores)
    assert found[1:] == [(PROCESSES, *pair) for pair in expected]


def test_all_have_their_turns_in_every_round():
    turns, parts = [], []

    def turn(setting):
        def run(steps):
            turns.append(setting)
            return [9.0] * steps  # longer than a turn: one step each

        return run

    rivals = {setting: turn(setting) for setting in (ALONE, ONE, TWO)}
    times = measure(rivals, 1e-9, parts.append)
    assert turns[:9] == [*rivals, *rivals, *reversed(rivals)]
    assert len(turns) == 3 * (1 + MIN_ROUNDS)  # in spite of the time
    assert times == {setting: [9.0] * MIN_ROUNDS for setting in rivals}
    assert parts[-1] == 1.0


# Pools


@pytest.fixture
def _one_process_only(monkeypatch):
    """Spares a framework the start of workers, which takes seconds."""
    two_shards = TWO._replace(engine=ONE_PROCESS)
    monkeypatch.setattr(_pool, "settings", lambda *_: [ALONE_1, two_shards])


@pytest.fixture
def _two_settings_only(monkeypatch):
    monkeypatch.setattr(_pool, "settings", lambda *_: [ALONE, TWO])


def numbers_of_children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("options", [{"engine": "serial"}, {"workers": 2}])
def test_a_tuning_changes_nothing(options):
    with make(least_squares, shards=3, **options) as pool:
        expected = [bits(pool(W, X, Y)) for _ in range(3)]
    with make(least_squares, shards=3, **options) as pool:
        found = [bits(pool(W, X, Y))]
        children, before = numbers_of_children(), pool.statistics()
        tuning = pool.tune(W, X, Y, seconds=0.2)
        after = pool.statistics()
        assert numbers_of_children() - children <= set(after.pids)  # late, its own
        assert (after.steps, after.shards, after.threads) == (1, 3, before.threads)
        assert pool.state_dict()["steps"] == 1
        found += [bits(pool(W, X, Y)) for _ in range(2)]
    assert found == expected
    expected = settings(usable_cores(), len(X), sorted({1, usable_cores()}))
    assert {row.setting for row in tuning.rows} == set(expected)
    assert all(row.seconds > 0 for row in tuning.rows)
    assert tuning.rows[0].ratio == 1.0
    # Never worse than the best of one process by more than 3 %.
    alone = min(row.seconds for row in tuning.rows if row.engine == ONE_PROCESS)
    assert tuning.best.seconds <= 1.03 * alone


def trained(is_tuned, **options):
    """Losses, parameters and buffers of four steps; maybe with a tuning in between."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 5),
        torch.nn.BatchNorm1d(5),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(5, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    x, y = torch.tensor(X).float(), torch.tensor(Y).float()
    losses = []

    def loss(model, x, y):
        return ((model(x)[:, 0] - y) ** 2).mean()

    with instep.torch.GradientPool(model, loss, shards=3, **options) as pool:
        for step in range(4):
            if step == 2 and is_tuned:
                places = [p.data_ptr() for p in model.parameters()]
                grads = [p.grad for p in model.parameters()]
                threads = torch.get_num_threads()
                pool.tune(x, y, seconds=0.2)
                assert torch.get_num_threads() == threads
                assert places == [p.data_ptr() for p in model.parameters()]
                assert all(
                    p.grad is g for p, g in zip(model.parameters(), grads, strict=True)
                )
            optimizer.zero_grad()
            losses.append(pool.backward(x, y))
            optimizer.step()
        assert pool.statistics().steps == 4
    return bits([losses, *(t.detach() for t in model.state_dict().values())])


@pytest.mark.usefixtures("_two_settings_only")
def test_a_torch_model_trains_on_as_if_nothing_had_been():
    assert trained(True, workers=2) == trained(False, engine="serial")


@pytest.mark.usefixtures("_one_process_only")
def test_a_torch_model_may_be_tuned_before_its_first_step():
    torch = pytest.importorskip("torch")
    model, x = torch.nn.Linear(6, 1), torch.tensor(X).float()
    before = bits([p.detach().clone() for p in model.parameters()])

    def loss(model, x):
        return model(x).mean()

    with instep.torch.GradientPool(model, loss, shards=2, engine="serial") as pool:
        pool.tune(x, seconds=0.1)
        assert bits([p.detach() for p in model.parameters()]) == before
        assert all(p.grad is None for p in model.parameters())
        pool.backward(x)
    assert model.bias.grad.item() == 1.0


@pytest.mark.usefixtures("_one_process_only")
def test_a_jax_loss_is_tuned():
    jnp = pytest.importorskip("jax.numpy")

    def loss(w, x):
        return jnp.mean(x @ w)

    with instep.jax.value_and_grad(loss, shards=3, engine="serial") as pool:
        expected = bits(pool(W, X))
        assert len(pool.tune(W, X, seconds=0.1).rows) == 2
        assert bits(pool(W, X)) == expected


@pytest.mark.usefixtures("_one_process_only")
def test_a_tensorflow_loss_that_is_traced_by_rows_is_tuned():
    tf = pytest.importorskip("tensorflow")
    w = tf.Variable(W[:, None])

    def loss(variables, x):
        rows = range(x.shape[0])  # needs another trace for another number of rows
        return sum(tf.reduce_sum(x[k] * variables[0][:, 0]) for k in rows) / len(rows)

    with instep.tensorflow.GradientPool([w], loss, shards=3, engine="serial") as pool:
        value, (gradient,) = pool.gradient(X)
        assert len(pool.tune(X, seconds=0.1).rows) == 2
        again, (other,) = pool.gradient(X)
        assert pool.statistics().steps == 2
    assert bits([value, gradient]) == bits([again, other])


@pytest.mark.usefixtures("_one_process_only")
def test_a_graph_is_tuned_with_the_session_s_variables():
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        xs = v1.placeholder(tf.float32, [None, 6])
        w = v1.get_variable("w", initializer=tf.ones([6, 1]))
        loss = tf.reduce_mean(xs @ w)
        options = {"shards": 4, "engine": "serial"}
        with instep.tensorflow.v1.GradientPool(loss, batch=[xs], **options) as pool:
            pool.compute_gradients(v1.train.GradientDescentOptimizer(0.1))
            session.run(v1.global_variables_initializer())
            assert len(pool.tune(X, seconds=0.1).rows) == 2
            assert pool.statistics().steps == 0


# What goes wrong in the middle


def check_goes_on(pool):
    """The pool is as it would be without what went wrong."""
    with make(least_squares, shards=3, engine="serial") as other:
        assert bits(pool(W, X, Y)) == bits(other(W, X, Y))
    assert pool.statistics().steps == 1
    assert numbers_of_children() == set()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_in_the_middle_leaves_nothing(error):
    def fail(done):
        if done > 0.1:
            raise error

    with make(least_squares, shards=3, engine="serial") as pool:
        with pytest.raises(error):
            pool.tune(W, X, Y, seconds=0.5, progress=fail)
        check_goes_on(pool)


def test_ctrl_c_ends_it_at_once_and_leaves_nothing():
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

    def start(done):
        if not timer.ident:
            timer.start()

    with make(least_squares, shards=3, engine="serial") as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.tune(W, X, Y, seconds=50, progress=start)
        check_goes_on(pool)


class OnlyHere:
    """A value that no other process can load."""

    def __reduce__(self):
        return _expect_process, (os.getpid(),)


def _expect_process(pid):
    if os.getpid() != pid:
        raise LookupError("not here")
    return OnlyHere()


def test_workers_that_cannot_start_do_not_break_the_pool():
    value = OnlyHere()

    def fun(w, x, y):
        return (value, least_squares(w, x, y))[1]

    with make(fun, shards=3, engine="serial") as pool:
        with pytest.raises(instep.StartError, match="not here"):
            pool.tune(W, X, Y, seconds=0.1)
        check_goes_on(pool)


def test_a_bad_batch_is_refused_before_anything_starts():
    with make(least_squares, engine="serial") as pool:
        with pytest.raises(instep.BatchError, match="rows"):
            pool.tune(W, X, Y[:-1])
        with pytest.raises(instep.ArgumentError, match="seconds=0; expected"):
            pool.tune(W, X, Y, seconds=0)
    with pytest.raises(instep.PoolClosedError):
        pool.tune(W, X, Y)


# The command

JOB = """
import numpy as np
import instep

print("the job file is read")

def loss(w, x):
    return helper(w, x)

def helper(w, x):
    return np.mean(w * x), np.mean(x)

def job():
    return instep.Job(np.float64(2), loss, (np.arange(50.0),), batch_size=20)
"""


def tune(folder, *arguments, **options):
    (folder / "job.py").write_text(JOB)
    return run_python("-m", "instep", "tune", *arguments, cwd=folder, **options)


def test_the_command_prints_a_table(tmp_path):
    result = tune(tmp_path, "job.py", "--seconds", "0.1")
    assert (result.returncode, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    assert "workers threads ms per step times the fastest" in text
    assert "another split, other bits" in text


def test_the_command_prints_json_alone(tmp_path):
    result = tune(tmp_path, "job.py", "--seconds", "0.1", "--json")
    assert result.returncode == 0
    report = json.loads(result.stdout)
    assert report["best"] in report["rows"]
    assert {row["engine"] for row in report["rows"]} == {ONE_PROCESS, PROCESSES}
    assert report["verdict"]


def test_ctrl_c_ends_the_command_quietly_and_leaves_nothing(tmp_path):
    (tmp_path / "job.py").write_text(JOB.replace('print("the job file is read")', ""))
    with subprocess.Popen(
        [sys.executable, "-m", "instep", "tune", "job.py", "--seconds", "50"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline().startswith("measuring ")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
        process.send_signal(signal.SIGINT)  # by an impatient user, in the clean-up
        assert process.communicate() == ("", "")
    assert process.returncode == 130
    assert children
    wait_until(
        lambda: not any(child.is_running() for child in children), "a worker is left"
    )


def test_the_command_says_what_was_wrong(tmp_path):
    result = tune(tmp_path, "no.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "instep: error: no.py is no file; expected a Python file with a job()\n"
    )
    result = tune(tmp_path, "job.py", "--seconds", "0")
    assert result.returncode == 2
    assert "--seconds: '0'; expected seconds, above 0" in result.stderr
