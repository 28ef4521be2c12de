"""For any tree, any dtype, any rows and any shards: the whole batch's result."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import bits, make, started
from instep._tree import flatten, unflatten
from losses import Pair, Position

DTYPES = ["float16", "float32", "float64", "longdouble", "complex64", "complex128"]
ROW_DTYPES = ["float16", "float32", "float64", "int8", "int64", "bool"]
LARGEST = 4.0  # of all values drawn


def fun(params, *batch):
    """Every row is a number s; the loss is its mean, a leaf's gradient s * leaf."""
    rows = sum(np.asarray(leaf, float).sum() for leaf in flatten(batch)[0])
    number = len(flatten(batch)[0][0])
    mean = rows / number
    leaves, structure = flatten(params)
    grads = [(leaf * mean).astype(leaf.dtype) for leaf in leaves]
    return mean, unflatten(structure, grads)


def array(seed, shape, dtype):
    """Values of size 1 to 4: none so small that its rounding error is not relative."""
    generator = np.random.default_rng(seed)
    values = generator.uniform(1, LARGEST, shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * generator.uniform(1, LARGEST, shape)
    return np.asarray(values, dtype)


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
seeds = st.integers(0, 2**32 - 1)
params_leaves = st.builds(array, seeds, shapes, st.sampled_from(DTYPES))


def trees_of(leaves):
    """Trees in which every container holds a leaf: [None] is a list of one row."""
    return st.recursive(
        leaves,
        lambda below: (
            st.lists(below, min_size=1, max_size=3)
            | st.lists(below, min_size=1, max_size=3).map(lambda nodes: (None, *nodes))
            | st.lists(below, min_size=1, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abc"), below, min_size=1)
            | st.builds(Pair, below, below | st.none())
            | st.builds(Position, below | st.none(), below)
        ),
        max_leaves=6,
    )


@st.composite
def batches(draw, rows):
    """One to three arguments whose arrays all have this many rows."""
    leaf = st.builds(
        lambda seed, rest, dtype: array(seed, (rows, *rest), dtype),
        seeds,
        st.lists(st.integers(1, 2), max_size=1),
        st.sampled_from(ROW_DTYPES),
    )
    return tuple(draw(st.lists(trees_of(leaf), min_size=1, max_size=3)))


@st.composite
def calls(draw):
    """Parameters and batch."""
    rows = draw(st.integers(1, 200))
    return draw(trees_of(params_leaves)), *draw(batches(rows))


def assert_close(result, expected):
    """Equal up to the roundings on the way.

    The mean of float64 rows: one rounding per row and combination, at most 300.
    A gradient: one rounding per shard, then two multiplications, an addition and a
    division on each of at most 4 levels, each within half a unit of the dtype; half
    precision is combined in float32.
    """
    loss, grads = result
    expected_loss, expected_grads = expected
    assert math.isclose(loss, expected_loss, rel_tol=300 * 2.0**-53)
    found, structure = flatten(grads)
    wanted, expected_structure = flatten(expected_grads)
    assert structure == expected_structure
    for grad, want in zip(found, wanted, strict=True):
        assert (grad.dtype, grad.shape) == (want.dtype, want.shape)
        tolerance = 20 * np.finfo(grad.dtype).eps + 300 * 2.0**-53
        assert (abs(grad - want) <= tolerance * abs(want)).all()


@pytest.mark.guard(400)  # a failure takes its time to become small
@settings(max_examples=200, deadline=None)
@given(calls(), st.integers(1, 10), st.integers(1, 7))
def test_shards_give_the_whole_batch_result_and_its_bits(call, shards, workers):
    with make(fun, workers=workers, shards=shards, engine="serial") as pool:
        result = pool(*call)
        assert_close(result, fun(*call))
        assert bits(pool(*call)) == bits(result)
        assert bits(pool.evaluate(*call)) == bits(result[0])
    if shards == 1:
        assert bits(result) == bits(fun(*call))


@pytest.fixture(scope="module")
def pools():
    """Pools of all sizes, of both engines."""
    sizes = [(1, 1), (1, 3), (2, 3), (3, 3), (2, 7), (4, 10)]
    pools = {(w, s): make(fun, workers=w, shards=s) for w, s in sizes}
    for pool in pools.values():
        started(pool, np.ones(1), np.ones(10))
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.guard(400)
@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(call=calls())
def test_worker_processes_give_the_serial_bits(pools, call):
    @functools.cache
    def expected(shards):
        with make(fun, shards=shards, engine="serial") as serial:
            return bits(serial(*call))

    for (_, shards), pool in pools.items():
        assert bits(pool(*call)) == expected(shards)
