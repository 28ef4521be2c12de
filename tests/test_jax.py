"""A JAX pool returns what `jax.value_and_grad` returns on the whole batch."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import instep
from conftest import no_trace
from helpers import both_engines, run_python, write_script
from instep import testing
from losses_jax import (
    TRACES,
    Layer,
    any_loss,
    counted,
    mlp,
    network,
    network_arguments,
    problems,
    toy,
)

X = jnp.arange(1.0, 51.0)


def make(loss, *arguments, **options):
    return instep.jax.value_and_grad(loss, *arguments, **options)


def bits(tree):
    """Structure, and dtype, shape and bytes of every leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    arrays = map(np.asarray, leaves)
    return treedef, [(a.dtype.name, a.shape, a.tobytes()) for a in arrays]


@pytest.fixture(autouse=True, scope="module")
def _leaves_no_trace():
    """In place of the check after each test: the shared pools live longer."""
    yield from no_trace()


@pytest.fixture(params=["serial", "processes"], scope="module")
def pool(request, _leaves_no_trace):
    """One shard for each of three rows or more; the loss is the first argument."""
    options = {"workers": 2, "shards": 3, "engine": request.param}
    with make(any_loss, 1, **options) as pool:
        yield pool


@pytest.fixture(params=["serial", "processes"], scope="module")
def aux_pool(request, _leaves_no_trace):
    """Two shards; the loss, which has aux, is the first argument."""
    options = {"workers": 2, "shards": 2, "engine": request.param}
    with make(any_loss, 1, has_aux=True, **options) as pool:
        yield pool


# Numbers


def test_uneven_shards_give_the_whole_batch_gradient(pool):
    # The shards' means are 9, 26 and 42.5; their plain mean would be 25.8333.
    value, grad = pool(toy, 2.0, X)
    assert (value, grad) == (51.0, 25.5)


@pytest.mark.guard(120)
@pytest.mark.parametrize(("shards", "numbers"), [(3, (7, 1, 2)), (4, (7, 1, 2, 3, 4))])
def test_bits_do_not_depend_on_the_number_of_workers_or_the_engine(shards, numbers):
    arguments = network_arguments()
    with make(network, shards=shards, engine="serial") as pool:
        expected = bits(pool(*arguments))
    # One pool: each would import JAX, and all its workers compile, anew.
    with make(network, workers=numbers[0], shards=shards) as pool:
        for workers in numbers:
            pool.resize(workers)
            assert bits(pool(*arguments)) == expected
            assert bits(pool(*arguments)) == expected  # by other workers, maybe


def test_bits_without_jit_do_not_depend_on_the_number_of_workers_either():
    loss, *arguments = problems()["noisy"]
    results = []
    for options in ({"engine": "serial"}, {"workers": 1}, {"workers": 3}):
        with make(loss, shards=4, **options) as pool:
            results.append([bits(pool(*arguments)) for _ in range(2)])
    assert results[0] == results[1] == results[2]
    assert results[0][0] != results[0][1]


def test_the_sharded_gradient_is_the_whole_batch_gradient(pool):
    for name in ("mlp", "convolution", "mixed"):
        loss, *arguments = problems()[name]
        expected = jax.value_and_grad(loss)(*arguments)
        # Three roundings more, of the largest terms; half precision has 11 bits, or 8.
        leaves = map(jax.tree.leaves, (pool(loss, *arguments), expected))
        for a, b in zip(*leaves, strict=True):
            rtol = {"float16": 1e-3, "bfloat16": 1e-2}.get(str(a.dtype), 1e-5)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@both_engines
def test_one_shard_gives_the_bits_of_jit_of_value_and_grad(engine):
    def loss(*arguments):
        return network(*arguments).value

    arguments = network_arguments()
    expected = jax.jit(jax.value_and_grad(loss))(*arguments)
    with make(any_loss, 1, workers=1, shards=1, engine=engine) as pool:
        assert bits(pool(loss, *arguments)) == bits(expected)
        for name in ("mlp", "convolution", "mixed"):
            case = problems()[name]
            expected = jax.jit(jax.value_and_grad(case[0]))(*case[1:])
            assert bits(pool(*case)) == bits(expected)


@both_engines
def test_one_shard_without_jit_gives_the_bits_of_value_and_grad(engine):
    loss, *arguments = problems()["mlp"]

    def untraceable(*arguments):
        assert np.isfinite(np.asarray(arguments[1])).all()
        return loss(*arguments)

    expected = jax.value_and_grad(untraceable)(*arguments)
    with make(untraceable, workers=1, shards=1, engine=engine) as pool:
        assert bits(pool(*arguments)) == bits(expected)


