"""The tree gives the weighted mean, in the dtype of the leaf, and always its bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep._layout import Layout, store
from instep._partials import any_present, largest_nodes, root, segments_of
from instep._program import Output
from instep._reduction import (
    BLOCK,
    average_slots,
    reduce_rows,
    reduce_scalar,
    reduce_slots,
)

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def combined(values, weights=None, rule="mean", dtype=None):
    """One number per shard, combined as vectors of length 1."""
    array = np.asarray(values, dtype).reshape(-1, 1)
    out = np.empty(1, array.dtype)
    with np.errstate(all="ignore"):
        reduce_rows(list(array), weights or [1.0] * len(array), rule, out)
    assert out.dtype == array.dtype
    return out[0]


def by_definition(nodes):
    """The tree over (weight, mean) nodes: split at the largest power of two."""
    if len(nodes) == 1:
        return nodes[0]
    middle = 1 << (len(nodes) - 1).bit_length() - 1
    (wa, a), (wb, b) = by_definition(nodes[:middle]), by_definition(nodes[middle:])
    if wa == wb:
        return wa + wb, (a + b) / type(a)(2)
    a, b = a * type(a)(wa), b * type(b)(wb)
    return wa + wb, (a + b) / type(a)(wa + wb)


def test_rows_weigh():
    assert combined([9.0, 26.0, 42.5], [17, 17, 16]) == 25.5


def test_an_empty_shard_does_not_count():
    assert combined([1.0, 3.0]) == 2.0


@pytest.mark.parametrize(("dtype", "expected"), [(np.float32, 0.0), (np.float64, 0.5)])
def test_each_dtype_is_combined_in_itself(dtype, expected):
    # 1e8 + 1 is 1e8 in float32, in whatever order the shards arrive.
    assert combined([1e8, 1, -1e8, 1], dtype=dtype) == expected


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.floats(-1e6, 1e6, width=32)),
        min_size=1,
        max_size=17,
    )
)
def test_the_tree_has_this_shape(nodes):
    weights, values = zip(*nodes, strict=True)
    typed = [(float(w), np.float32(v)) for w, v in nodes]
    expected = by_definition(typed)[1]
    assert combined(values, weights, dtype=np.float32).tobytes() == expected.tobytes()


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300), st.integers(1, 1000))
def test_equal_weights_give_half_the_sum(a, b, weight):
    assert combined([a, b], [weight, weight]) == (a + b) / 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_of_zero_counts_for_nothing_whatever_stands_there(bad):
    assert combined([bad, 3.0], [0, 2]) == 3.0
    assert combined([3.0, bad], [2, 0]) == 3.0
    assert combined([bad, 3.0, 5.0, bad], [0, 1, 3, 0]) == 4.5


def test_weights_of_zero_alone_leave_nothing_to_average():
    assert np.isnan(combined([np.nan, np.nan], [0, 0]))
    assert combined([1.0, 3.0], [0, 0]) == 2.0


def test_one_shard_comes_back_untouched():
    for value in (-0.0, np.nan, np.inf, 5e-324):
        assert combined([value], [7]).tobytes() == np.float64(value).tobytes()


def test_float16_does_not_overflow_by_summing():
    assert combined([40000] * 4, dtype=np.float16) == 40000
    assert combined([40000] * 3, [1000, 1000, 999], dtype=np.float16) == 40000


def test_bfloat16_does_not_stall_by_summing():
    assert combined([1.0] * 512, dtype=ml_dtypes.bfloat16) == 1.0


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_rounded_once(dtype):
    step = float(ml_dtypes.finfo(dtype).eps)
    values = [1.0, 1.0, 1.0, 1.0 + step]  # pairwise halves would be rounded away
    values += [1.0 + step] * 4
    assert combined(values, dtype=dtype) == dtype.type(1.0 + step * 5 / 8)


def test_complex_numbers_keep_their_imaginary_part():
    assert combined([1 + 2j, 3 + 6j], dtype=np.complex64) == 2 + 4j
    assert combined([1 + 2j, 4 + 5j], [2, 1], dtype=np.complex128) == 2 + 3j


def test_longdouble_keeps_its_precision():
    tiny = np.finfo(np.longdouble).eps
    values = np.array([1 + tiny, 1 + tiny], np.longdouble)
    assert combined(values, dtype=np.longdouble) == 1 + tiny


def test_a_sum_is_added_whatever_the_weights():
    assert combined([1.0, 2.0, 4.0], [5, 1, 9], rule="sum") == 7.0


def test_integers_are_averaged_as_float64():
    assert reduce_scalar([1, 2], [1, 1], "mean") == 1.5
    assert reduce_scalar([True, False, False], [1, 1, 2], "mean") == 0.25
    assert reduce_scalar([1, 2], [1, 1], "mean").dtype == np.float64


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8])
def test_blocks_do_not_change_the_bits(dtype, number):
    size = BLOCK // np.dtype(dtype).itemsize + 3  # several blocks, the last one short
    generator = np.random.default_rng(number)
    rows = generator.normal(size=(number, size)).astype(dtype)
    weights = [float(k + 1) for k in range(number)]
    for given_rows in (rows, list(rows)):
        out = np.empty(size, dtype)
        reduce_rows(given_rows, weights, "mean", out)
        for k in (0, 1, size // 2, size - 1):
            assert out[k] == combined(rows[:, k], weights, dtype=dtype)


def slots_of(outputs, *shards):
    layout = Layout.of([Output(array.shape, array.dtype) for array in outputs])
    slots = np.zeros((len(shards), layout.nbytes), np.uint8)
    for slot, values in zip(slots, shards, strict=True):
        store(layout, values, layout.views(slot), layout.present(slot))
    return slots, layout


def test_leaves_of_several_dtypes_do_not_touch_each_other():
    leaves = [
        np.array([1.0, 2.0], np.float32),
        np.array(1 + 2.0**-40),
        np.array([3.0], np.float16),
        np.zeros(0),
        np.array([[5.0]], np.float32),
    ]
    slots, layout = slots_of(leaves, leaves, leaves, leaves)
    for given_slots in (slots, list(slots)):
        for got, leaf in zip(
            average_slots(given_slots, [1, 2, 3], layout), leaves, strict=True
        ):
            assert (got.dtype, got.shape) == (leaf.dtype, leaf.shape)
            assert got.tobytes() == leaf.tobytes()


def test_a_gradient_that_no_shard_has_stays_none_and_one_of_some_counts_as_zero():
    one = np.ones(2)
    slots, layout = slots_of([one] * 3, [one, None, one], [None, None, one])
    first, second, third = average_slots(slots, [1, 1], layout)
    assert first.tolist() == [0.5, 0.5]
    assert second is None
    assert third.tolist() == [1.0, 1.0]


# Parts of the tree, combined where their shards are

EVERY_KIND = [
    Output((3, 5), np.dtype(np.float64), "mean", "double"),
    Output((40,), np.dtype(np.float32), "mean", "single"),
    Output((7,), HALVES[0], "mean", "half"),
    Output((9,), HALVES[1], "mean", "brain half"),
    Output((4,), np.dtype(np.float32), "sum", "sum"),
]


def slot_of(layout, rng):
    """A shard's outputs, some of them None."""
    values = [rng.normal(size=o.shape).astype(o.dtype) for o in layout.outputs]
    values = [None if rng.random() < 0.3 else value for value in values]
    slot = np.zeros(layout.nbytes, np.uint8)
    store(layout, values, layout.views(slot), layout.present(slot))
    return slot


