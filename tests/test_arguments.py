"""Bad input is one clear error that names the thing, and the pool works on."""

from __future__ import annotations

import numpy as np
import pytest

import instep
from helpers import both_engines, make, run_python
from losses import Position, toy

ONE = np.float64(1)
ROWS = np.arange(1.0, 5.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workers": 0}, "workers=0; expected a whole number, at least 1"),
        ({"workers": -2}, "workers=-2"),
        ({"workers": 1.5}, "workers=1.5; expected a whole number"),
        ({"workers": "2"}, "workers='2'"),
        ({"workers": True}, "workers=True"),
        ({"shards": -1}, "shards=-1; expected a whole number, at least 1"),
        ({"shards": 0}, "shards=0"),
        ({"threads": 0}, "threads=0"),
        ({"retries": -1}, "retries=-1"),
        ({"timeout": 0}, "timeout=0; expected seconds > 0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": "3"}, "timeout='3'"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"reduction": "average"}, "reduction='average'; expected 'mean'"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(options, text):
    with pytest.raises(instep.ArgumentError) as caught:
        make(toy, **options)
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("engine", ["process", "mpirun", "", None, 3])
def test_an_unknown_engine_is_named_beside_the_known_ones(engine):
    with pytest.raises(instep.EngineUnavailableError) as caught:
        make(toy, engine=engine)
    assert f"engine={engine!r}" in str(caught.value)
    assert "'serial', 'processes', 'mpi', 'ray'" in str(caught.value)


def test_a_keyword_with_a_typing_error_is_corrected():
    with pytest.raises(TypeError, match=r"'worker'.*did you mean 'workers'"):
        make(toy, worker=2)
    with pytest.raises(TypeError, match=r"'colour'.*known: \['workers', 'shards'"):
        make(toy, colour="red")


def test_numpy_integers_are_whole_numbers():
    options = {"workers": np.int64(1), "shards": np.int8(2), "seed": np.uint8(3)}
    with make(toy, engine="serial", **options) as pool:
        assert pool.statistics().shards == 2
        assert type(pool.statistics().shards) is int


@both_engines
@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((np.ones(64), np.ones(63)), r"batch\[1\] has 63 rows but batch\[0\] has 64"),
        ((np.ones(0),), r"batch\[0\] has 0 rows"),
        ((), "nothing to split"),
        ((1.0,), "nothing to split"),
        ((ROWS, {1, 2}), r"batch\[1\] is a set, which instep cannot split"),
    ],
)
def test_a_batch_that_cannot_be_split_is_an_error_before_any_step(engine, batch, text):
    def fun(w, *batch):
        return toy(w, batch[0])

    with make(fun, workers=1, engine=engine) as pool:
        with pytest.raises(instep.BatchError, match=text):
            pool(ONE, *batch)
        assert pool.statistics().steps == 0
        assert pool(ONE, ROWS) == (2.5, 2.5)


def give(loss, grad=1.0):
    """A function that gives these values for a batch of ones, else the toy's."""
    return lambda w, x: (loss, grad) if x[0] == 1 and len(x) == 1 else toy(w, x)


@both_engines
@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (np.ones(3), r"the loss has shape \(3,\); expected a single number"),
        (np.ones(1), r"the loss has shape \(1,\)"),
        (None, "the loss returned None; expected a number"),
        ("text", "expected a number"),
        ([1.0, 2.0], r"the loss has shape \(2,\)"),
        (object(), "expected a number"),
        (1 + 2j, r"the loss is complex \(\(1\+2j\)\)"),
        (instep.Weighted(1.0, -1), "the weight -1 for shard 0"),
        (instep.Weighted(1.0, np.nan), "the weight nan for shard 0"),
        (instep.Weighted(1.0, np.inf), "the weight inf for shard 0"),
        (instep.Weighted(np.ones(2), 1.0), r"the loss has shape \(2,\)"),
        (instep.Weighted(1.0, np.ones(2)), r"the weight \[1\. 1\.\] for shard 0"),
        (instep.Weighted(1.0, "many"), "the weight many for shard 0"),
    ],
)
def test_a_loss_that_is_not_a_number_is_an_error_that_shows_it(engine, loss, text):
    with make(give(loss), workers=1, shards=2, engine=engine) as pool:
        with pytest.raises(instep.LossError, match=text) as caught:
            pool(ONE, np.ones(1))
        assert "shard 0 of 1" in str(caught.value.__cause__)
        assert pool(ONE, ROWS) == (2.5, 2.5)