@both_engines
def test_a_sum_is_added_over_shards(engine):
    def loss(w, x):
        return ((x * w) ** 2).sum()

    x = jnp.array([-1.0, 2.0, -3.0, 4.0])
    with make(loss, workers=2, shards=2, engine=engine, reduction="sum") as pool:
        assert pool(1.0, x) == (30.0, 60.0)


def test_the_loss_never_sees_an_empty_shard(pool):
    def loss(w, x):
        assert len(x) > 0
        return toy(w, x)

    assert pool(loss, 1.0, jnp.array([1.0, 3.0])) == (2.0, 2.0)


def test_a_number_as_aux_is_averaged_by_rows(aux_pool):
    def loss(w, prediction, truth):
        return w * 1.0, jnp.mean(prediction == truth)

    truth = jnp.zeros(39)
    prediction = jnp.repeat(jnp.array([0.0, 1.0]), jnp.array([20, 19]))
    (_, accuracy), _ = aux_pool(loss, 1.0, prediction, truth)
    assert accuracy == np.float32(20 / 39)  # the second shard is all wrong


def test_a_parameter_that_some_shards_do_not_use_counts_zero_there(pool):
    def loss(params, x, which):
        return jnp.mean(jnp.where(which, params["b"], params["a"]) * x)

    which = jnp.array([False, False, True])
    x = jnp.array([1.0, 2.0, 3.0])
    _, grads = pool(loss, {"a": 1.0, "b": 1.0, "unused": jnp.ones(2)}, x, which)
    assert (grads["a"], grads["b"]) == (1.0, 1.0)
    assert grads["unused"].tolist() == [0.0, 0.0]


def test_half_precision_does_not_overflow_by_summing(pool):
    # Three gradients of 40000 add up to more than float16 holds.
    _, grad = pool(toy, jnp.float16(1), jnp.full(3, 40000, jnp.float16))
    assert (grad.dtype, grad) == (jnp.float16, 40000)


@both_engines
def test_bfloat16_does_not_stall(engine):
    with make(toy, shards=512, workers=2, engine=engine) as pool:
        _, grad = pool(jnp.bfloat16(1), jnp.ones(512, jnp.bfloat16))
    assert (grad.dtype, grad) == (jnp.bfloat16, 1.0)


def test_a_complex_gradient_is_jax_s_own(pool):
    def loss(z, x):
        return jnp.mean(jnp.abs(z) ** 2 * x)

    _, grad = pool(loss, 1 + 2j, jnp.array([1.0, 2.0, 3.0]))
    assert grad == pytest.approx(4 - 8j, rel=1e-6)
    assert grad.dtype == jnp.complex64


def test_shapes_without_and_with_axes_stay_as_they_are(pool):
    def loss(params, x):
        total = params["scalar"] + params["none"].sum() + params["one"][0]
        return jnp.mean(total * x)

    params = {"scalar": jnp.array(1.0), "none": jnp.zeros(0), "one": jnp.zeros(1)}
    value, grads = pool(loss, params, X)
    assert jax.tree.map(jnp.shape, grads) == {"scalar": (), "none": (0,), "one": (1,)}
    assert grads["scalar"] == value == 25.5


def test_clipping_follows_averaging(pool):
    def loss(w, x):
        return jnp.mean(x @ w)

    x = jnp.array([[3.0, 4.0], [-3.0, 4.0]])
    _, grad = pool(loss, jnp.zeros(2), x)
    clipped, _ = optax.clip_by_global_norm(1.0).update(grad, optax.EmptyState())
    assert optax.tree.norm(grad) == 4.0
    assert clipped.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_returned(pool, bad):
    x = jnp.array([1.0, 2.0, bad, 4.0])
    expected = jax.value_and_grad(toy)(1.0, x)
    np.testing.assert_array_equal(pool(toy, 1.0, x), expected)


def test_shards_are_averaged_by_the_weight_that_the_loss_returns(pool):
    def loss(w, x, tokens):
        return instep.Weighted(w * x.sum() / tokens.sum(), tokens.sum())

    sums, tokens = jnp.array([5.0, 7, 6]), jnp.array([5.0, 1, 0])
    value, grad = pool(loss, 1.0, sums, tokens)
    # The last shard's mean, 6/0, is over nothing.
    assert (value, grad) == (2.0, 2.0)


