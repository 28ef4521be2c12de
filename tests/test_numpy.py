"""A NumPy pool returns what the function returns on the whole batch."""

from __future__ import annotations

import os
import time

import numpy as np
import psutil
import pytest
from scipy.optimize import minimize

import instep
from helpers import bits, both_engines, make, started
from losses import Position, least_squares, logistic, sum_of_squares, toy, wide

WORKERS = (1, 2, 3, 4, 7)


def problem(rows=53, columns=5, dtype=np.float64):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(rows, columns)).astype(dtype)
    y = generator.normal(size=rows).astype(dtype)
    return generator.normal(size=columns).astype(dtype), x, y


@both_engines
def test_uneven_shards_give_the_whole_batch_gradient(engine):
    # The shards' means are 9, 26 and 42.5; their plain mean would be 25.8333.
    with make(toy, workers=2, shards=3, engine=engine) as pool:
        loss, grad = pool(np.float64(2.0), np.arange(1.0, 51.0))
    assert (loss, grad) == (51.0, 25.5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bits_do_not_depend_on_the_number_of_workers(dtype):
    arguments = problem(dtype=dtype)
    results = []
    for workers in WORKERS:
        with make(least_squares, workers=workers, shards=5) as pool:
            results.append(bits(pool(*arguments)))
    with make(least_squares, shards=5, engine="serial") as pool:
        expected = pool(*arguments)
    assert all(result == bits(expected) for result in results)
    # Two roundings per row and element of a sum of 53 terms.
    np.testing.assert_allclose(
        expected[1], least_squares(*arguments)[1], rtol=60 * np.finfo(dtype).eps
    )


@both_engines
def test_one_shard_gives_the_bits_of_the_function_itself(engine):
    arguments = problem()
    with make(least_squares, workers=2, shards=1, engine=engine) as pool:
        assert bits(pool(*arguments)) == bits(least_squares(*arguments))


@both_engines
def test_a_sum_is_added_over_shards(engine):
    options = {"workers": 2, "shards": 2, "engine": engine, "reduction": "sum"}
    with make(sum_of_squares, **options) as pool:
        loss, grad = pool(np.float64(1.0), np.array([-1.0, 2.0, -3.0, 4.0]))
    assert (loss, grad) == (30.0, 60.0)
    assert 1.0 - 0.001 * grad == pytest.approx(0.94, rel=1e-15)


@both_engines
def test_the_function_never_sees_an_empty_shard(engine):
    def fun(w, x):
        assert len(x) > 0
        return toy(w, x)

    with make(fun, workers=4, shards=4, engine=engine) as pool:
        assert pool(np.float64(1.0), np.array([1.0, 3.0])) == (2.0, 2.0)


@both_engines
def test_a_number_as_aux_is_averaged_by_rows(engine):
    def fun(w, prediction, truth):
        accuracy = np.mean(prediction == truth)
        return (w * 1.0, accuracy), w * 0.0

    truth = np.zeros(39)
    prediction = np.repeat([0.0, 1.0], [20, 19])  # the second shard is all wrong
    with make(fun, workers=2, shards=2, engine=engine, has_aux=True) as pool:
        (_, accuracy), _ = pool(1.0, prediction, truth)
    assert accuracy == 20 / 39


@both_engines
def test_shapes_without_and_with_axes_stay_as_they_are(engine):
    def fun(params, x):
        grads = {"scalar": np.asarray(x.mean()), "none": np.zeros(0), "one": x[:1] * 0}
        return np.mean(params["scalar"] * x), grads

    params = {"scalar": np.array(1.0), "none": np.zeros(0), "one": np.zeros(1)}
    with make(fun, workers=2, shards=3, engine=engine) as pool:
        loss, grads = pool(params, np.arange(1.0, 51.0))
    assert {name: grad.shape for name, grad in grads.items()} == {
        "scalar": (),
        "none": (0,),
        "one": (1,),
    }
    assert grads["scalar"] == loss == 25.5


def fields(rows=5):
    return {
        "img": np.arange(2.0 * rows).reshape(rows, 2),
        "txt": [f"text {k}" for k in range(rows)],
        "pos": Position(np.arange(rows), -np.arange(rows)),
        "temp": 0.1,
    }


@both_engines
def test_rows_of_all_fields_stay_together(engine):
    def fun(w, batch):
        aux = {
            "txt": batch["txt"],
            "img": batch["img"],
            "pos": batch["pos"],
            "sizes": instep.Sum(np.array([len(batch["txt"]) == n for n in (2, 3)])),
            "temp": batch["temp"],
            "temp type": type(batch["temp"]).__name__,
        }
        return (w * len(batch["txt"]), aux), w * 0

    with make(fun, workers=2, shards=2, engine=engine, has_aux=True) as pool:
        (_, aux), _ = pool(1.0, fields())
    assert aux["txt"] == fields()["txt"]
    assert isinstance(aux["pos"], Position)
    assert bits((aux["img"], aux["pos"])) == bits((fields()["img"], fields()["pos"]))
    assert aux["sizes"].tolist() == [1, 1]  # one shard of 2 rows, one of 3
    assert (aux["temp"], aux["temp type"]) == (0.1, "float")


@both_engines
def test_a_field_of_another_length_is_named(engine):
    batch = {**fields(), "txt": ["a", "b", "c", "d"]}
    with (
        make(toy, workers=1, engine=engine) as pool,
        pytest.raises(instep.BatchError, match=r"batch\[0\]\['txt'\] has 4 rows"),
    ):
        pool(1.0, batch)


def test_the_order_of_arrival_does_not_matter():
    def fun(w, x):
        time.sleep(os.urandom(1)[0] / 256 / 100)  # not the seeded generators
        return x.mean(), x.mean()

    x = np.array([1e8, 1, -1e8, 1], np.float32)
    with make(fun, workers=4, shards=4) as pool:
        runs = [bits(pool(np.float32(0), x)) for _ in range(20)]
    # float32 knows no 1e8 + 1, so each pair loses its 1: (5e7 - 5e7) / 2.
    assert runs == [bits((np.float32(0), np.float32(0)))] * 20


def test_two_thousand_parameters_take_no_more_messages_than_two():
    def fun(params, x):
        return np.mean(x), [p * x.mean() for p in params]

    def writes(number, steps=20):
        """Calls of write() by master, template and workers for some steps."""
        params = [np.full(1, 1.0 + k) for k in range(number)]
        x = np.arange(10.0)
        with make(fun, workers=2, shards=2) as pool:
            started(pool, params, x)
            here = psutil.Process()
            processes = [here, *here.children(recursive=True)]
            before = sum(p.io_counters().write_count for p in processes)
            for _ in range(steps):
                loss, grads = pool(params, x)
            after = sum(p.io_counters().write_count for p in processes)
        assert loss == 4.5
        assert bits(grads) == bits([p * 4.5 for p in params])
        return (after - before) / steps

    assert writes(2000) == writes(2)


@both_engines
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_returned(engine, bad):
    x = np.array([1.0, 2.0, bad, 4.0])
    expected = toy(np.float64(1), x)
    for workers in (1, 2, 3, 4):
        with make(toy, workers=workers, shards=2, engine=engine) as pool:
            assert bits(pool(np.float64(1), x)) == bits(expected)


def per_token(w, x, tokens):
    """The gradient of a shard is the sum over its rows by its number of tokens."""
    total = tokens.sum()
    return instep.Weighted(w * x.sum() / total, total), x.sum() / total


@both_engines
def test_shards_are_averaged_by_the_weight_that_the_function_returns(engine):
    sums, tokens = np.array([5.0, 7, 6, 10]), np.array([5.0, 1, 3, 1])
    with make(per_token, workers=2, shards=4, engine=engine) as pool:
        _, grad = pool(np.float64(1), sums, tokens)
        rounds = [
            pool(np.float64(1), sums[k : k + 2], tokens[k : k + 2])[1] for k in (0, 2)
        ]
    assert grad == 28 / 10
    assert rounds == [12 / 6, 16 / 4]  # whose plain mean would be 3.0


@both_engines
def test_a_shard_of_weight_zero_counts_for_nothing(engine):
    def fun(w, x, valid):
        count = valid.sum()
        with np.errstate(invalid="ignore"):
            mean = (x * valid).sum() / count  # 0 / 0 in the first shard
        return instep.Weighted(w * mean, count), mean

    x, valid = np.array([9.0, 9, 1, 2]), np.array([0.0, 0, 1, 1])
    with make(fun, workers=2, shards=2, engine=engine) as pool:
        assert pool(np.float64(2), x, valid) == (3.0, 1.5)


@both_engines
def test_aux_is_summed_concatenated_or_averaged(engine):
    def fun(w, x):
        ends = instep.Mean(np.array([x.min(), x.max()]))
        texts = list(map(str, x))
        aux = (instep.Sum(len(x)), x * 10, x.max(), texts, None, "unit", ends)
        return (w * x.mean(), aux), x.mean()

    x = np.arange(5.0)
    with make(fun, workers=2, shards=2, engine=engine, has_aux=True) as pool:
        (loss, aux), grad = pool(np.float64(1), x)
    assert (loss, grad) == (2.0, 2.0)
    count, rows, highest, texts, nothing, unit, ends = aux
    assert count == 5
    assert rows.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert highest == (3 * 2.0 + 2 * 4.0) / 5
    assert texts == ["0.0", "1.0", "2.0", "3.0", "4.0"]
    assert nothing is None
    assert unit == "unit"
    assert ends.tolist() == [(3 * 0.0 + 2 * 3.0) / 5, highest]


@both_engines
def test_a_mean_needs_the_same_shape_in_every_shard(engine):
    def fun(w, x):
        return (w * x.mean(), {"rows": instep.Mean(x)}), x.mean()

    with (
        make(fun, workers=2, shards=2, engine=engine, has_aux=True) as pool,
        pytest.raises(
            instep.LossError, match=r"aux\['rows'\] .* shapes \[\(3,\), \(2,\)\]"
        ),
    ):
        pool(1.0, np.arange(5.0))


@both_engines
def test_means_of_whole_numbers_are_fractions(engine):
    def fun(w, x):
        return (w * x.mean(), instep.Mean(np.array([len(x)]))), x.mean()

    with make(fun, workers=2, shards=2, engine=engine, has_aux=True) as pool:
        (_, aux), _ = pool(1.0, np.arange(5.0))
    assert aux.tolist() == [(3 * 3 + 2 * 2) / 5]


@both_engines
def test_aux_without_a_rule_is_an_error(engine):
    def fun(w, x):
        return (w * 1.0, {"histogram": np.array([x.min(), x.max(), 0, 1])}), w * 0

    with (
        make(fun, workers=2, shards=2, engine=engine, has_aux=True) as pool,
        pytest.raises(instep.LossError, match=r"aux\['histogram'\] has shape \(4,\)"),
    ):
        pool(1.0, np.arange(6.0))


@both_engines
def test_one_shard_returns_the_aux_untouched(engine):
    def fun(w, x):
        return (w * 1.0, {"flag": True, "pair": Position(x.sum(), "text")}), w * 0

    with make(fun, shards=1, workers=1, engine=engine, has_aux=True) as pool:
        (_, aux), _ = pool(1.0, np.arange(3.0))
    assert aux == {"flag": True, "pair": Position(3.0, "text")}


@both_engines
def test_evaluate_returns_the_loss_and_is_no_step(engine):
    x = np.arange(1.0, 51.0)
    with make(toy, workers=2, shards=3, engine=engine) as pool:
        assert pool.evaluate(np.float64(2), x) == 51.0
        assert pool.statistics().steps == 0
        pool(np.float64(2), x)
        assert pool.statistics().steps == 1


@both_engines
def test_numbers_may_change_from_step_to_step(engine):
    def fun(params, x, rate):
        grads = {"w": rate * x.mean(), "b": np.float64(rate)}
        return rate * np.mean(params["w"] * x) + params["b"], grads

    x = np.array([1.0, 2.0, 3.0])
    with make(fun, workers=2, shards=2, engine=engine) as pool:
        for k in range(5):
            params = {"w": float(k), "b": np.float64(2 * k)}
            loss, grads = pool(params, x, k)
            assert (loss, grads) == (k * k * 2.0 + 2 * k, {"w": k * 2.0, "b": k})


@both_engines
def test_arrays_may_be_changed_in_place_between_steps(engine):
    x, w = np.arange(4.0), np.array(1.0)
    with make(toy, workers=2, shards=2, engine=engine) as pool:
        for k in range(5):
            assert pool(w, x) == (w * (k + 1.5), k + 1.5)
            x += 1
            w += 1


@both_engines
def test_random_numbers_depend_on_seed_step_and_shard_alone(engine):
    def fun(w, x):
        noise = np.random.rand(len(x))
        return (w * 1.0, noise), w * 0

    def draw(seed, workers):
        options = {"seed": seed, "workers": workers, "engine": engine}
        with make(fun, shards=2, has_aux=True, **options) as pool:
            return [pool(1.0, np.zeros(4))[0][1].tolist() for _ in range(2)]

    first = draw(0, 1)
    assert first == draw(0, 3)
    assert first != draw(1, 1)
    numbers = [number for step in first for number in step]
    assert len(set(numbers)) == 8  # shards and steps differ


@pytest.mark.parametrize("options", [{"engine": "serial"}, {"workers": 2}])
def test_params_and_batch_are_read_only_in_the_function(options):
    def fun(w, x):
        x[0] = 1.0
        return toy(w, x)

    x = np.zeros(4)
    with make(fun, **options) as pool, pytest.raises(ValueError, match="read-only"):
        pool(np.float64(1), x)
    assert x[0] == 0.0


def test_scipy_minimizes_with_the_same_bits_for_any_number_of_workers():
    _, x, y = problem(rows=101)
    y, start = np.sign(y), np.zeros(5)
    options = {"args": (x, y), "jac": True, "method": "L-BFGS-B"}
    found = []
    for workers in WORKERS:
        with make(logistic, workers=workers, shards=4) as pool:
            result = minimize(pool, start, **options)
        found.append((result.x.tobytes(), result.fun, result.nfev))
    assert all(other == found[0] for other in found)
    alone = minimize(logistic, start, **options)
    # Both stop where the gradient is below 1e-5; the curvature there is above 2e-3.
    np.testing.assert_allclose(result.x, alone.x, atol=1e-2)
    assert result.fun == pytest.approx(alone.fun, rel=1e-6)


def large(scale=1.0):
    """5 MB of parameters in three dtypes, none of them a multiple of a page."""
    sizes = {"a": (np.float64, 400_003), "b": (np.float32, 500_009), "c": (np.half, 7)}
    return {
        name: np.linspace(0, scale, size, dtype=dtype)
        for name, (dtype, size) in sizes.items()
    }


def test_large_gradients_averaged_by_the_workers_have_the_serial_bits():
    x = np.arange(1.0, 12.0)
    with make(wide, shards=5, engine="serial") as pool:
        expected = bits(pool(large(), x))
    for workers in (1, 2, 3):
        with make(wide, workers=workers, shards=5) as pool:
            assert bits(pool(large(), x)) == expected


def test_a_result_that_is_still_held_is_not_overwritten():
    with make(wide, workers=2, shards=3) as pool:
        held = [pool(large(scale), np.arange(1.0, 8.0))[1] for scale in range(4)]
        copies = [bits(grads) for grads in held]
        small = {"a": np.ones(3)}  # other sizes move the places of the results
        held += [pool(small, np.arange(1.0, 8.0))[1]]
        medium = {"a": np.ones(600_000)}
        held += [pool(medium, np.arange(1.0, 8.0))[1] for _ in range(2)]
    assert [bits(grads) for grads in held[:4]] == copies
    assert held[4]["a"].tolist() == [4.0, 4.0, 4.0]
    assert all((grads["a"] == 4.0).all() for grads in held[5:])


def test_a_result_may_be_changed_in_place():
    with make(wide, workers=2, shards=2) as pool:
        first = pool(large(), np.ones(4))[1]
        first["a"] *= 2
        again = pool(large(), np.ones(4))[1]
    assert bits(again) == bits(large())


@both_engines
def test_memory_that_grew_between_two_steps_is_written_where_it_is_now(engine):
    x = np.arange(12.0)
    with make(toy, shards=1, engine=engine, workers=1) as pool:
        for shards in (1, 3, 12, 2):  # more slots, then fewer
            pool.load_state_dict({**pool.state_dict(), "shards": shards})
            for factor in (1.0, -3.0):
                assert pool(np.float64(1), factor * x) == toy(np.float64(1), factor * x)
