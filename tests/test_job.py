"""`instep.Job` and job files: good ones of each framework, and what can be wrong."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import instep
from helpers import bits
from instep._commands._job_file import NAME, load_job

X = np.arange(50.0, dtype=np.float32)[:, None]


@pytest.fixture(autouse=True)
def _path_and_modules(monkeypatch):
    """What loading a job file changes is as before after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)


def write_job(folder, text):
    path = folder / "job.py"
    path.write_text(textwrap.dedent(text))
    return path


def loss(w, x):
    return np.mean(w * x), np.mean(x)


def numpy_job(**changes):
    given = {"model": np.float64(2), "loss": loss, "data": (X,), "batch_size": 20}
    return instep.Job(**{**given, **changes})


# Jobs

NUMPY = """
    import numpy as np
    import instep

    def loss(w, x, y):
        return np.mean(w["a"] * x), {"a": np.full_like(w["a"], np.mean(x))}

    def job():
        x = np.arange(50.0, dtype=np.float32)[:, None]
        return instep.Job({"a": np.float32(2)}, loss, (x, x), 20, optimizer=0.1)
    """
JAX = """
    import jax.numpy as jnp
    import numpy as np
    import instep

    def loss(w, x, y):
        return jnp.mean(w["a"] * x)

    def job():
        x = np.arange(50.0, dtype=np.float32)[:, None]
        return instep.Job({"a": jnp.float32(2)}, loss, (jnp.asarray(x), x), 20)
    """
TORCH = """
    import torch
    import instep

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(2.0))

    def loss(model, x, y):
        return (model.w * x).mean()

    def job():
        x = torch.arange(50.0)[:, None]
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return instep.Job(model, loss, (x, x.numpy()), 20, optimizer)
    """
VARIABLES = """
    import tensorflow as tf
    import instep

    def loss(variables, x, y):
        return tf.reduce_mean(variables[0] * x)

    def job():
        x = tf.range(50.0)[:, None]
        return instep.Job([tf.Variable(2.0)], loss, (x, x.numpy()), 20)
    """
KERAS = """
    import keras
    import numpy as np
    import instep

    def loss(model, x, y):
        return keras.ops.mean(model(x))

    def job():
        x = np.arange(50.0, dtype=np.float32)[:, None]
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.set_weights([np.full((1, 1), 2.0, np.float32)])
        return instep.Job(model, loss, (x, x), 20, keras.optimizers.Adam())
    """


@pytest.mark.parametrize(
    ("framework", "text"),
    [
        ("numpy", NUMPY),
        ("jax", JAX),
        ("torch", TORCH),
        ("tensorflow", VARIABLES),
        ("tensorflow", KERAS),
    ],
    ids=["numpy", "jax", "torch", "variables", "keras"],
)
def test_a_job_file_of_each_framework(framework, text, tmp_path):
    pytest.importorskip(framework)
    job = load_job(write_job(tmp_path, text))
    assert (job.framework, job.rows, job.steps, job.seed) == (framework, 50, 100, 0)
    rows = list(instep.shuffled(50, 20))
    batches = list(job.batches())
    found = [[np.asarray(part) for part in batch] for batch in batches]
    assert bits(found) == bits([[X[r], X[r]] for r in rows])
    with job.pool(engine="serial", shards=3) as pool:
        value = pool.evaluate(*job.arguments(job.data))
    assert float(value) == 49.0


def test_each_epoch_has_its_order_and_each_seed():
    first, again, second, other = (
        bits(list(job.batches(epoch)))
        for job, epoch in [
            (numpy_job(), 0),
            (numpy_job(), 0),
            (numpy_job(), 1),
            (numpy_job(seed=1), 0),
        ]
    )
    assert first == again
    assert len({str(order) for order in (first, second, other)}) == 3


def test_the_pool_has_the_seed_of_the_job():
    with numpy_job(seed=7).pool(engine="serial") as pool:
        assert pool.state_dict()["seed"] == 7


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"batch_size": 0}, "batch_size=0; expected a whole number, at least 1 and at"),
        ({"batch_size": 51}, r"batch_size=51; .* at most 50 \(rows of the data\)"),
        ({"batch_size": 2.5}, "batch_size=2.5; expected a whole number"),
        ({"steps": 0}, "steps=0; expected a whole number, at least 1"),
        ({"seed": "a"}, "seed='a'; expected a whole number"),
        ({"loss": None}, "loss is a NoneType; expected a function"),
        ({"data": X}, "data is a ndarray; expected a tuple of arrays"),
        ({"data": (1.0,)}, "data has no rows; expected at least one array"),
        ({"data": (X, X[1:])}, r"data\[1\] has 49 rows but data\[0\] has 50"),
        ({"data": ({"a": X, "b": ["c"]},)}, r"data\[0\]\['b'\] has 1 rows but"),
        ({"model": "net"}, "model is a str; expected a torch.nn.Module, a"),
        ({"model": {}}, "model has no parameters; expected at least one array"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(changes, problem):
    with pytest.raises(instep.ArgumentError, match=problem):
        numpy_job(**changes)


# Job files


def problem_of(folder, text):
    with pytest.raises(instep.ArgumentError) as caught:
        load_job(write_job(folder, text))
    return str(caught.value).replace(str(folder), "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "/job.py has no function job(); expected `def job():` that returns"),
        ("job = 1", "/job.py has a int job(); expected"),
        (
            "\ndef job():\n    return 5",
            "/job.py, line 2: job() returned a int; expected",
        ),
        ("\nimport no_such_module", "/job.py, line 2: ModuleNotFoundError: No module"),
        ("\n\ndef job(:", "/job.py, line 3: SyntaxError: "),
        (
            "def job():\n    return 1 / 0",
            "/job.py, line 2: ZeroDivisionError: division",
        ),
        (
            "import instep\ndef job():\n    return instep.Job(1.0, print, (), 1)",
            "/job.py, line 3: data has no rows; expected at least one array",
        ),
    ],
)
def test_what_is_wrong_with_a_job_file_is_said_with_its_line(tmp_path, text, problem):
    assert problem_of(tmp_path, text).startswith(problem)


def test_the_line_of_an_error_deeper_down_is_that_of_the_file(tmp_path):
    (tmp_path / "a_helper.py").write_text("def help():\n\n\n    raise OSError('gone')")
    text = "import a_helper\ndef job():\n    a_helper.help()"
    try:
        assert problem_of(tmp_path, text) == "/job.py, line 3: OSError: gone"
    finally:
        sys.modules.pop("a_helper", None)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(instep.ArgumentError, match=r"no\.py is no file; expected"):
        load_job(tmp_path / "no.py")
    (tmp_path / "job.txt").write_text("")
    with pytest.raises(instep.ArgumentError, match=r"job\.txt is no Python file"):
        load_job(tmp_path / "job.txt")


def test_a_job_file_runs_in_workers(tmp_path):
    job = load_job(write_job(tmp_path, NUMPY))
    with job.pool(workers=2) as pool:
        value, grad = pool(*job.arguments(job.data))
    assert (float(value), float(grad["a"])) == (49.0, 24.5)


def test_the_example_is_a_job_file():
    pytest.importorskip("sklearn")
    job = load_job(Path(__file__).parent.parent / "examples" / "digits_job.py")
    assert (job.framework, job.rows, job.batch_size) == ("torch", 1797, 256)