def test_the_order_of_arrival_does_not_matter():
    def late(x):
        time.sleep(os.urandom(1)[0] / 256 / 100)  # not the seeded generators
        return x

    def loss(w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jnp.mean(w * jax.pure_callback(late, shape, x))

    x = np.array([1e8, 1, -1e8, 1], np.float32)
    with make(loss, workers=4, shards=4) as pool:
        runs = [pool(1.0, x) for _ in range(20)]
    # float32 knows no 1e8 + 1, so each pair loses its 1: (5e7 - 5e7) / 2.
    assert runs == [(0.0, 0.0)] * 20


def test_large_gradients_averaged_by_the_workers_have_the_serial_bits():
    def loss(params, x):
        return jnp.mean(x) * sum(jnp.sum(p**2) for p in params)

    params = [jnp.linspace(0, 1, 1_000_003), jnp.linspace(0, 1, 300_007)]
    x = jnp.arange(1.0, 12.0)
    with make(loss, shards=5, engine="serial") as pool:
        expected = bits(pool(params, x))
    with make(loss, workers=2, shards=5) as pool:
        held = [pool([k * p for p in params], x) for k in (1, 2, 3)]
        assert bits(held[0]) == expected  # the memory is not used again while held
        donated = jax.jit(lambda g: jax.tree.map(lambda a: 2 * a, g), donate_argnums=0)
        copies = bits(held[1:])
        doubled = donated(held[0][1])
        assert bits(pool(params, x)) == expected
    # Arrays outlive the pool whose memory they lie in.
    assert bits(held[1:]) == copies
    again = jax.tree.map(lambda a: a / 2, doubled)
    assert bits(again)[1] == expected[1][1:]


# Trees


def test_the_tree_of_the_gradient_is_that_of_the_parameters(pool):
    def loss(params, x):
        return jnp.mean(x @ params["w"].w + params["b"][0])

    params = {"w": Layer(jnp.ones((2, 3)), None), "b": (jnp.zeros(3), None)}
    x = jnp.ones((7, 2))
    assert bits(pool(loss, params, x)) == bits(jax.value_and_grad(loss)(params, x))


@pytest.mark.parametrize(
    ("leaf", "what"), [(jnp.int32(3), "int32"), (True, "bool"), (np.arange(2), "int")]
)
def test_a_leaf_that_has_no_gradient_is_named(pool, leaf, what):
    params = {"w": jnp.ones(2), "step": leaf}
    with pytest.raises(instep.GradientError, match=r"args\[1\]\['step'\].*" + what):
        pool(toy, params, X)
    with pytest.raises(TypeError):  # as JAX itself
        pool(toy, params, X)


@jax.tree_util.register_pytree_node_class
class Pair:
    def __init__(self, left, right, name):
        self.left, self.right, self.name = left, right, name

    def tree_flatten(self):
        return (self.left, self.right), self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(*children, name)


def test_pytrees_of_a_module_come_back_as_they_are(pool):
    def loss(params, batch):
        return jnp.mean(params.left * batch.left + params.right * batch.right)

    arguments = Pair(2.0, 3.0, "params"), Pair(X, X, "batch")
    value, grads = pool(loss, *arguments)
    assert (value, grads.left, grads.right, grads.name) == (127.5, 25.5, 25.5, "params")


def test_pytrees_of_a_function_come_back_as_they_are(aux_pool):
    @partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["name"])
    @dataclass
    class Model:
        w: object
        name: str

    def loss(model, x):
        return toy(model.w, x), Model(x, model.name)

    (value, aux), grad = aux_pool(loss, Model(2.0, "linear"), X[:5])
    assert (value, grad) == (6.0, Model(3.0, "linear"))
    assert type(aux) is Model
    assert bits(aux.w) == bits(X[:5])


def test_arguments_may_be_several_and_out_of_order():
    def loss(a, x, b):
        return jnp.mean(a * x) + b["c"]

    arguments = 2.0, X, {"c": 1.0}
    with make(loss, (2, 0), shards=2, engine="serial") as pool:
        value, grads = pool(*arguments)
    assert (value, grads) == jax.value_and_grad(loss, (2, 0))(*arguments)
    with (
        make(loss, 3, shards=2, engine="serial") as pool,
        pytest.raises(TypeError, match="argnums=3 of a call with 3"),
    ):
        pool(*arguments)


def test_python_numbers_give_weakly_typed_results_as_in_jax(pool):
    def dtype(w, x, half):
        assert (w * half).dtype == jnp.float16  # a Python number gives way
        return w * x.mean()

    _, grad = pool(dtype, 2.0, X, jnp.float16(1))
    assert grad.weak_type
    assert grad.dtype == jnp.float32
    value, _ = pool(lambda w, x: w**2, 2.0, X)
    assert value.weak_type
    assert (value * jnp.float16(1)).dtype == jnp.float16
    value, grad = pool(toy, jnp.float32(2), X)
    assert not value.weak_type
    assert not grad.weak_type


# Batches