@both_engines
@pytest.mark.parametrize(
    "result", [None, 1.0, (1.0,), (1.0, 2.0, 3.0), np.ones(2), {"loss": 1.0}]
)
def test_a_result_of_another_form_is_an_error(engine, result):
    with (
        make(lambda w, x: result, workers=1, engine=engine) as pool,
        pytest.raises(instep.LossError, match=r"expected \(loss, grad\)"),
    ):
        pool(ONE, ROWS)


@both_engines
def test_a_missing_aux_is_an_error(engine):
    with (
        make(toy, workers=1, engine=engine, has_aux=True) as pool,
        pytest.raises(instep.LossError, match=r"expected \(\(loss, aux\), grad\)"),
    ):
        pool(ONE, ROWS)


@both_engines
@pytest.mark.parametrize(
    ("params", "grad", "text"),
    [
        (np.ones(3), np.ones(2), r"of params has shape \(2,\) and dtype float64"),
        (np.ones(3), np.ones((3, 1)), r"of params has shape \(3, 1\)"),
        (np.ones(3), np.ones(3, np.float32), r"dtype float32; .* \(3,\) and float64"),
        (np.ones(3), np.ones(3, int), "of params has shape .* and dtype int64"),
        (np.ones(3), np.ones(3, complex), "dtype complex128"),
        (np.ones(3), None, r"the leaves \[\]; expected .* \['params'\]"),
        (np.ones(3), [np.ones(3)], r"\['grad\[0\]'\]; expected .* \['params'\]"),
        ({"w": 1.0}, {"v": 1.0}, r"\[\"grad\['v'\]\"\]; expected"),
        ({"w": 1.0}, {"w": np.ones(2)}, r"of params\['w'\] has shape \(2,\)"),
        (Position(1.0, 2.0), Position(1.0, None), r"\['grad.x'\]; expected"),
    ],
)
def test_a_gradient_unlike_its_parameter_is_an_error_that_names_it(
    engine, params, grad, text
):
    with make(lambda w, x: (0.0, grad), workers=1, engine=engine) as pool:
        with pytest.raises(instep.GradientError, match=text):
            pool(params, ROWS)
        assert pool.statistics().steps == 0


@both_engines
@pytest.mark.parametrize(
    ("params", "text"),
    [
        (np.arange(3), "params has dtype int64, for which there is no gradient"),
        (3, "params has dtype int"),
        ({"w": 1.0, "on": True}, r"params\['on'\] has dtype bool"),
        ({"w": 1.0, "step": np.int32(1)}, r"params\['step'\] has dtype int32"),
        ({"w": "text"}, r"params\['w'\] has dtype <U4"),
        ({"w": object()}, r"params\['w'\] has dtype object"),
        ([np.array(["a"], object)], r"params\[0\] has dtype object"),
    ],
)
def test_a_parameter_without_a_gradient_is_an_error_that_names_it(engine, params, text):
    with make(toy, workers=1, engine=engine) as pool:
        with pytest.raises(instep.GradientError, match=text):
            pool(params, ROWS)
        assert pool(ONE, ROWS) == (2.5, 2.5)


@both_engines
def test_errors_of_one_step_do_not_show_in_the_next(engine):
    def fun(w, x):
        if x[0] < 0:
            raise ArithmeticError("negative")
        return toy(w, x)

    with make(fun, workers=2, shards=4, engine=engine) as pool:
        for _ in range(5):
            with pytest.raises(ArithmeticError, match="negative"):
                pool(ONE, -ROWS)
            assert pool(ONE, ROWS) == (2.5, 2.5)
        assert pool.statistics().steps == 5
        assert pool.statistics().workers_lost == 0


@pytest.mark.parametrize("module", ["tensorflow"])
def test_a_missing_framework_is_an_error_that_says_how_to_get_it(module):
    code = f"""
import sys
sys.modules[{module!r}] = None  # as if it were not installed
import instep
try:
    instep.{module}
except instep.MissingFrameworkError as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    result = run_python("-c", code)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"pip install 'instep[{module}]'" in result.stdout