def over_machines(slots, weights, layout, places, cuts):
    """The result where each machine combines its nodes, and each part one of all."""
    working = layout.working
    wide = [layout.convert(slot, working) for slot in slots]
    nodes = {}
    for machine in set(places):
        held = {shard for shard, place in enumerate(places) if place == machine}
        for node in largest_nodes(held, len(slots)):
            own, some = wide[node.start : node.stop], weights[node.start : node.stop]
            nodes[node] = out = np.zeros(working.nbytes, np.uint8)
            reduce_slots(own, some, working, out)
            working.present(out)[:] = any_present(own, working)
    result = np.empty(working.nbytes, np.uint8)
    for start, stop in zip(cuts, [*cuts[1:], working.nbytes], strict=True):
        parts = {node: array[start:stop] for node, array in nodes.items()}
        segments = segments_of(working, start, stop)
        result[start:stop] = root(parts, weights, segments)
    working.present(result)[:] = any_present(list(nodes.values()), working)
    return working.convert(result, layout)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=17),
    st.lists(st.sampled_from([64, 128, 320, 512]), max_size=3, unique=True),
    st.booleans(),
    st.integers(0, 99),
)
def test_where_shards_are_combined_changes_no_bit(places, cuts, are_equal, seed):
    rng, layout = np.random.default_rng(seed), Layout.of(EVERY_KIND)
    slots = [slot_of(layout, rng) for _ in places]
    weights = [17.0 if are_equal else float(rng.integers(0, 9)) for _ in places]
    expected = average_slots(slots, weights, layout)
    out = over_machines(slots, weights, layout, places, [0, *sorted(cuts)])
    present = layout.present(out)
    for array, view, has in zip(expected, layout.views(out), present, strict=True):
        assert (array is not None) == bool(has)
        assert array is None or array.tobytes() == view.tobytes()


def test_the_largest_subtrees_are_combined_first():
    assert largest_nodes({0, 1, 2, 3, 4, 5, 6}, 7) == [(0, 7)]
    assert largest_nodes({4, 5, 6}, 7) == [(4, 7)]
    assert largest_nodes({1, 2, 3, 4}, 7) == [(1, 2), (2, 4), (4, 5)]
    assert largest_nodes(set(), 7) == []