class Fields(dict):
    """A batch with four kinds of fields."""


def fields(rows=5):
    return {
        "img": np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2),
        "txt": [f"text {k}" for k in range(rows)],
        "pos": Layer(np.arange(rows), -np.arange(rows)),
        "temp": 0.1,
    }


def test_rows_of_all_fields_stay_together(aux_pool):
    def loss(w, batch):
        assert type(batch["temp"]) is float
        size = instep.Sum(jnp.array([len(batch["txt"]) == n for n in (2, 3)], int))
        keys = ("txt", "img", "pos", "temp")
        return w * len(batch["txt"]), {**{k: batch[k] for k in keys}, "sizes": size}

    (_, aux), _ = aux_pool(loss, 1.0, fields())
    assert (aux["txt"], aux["temp"]) == (fields()["txt"], 0.1)
    assert type(aux["pos"]) is Layer
    assert bits((aux["img"], aux["pos"])) == bits(
        jax.tree.map(jnp.asarray, (fields()["img"], fields()["pos"]))
    )
    assert aux["sizes"].tolist() == [1, 1]  # one shard of 2 rows, one of 3


def test_a_field_of_another_length_is_named(pool):
    batch = {**fields(), "txt": ["a", "b", "c", "d"]}
    with pytest.raises(instep.BatchError, match=r"args\[2\]\['txt'\] has 4 rows"):
        pool(toy, 1.0, batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X, jnp.ones(49)), r"args\[3\] has 49 rows but args\[2\] has 50"),
        ((X, jax.random.PRNGKey(0)), "make it by jax.random.key"),
        ((jnp.ones((0, 3)),), r"args\[2\] has 0 rows"),
        ((1.0,), "nothing to split"),
        ((X, object()), r"args\[3\] is a object"),
        ((X, np.array(["a"])), r"args\[3\] is a ndarray"),
    ],
)
def test_a_batch_that_cannot_be_split_is_an_error(pool, batch, message):
    with pytest.raises(instep.BatchError, match=message):
        pool(toy, 1.0, *batch)


def weighted_columns(w, x, scale, offset):
    """Columns are rows here; `scale` has one entry for each feature."""
    return jnp.mean(w @ (x * scale[:, None]) + offset["by column"] + offset["all"])


@both_engines
@pytest.mark.parametrize("axis", [1, -1])
def test_in_axes_says_what_is_split(engine, axis):
    x = jnp.arange(15.0).reshape(3, 5)
    offset = {"by column": jnp.arange(5.0), "all": jnp.ones(1)}
    arguments = jnp.ones(3), x, jnp.array([1.0, 2, 3]), offset
    in_axes = (None, axis, None, {"by column": 0, "all": None})
    with make(
        weighted_columns, in_axes=in_axes, workers=2, shards=2, engine=engine
    ) as pool:
        found = pool(*arguments)
    expected = jax.value_and_grad(weighted_columns)(*arguments)
    # The sums are exact; only the two divisions round.
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-7)
    with make(weighted_columns, in_axes=in_axes, shards=1, engine=engine) as pool:
        compiled = jax.jit(jax.value_and_grad(weighted_columns))
        assert bits(pool(*arguments)) == bits(compiled(*arguments))


@pytest.mark.parametrize(
    ("in_axes", "error", "message"),
    [
        ((None, 0, 0), instep.ArgumentError, "for 2 positional arguments"),
        ((None, "rows"), instep.ArgumentError, r"'rows' for args\[1\]"),
        ((None, {"x": 0}), instep.ArgumentError, r"no prefix of its tree"),
        (0, instep.BatchError, r"args\[0\] is differentiated and cannot be split"),
        ((None, 1), instep.BatchError, r"shape \(50,\) and no axis 1"),
        ((None, None), instep.BatchError, "nothing to split"),
    ],
)
def test_in_axes_that_do_not_fit_are_an_error(in_axes, error, message):
    with (
        make(toy, in_axes=in_axes, shards=2, engine="serial") as pool,
        pytest.raises(error, match=message),
    ):
        pool(1.0, X)


@both_engines
def test_keywords_are_split_as_positional_arguments_are(engine):
    def loss(w, *, x, power, squared):
        return jnp.mean(w * x**power) if squared else jnp.mean(w * x)

    with make(loss, workers=1, shards=3, engine=engine) as pool:
        value, grad = pool(1.0, x=X, power=2, squared=True)
        assert value == grad == pytest.approx(858.5, rel=1e-6)
        assert pool(1.0, x=X, power=2, squared=False) == (25.5, 25.5)


# Keys and other randomness


def draws(w, x, key):
    return w * 1.0 + 0 * x.mean(), jax.random.uniform(key, x.shape)


def test_a_key_that_all_shards_share_is_folded_with_the_shard_s_index(aux_pool):
    key = jax.random.key(7)
    (_, drawn), _ = aux_pool(draws, 1.0, jnp.zeros(4), key)
    folded = [jax.random.fold_in(key, shard) for shard in (0, 1)]
    expected = jnp.concatenate([jax.random.uniform(k, (2,)) for k in folded])
    assert bits(drawn) == bits(expected)
    (_, other), _ = aux_pool(draws, 1.0, jnp.zeros(4), jax.random.key(7, impl="rbg"))
    assert bits(drawn) != bits(other)


def test_one_shard_uses_the_key_itself(aux_pool):
    key = jax.random.key(7)
    (_, drawn), _ = aux_pool(draws, 1.0, jnp.zeros(1), key)
    assert bits(drawn) == bits(jax.random.uniform(key, (1,)))


def test_keys_by_row_are_split_and_used_as_they_are(aux_pool):
    def loss(w, keys):
        return w * 1.0, (jax.vmap(jax.random.uniform)(keys), keys)

    keys = jax.random.split(jax.random.key(1), 5)
    (_, (drawn, back)), _ = aux_pool(loss, 1.0, keys)
    assert bits(drawn) == bits(jax.vmap(jax.random.uniform)(keys))
    assert jnp.all(back == keys)


@both_engines
def test_a_raw_key_is_replicated_as_it_is(engine):
    key = jax.random.PRNGKey(3)
    options = {"in_axes": (None, 0, None), "has_aux": True, "engine": engine}
    with make(draws, shards=2, workers=1, **options) as pool:
        (_, drawn), _ = pool(1.0, jnp.zeros(4), key)
    assert drawn.tolist() == 2 * jax.random.uniform(key, (2,)).tolist()


def test_masks_differ_between_shards_and_steps(aux_pool):
    def loss(w, x):
        return w * 1.0, jnp.asarray(np.random.rand(len(x)))  # a trace freezes these

    for function in (loss, jax.jit(loss)):
        steps = [aux_pool(function, 1.0, jnp.zeros(4))[0][1] for _ in range(3)]
        assert len({float(number) for step in steps for number in step}) == 12


# Compiling


def test_a_worker_compiles_once_for_each_shard_size():
    TRACES.clear()
    with make(counted, shards=3, engine="serial") as pool:
        for _ in range(3):
            pool(2.0, X)
            pool(jnp.float32(2.0), X)  # another type: two more
    assert sorted(TRACES) == [(16,), (16,), (17,), (17,)]


def test_processes_compile_once_for_each_shard_size_too(tmp_path):
    notes = tmp_path / "traces"

    def loss(w, x):
        with open(notes, "a") as file:
            file.write(f"{os.getpid()} {len(x)}\n")
        return toy(w, x)

    with make(loss, workers=2, shards=3) as pool:
        for _ in range(5):
            pool(2.0, X)
    lines = notes.read_text().splitlines()
    assert len(lines) == len(set(lines)) <= 4  # two workers, two sizes


def test_a_loss_that_cannot_be_traced_is_computed_without_jit(pool):
    def loss(w, x):
        if x[0] > 1e6:  # a value, which a trace does not have
            return w * 0
        return w * float(np.mean(np.asarray(x)))

    assert pool(loss, 2.0, X) == (51.0, 25.5)


@pytest.mark.parametrize("double", [False, True])
def test_switches_reach_the_loss_as_they_are(pool, double):
    def loss(w, x, double, name):
        assert name == "toy"
        return toy(w, x) * (2 if double else 1)

    value, _ = pool(loss, 1.0, X, double, "toy")
    assert value == (51.0 if double else 25.5)


def test_no_array_that_outlives_a_call_shares_its_memory():
    kept = []

    def loss(w, x):
        if isinstance(x, jax.core.Tracer):
            np.asarray(x)  # refuses to be traced
        kept.append((w, x))
        return toy(w, x), instep.Sum(len(kept))

    def fields(w, x):
        value, count = loss(w, x)
        whole = all(float(old[0]) < 1e6 for _, old in kept)
        return value, (count, instep.Sum(jnp.array(whole, int)))

    with make(fields, shards=1, engine="serial", has_aux=True) as pool:
        pool(1.0, jnp.arange(64.0))
        (_, (count, whole)), _ = pool(1.0, jnp.full(64, 5e5))
        (_, (count, whole)), _ = pool(1.0, jnp.full(64, 1e5))
    assert (count, whole) == (3, 1)


# Aux


def test_aux_follows_its_rules_and_stays_of_jax(aux_pool):
    def loss(w, x):
        aux = {
            "count": instep.Sum(len(x)),
            "ends": instep.Mean(jnp.array([x.min(), x.max()])),
            "rows": (10 * x).astype(int),
            "highest": x.max(),
            "integer": jnp.int32(x.shape[0]),
            "text": "unit",
            "none": None,
        }
        return w * x.mean(), aux

    (value, aux), _ = aux_pool(loss, 1.0, jnp.arange(5.0))
    assert value == 2.0
    assert (aux["count"], aux["text"], aux["none"]) == (5, "unit", None)
    assert bits(aux["rows"]) == bits(jnp.array([0, 10, 20, 30, 40]))
    assert aux["highest"] == np.float32((3 * 2.0 + 2 * 4.0) / 5)
    assert bits(aux["ends"]) == bits(jnp.array([(3 * 0 + 2 * 3) / 5, aux["highest"]]))
    assert aux["integer"] == np.float32((3 * 3 + 2 * 2) / 5)
    assert all(isinstance(aux[k], jax.Array) for k in ("rows", "highest", "integer"))


def test_one_shard_returns_the_aux_untouched(aux_pool):
    def loss(w, x):
        return toy(w, x), (jnp.int8(3), True, Layer(x, "text"))

    (_, aux), _ = aux_pool(loss, 1.0, jnp.ones(1))
    assert aux[0].dtype == jnp.int8
    assert aux[1] is True
    assert aux[2].b == "text"


def test_aux_without_a_rule_is_named(aux_pool):
    def loss(w, x):
        return toy(w, x), {"histogram": jnp.array([x.min(), x.max(), 0, 1])}

    with pytest.raises(instep.LossError, match=r"aux\['histogram'\] has shape \(4,\)"):
        aux_pool(loss, 1.0, jnp.arange(6.0))


def test_evaluate_returns_the_value_and_is_no_step(aux_pool):
    steps = aux_pool.statistics().steps
    value, aux = aux_pool.evaluate(lambda w, x: (toy(w, x), 2 * x), 2.0, X)
    assert (value, bits(aux)) == (51.0, bits(2 * X))
    assert aux_pool.statistics().steps == steps


# Errors


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda w, x: w * x, r"shape \(1.,\); expected a scalar"),
        (lambda w, x: "text", "returned 'text'"),
        (lambda w, x: jnp.argmax(x), "real-valued outputs"),
        (lambda w, x: instep.Weighted(w, -1), "weight -1"),
        (lambda w, x: instep.Weighted(w, jnp.nan), "weight nan"),
    ],
)
def test_a_loss_that_is_no_scalar_is_an_error(pool, loss, message):
    with pytest.raises(TypeError, match=message):
        pool(loss, 1.0, X)
    assert pool(toy, 1.0, X) == (25.5, 25.5)  # and the pool goes on


def test_an_error_of_the_loss_keeps_its_type(pool):
    def loss(w, x):
        raise LookupError("bad row 17")

    with pytest.raises(LookupError, match="bad row 17") as caught:
        pool(loss, 1.0, X)
    assert "in loss" in str(caught.value.__cause__)


def test_a_loss_that_is_no_function_is_an_error():
    with pytest.raises(instep.ArgumentError, match="the loss is a float"):
        make(1.0)
    with pytest.raises(instep.ArgumentError, match="argnums='w'"):
        make(toy, "w")


def test_without_jax_the_error_says_how_to_install_it():
    code = "import sys; sys.modules['jax'] = None; import instep; instep.jax"
    result = run_python("-c", code)
    assert "pip install 'instep[jax]'" in result.stderr


# Whether a loss may be sharded


def regularised(w, x):
    return jnp.mean((x @ w) ** 2) + 0.1 * w @ w


def normalised(w, x):
    return jnp.mean(jnp.abs((x - x.mean(0)) / x.std(0) @ w))


def contrastive(w, x):
    scores = (x * w) @ x.T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores)))


def drawn(w, x, key):
    return jnp.mean((x * jax.random.uniform(key, x.shape)) @ w)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda w, x: jnp.sum((x @ w) ** 2), "use reduction='sum'"),
        (normalised, "batch statistics"),
        (contrastive, "rows are compared with each other"),
    ],
)
def test_check_says_why_a_loss_may_not_be_sharded(loss, reason):
    x = np.random.default_rng(0).normal(size=(13, 4)).astype(np.float32)
    with make(loss, shards=4, engine="serial") as pool:
        report = pool.check(jnp.ones(4), x)
        assert pool.statistics().steps == 0
    assert not report.ok
    assert {finding.name for finding in report.findings} >= {"args[0]"}
    assert all(reason in finding.reason for finding in report.findings)


def test_check_passes_a_mean_and_remarks_on_keys(pool):
    x = np.random.default_rng(0).normal(size=(13, 4)).astype(np.float32)
    assert pool.check(regularised, jnp.ones(4), x).ok
    report = pool.check(drawn, jnp.ones(4), x, jax.random.key(0))
    assert report.ok
    assert "randomness" in report.notes[0]


def test_the_adapter_passes_the_conformance_kit():
    testing.check_adapter(
        partial(make, mlp),
        lambda pool: pool(*problems()["mlp"][1:]),
        lambda: jax.jit(jax.value_and_grad(mlp))(*problems()["mlp"][1:]),
        workers=[1, 3],
    )


# JAX's own state

IMPORT = """
from pathlib import Path
import instep.jax
from jax._src import xla_bridge

assert not xla_bridge._backends, "a backend has started"
assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread has started"
"""


def test_the_import_starts_neither_a_backend_nor_a_thread():
    # The template imports it, and forks: what has started would be cut in half.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    result = run_python("-c", IMPORT, env=environment)
    assert (result.returncode, result.stderr) == (0, "")


X64 = """
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
import numpy as np
import instep

def loss(w, x):
    steps = jnp.linspace(0, 1, 7)  # a constant of its own
    assert steps.dtype == jnp.float64
    return jnp.mean(jnp.exp(x[:, None] * steps) @ w)

def exact(params, x):
    return jnp.mean(x) * (params[0] + params[1].astype(float))

generator = np.random.default_rng(0)
arguments = generator.normal(size=7), generator.normal(size=101)
expected = jax.value_and_grad(loss)(*arguments)
pairs = jnp.float64(1), jnp.float32(1)
for engine in ("serial", "processes"):
    with instep.jax.value_and_grad(loss, shards=4, workers=2, engine=engine) as pool:
        for a, b in zip(pool(*arguments), expected, strict=True):
            assert a.dtype == jnp.float64
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)
    with instep.jax.value_and_grad(exact, shards=2, workers=2, engine=engine) as pool:
        _, grads = pool(pairs, jnp.full(4, 1 + 2.0**-40))
        assert grads[0] == 1 + 2.0**-40 and grads[1].dtype == jnp.float32
print("done")
"""


def test_double_precision_holds_in_the_workers(tmp_path):
    result = run_python(write_script(tmp_path, X64))
    assert (result.stdout, result.stderr) == ("done\n", "")


def test_flags_may_change_between_two_steps(aux_pool):
    def loss(w, x):
        return toy(w, x), (str(jax.config.jax_default_matmul_precision), jnp.ones(()))

    x = np.arange(4.0)  # float64, which JAX takes as float32 where x64 is off
    (_, before), grad = aux_pool(loss, 1.0, x)
    assert (before[0], before[1].dtype, grad.dtype) == ("None", "float32", "float32")
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        (value, (name, one)), grad = aux_pool(loss, 1.0, x)
        assert (name, one.dtype, value.dtype) == ("highest", "float64", "float64")
        assert grad.dtype == jnp.float64
    assert bits(aux_pool(loss, 1.0, x)[1]) == bits(jnp.float32(1.5))
    assert not jax.config.jax_enable_x64


def eigen_threads():
    """The threads that XLA computes with."""
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    names = [(task / "comm").read_text() for task in tasks]
    return sum(name.startswith("tf_XLAEigen") for name in names)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_is_the_number_of_threads_of_a_worker(threads):
    def loss(w, x):
        return toy(w, x), eigen_threads()

    with make(loss, workers=2, shards=2, threads=threads, has_aux=True) as pool:
        (_, found), _ = pool(1.0, X)
    assert found == threads


def test_the_serial_engine_leaves_the_process_as_it_was():
    x = jnp.ones((300, 300))

    def state():
        cores, variables = os.sched_getaffinity(0), dict(os.environ)
        return cores, variables, jax.devices(), jnp.ones(()).devices()

    def loss(w, x):
        return jnp.mean(w * x.sum(0))

    before = state()
    with make(loss, shards=2, threads=1, engine="serial") as pool:
        (value, grad) = pool(jnp.ones(300), x)
    assert state() == before
    assert value.devices() == grad.devices() == x.devices()


def test_the_serial_engine_has_the_bits_of_workers_with_as_many_threads():
    def loss(w, x):
        return jnp.sum(w * x.sum(axis=0))

    draw = np.random.default_rng(0).normal
    # Large enough that XLA splits the sum by threads: 1 and 2 differ in bits here.
    arguments = draw(size=1000).astype("f4"), draw(size=(4000, 1000)).astype("f4")
    found = {}
    for threads in (1, 2):
        for engine in ("serial", "processes"):
            options = {"threads": threads, "engine": engine}
            with make(loss, workers=1, shards=1, **options) as pool:
                found[engine, threads] = bits(pool(*arguments))
        assert found["serial", threads] == found["processes", threads]
    assert found["serial", 1] != found["serial", 2]


# Under jax.jit


def test_a_pool_works_inside_jit(pool):
    loss, *arguments = problems()["mlp"]
    call = partial(pool, loss)
    assert bits(jax.jit(call)(*arguments)) == bits(call(*arguments))
    value = jax.jit(partial(pool.evaluate, loss))(*arguments)
    assert bits(value) == bits(pool.evaluate(loss, *arguments))


def test_aux_and_keys_work_inside_jit(aux_pool):
    def loss(w, x, key):
        drawn = jax.random.uniform(key, x.shape)
        aux = {"drawn": drawn, "size": len(x), "sum": instep.Sum(jnp.int32(len(x)))}
        aux["ends"] = instep.Mean(jnp.array([x.min(), x.max()]))
        return toy(w, x), {**aux, "text": "unit", "key": jax.random.split(key, len(x))}

    @jax.jit
    def step(w, x, key):
        (value, aux), grad = aux_pool(loss, w, x, key)
        assert aux.pop("text") == "unit"
        return value, grad, aux

    key = jax.random.key(0)
    (value, aux), grad = aux_pool(loss, 2.0, X[:5], key)
    traced = step(2.0, X[:5], key)
    assert traced[:2] == (value, grad)
    assert bits(traced[2]["drawn"]) == bits(aux["drawn"])
    assert (traced[2]["size"], aux["size"]) == (np.float32(13 / 5), 13 / 5)
    assert traced[2]["sum"] == aux["sum"] == 5
    assert bits(traced[2]["ends"]) == bits(aux["ends"])
    assert jnp.all(traced[2]["key"] == aux["key"])


def test_a_pool_works_inside_scan_and_vmap(pool):
    @jax.jit
    def train(w, x):
        def step(w, _):
            value, grad = pool(toy_square, w, x)
            return w - 0.1 * grad, value

        return jax.lax.scan(step, w, length=3)

    w, values = train(jnp.float32(2.0), X)
    plain = []
    here = jnp.float32(2.0)
    for _ in range(3):
        value, grad = pool(toy_square, here, X)
        plain.append(value)
        here = here - 0.1 * grad
    assert bits((w, values)) == bits((here, jnp.stack(plain)))
    many, _ = jax.vmap(lambda w: pool(toy, w, X))(jnp.arange(3.0))
    assert many.tolist() == [0.0, 25.5, 51.0]


def toy_square(w, x):
    return jnp.mean((w - x) ** 2) / 100


# Training


def train(pool, steps=6, before_step=lambda step: None):
    """The parameters after some steps of Adam."""
    _, params, x, y = problems()["mlp"]
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        before_step(step)
        _, grads = pool(params, x, y)
        params, state = update(params, state, grads)
    return bits(params)


def test_training_survives_the_death_of_a_worker_with_the_same_bits():
    with make(mlp, shards=4, engine="serial") as pool:
        expected = train(pool)
    with make(mlp, workers=3, shards=4) as pool:

        def kill(step):
            if step == 3:
                os.kill(pool.statistics().pids[0], signal.SIGKILL)

        assert train(pool, before_step=kill) == expected
        assert pool.statistics().workers_lost == 1


MAIN = """
import jax
import jax.numpy as jnp
import instep

@jax.tree_util.register_pytree_node_class
class Model:
    def __init__(self, w):
        self.w = w
    def tree_flatten(self):
        return (self.w,), None
    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

class Metrics(Model):
    pass

jax.tree_util.register_pytree_node_class(Metrics)
scale = jnp.float32(0.5)  # the loss closes over an array

def loss(model, x):
    return jnp.mean(model.w * x) * scale, Metrics(x.max())

jnp.ones(3) + 1  # JAX has run before the workers start
with instep.jax.value_and_grad(loss, has_aux=True, workers=7, shards=7) as pool:
    for _ in range(3):
        (value, metrics), grads = pool(Model(2.0), jnp.arange(1.0, 50.0))
print(float(value), float(grads.w), type(metrics).__name__, float(metrics.w))
"""


def test_a_script_with_pytrees_of_its_own_and_seven_workers(tmp_path):
    result = run_python(write_script(tmp_path, MAIN))
    # The highest of each shard, 7, 14, ..., 49, averaged: 28.
    assert (result.stdout, result.stderr) == ("25.0 12.5 Metrics 28.0\n", "")
