"""A batch is cut into contiguous shards, whatever it is made of."""

from __future__ import annotations

import enum

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

import instep
from instep._sharding import Kind, Splitter, shard_bounds, slice_items
from losses import Pair, Position


def split(*batch, shards=2, splits=None):
    return Splitter(shards).split(batch, splits)


@given(st.integers(1, 300), st.integers(1, 20))
def test_shards_have_the_sizes_of_array_split(rows, shards):
    sizes = [len(part) for part in np.array_split(np.zeros(rows), shards)]
    bounds = shard_bounds(rows, shards)
    assert [stop - start for start, stop in bounds] == [s for s in sizes if s]
    assert [row for bound in bounds for row in range(*bound)] == list(range(rows))


def test_fifty_rows_in_three_shards_are_17_17_16():
    assert split(np.zeros(50), shards=3).plan.bounds == ((0, 17), (17, 34), (34, 50))


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (np.zeros((4, 2)), Kind.ROWS),
        (np.array(["a", "b", "c", "d"]), Kind.ROWS),
        (np.zeros(4, "datetime64[D]"), Kind.ROWS),
        (np.array(1.0), Kind.WHOLE),
        (0.1, Kind.SCALAR),
        (7, Kind.SCALAR),
        (True, Kind.SCALAR),
        (np.float32(0.1), Kind.SCALAR),
        (2**70, Kind.OBJECT),
        ("text", Kind.OBJECT),
        (b"bytes", Kind.OBJECT),
        (Colour.RED, Kind.OBJECT),
        (len, Kind.OBJECT),
        (["a", "b", "c", "d"], Kind.ITEMS),
        ([[1], [2, 3], [], [4]], Kind.ITEMS),
        ([1, 2, 3, 4], Kind.ITEMS),
        (np.array([{}, "a", None, 1], object), Kind.ITEMS),
        (scipy.sparse.csr_array(np.eye(4)), Kind.ITEMS),
        (np.ma.masked_array([1.0, 2, 3, 4], [0, 0, 0, 1]), Kind.ITEMS),
        (np.array([(1, {})] * 4, [("a", "i4"), ("b", object)]), Kind.ITEMS),
    ],
    ids=lambda value: "" if isinstance(value, Kind) else type(value).__name__,
)
def test_every_leaf_is_split_as_its_kind_says(leaf, kind):
    assert split(np.zeros(4), leaf).plan.kinds == (Kind.ROWS, kind)


def test_containers_are_fields_and_lists_without_arrays_are_rows():
    batch = split(
        {"a": np.zeros(3), "b": (np.zeros((3, 2)), None)},
        Position(np.zeros(3), [1, 2, 3]),
        [np.zeros(3), np.zeros(3)],
    )
    kinds = [Kind.ROWS] * 3 + [Kind.ITEMS] + [Kind.ROWS] * 2
    assert batch.plan.kinds == tuple(kinds)
    assert batch.plan.rows == 3


def test_an_argument_may_go_whole_to_every_shard():
    table = np.zeros((7, 2))
    batch = split(np.zeros(4), {"table": table}, splits=[True, False])
    assert batch.plan.kinds == (Kind.ROWS, Kind.WHOLE)
    assert batch.plan.rows == 4


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((np.zeros(64), np.zeros(63)), r"batch\[1\] has 63 rows but batch\[0\] has 64"),
        (({"x": np.zeros(5), "t": ["a"] * 4},), r"batch\[0\]\['t'\] has 4 rows"),
        ((Pair(np.zeros(5), np.zeros((6, 1))),), r"batch\[0\]\.right has 6 rows"),
        ((np.zeros(0),), r"batch\[0\] has 0 rows"),
        ((np.zeros((0, 3)), []), r"batch\[0\] has 0 rows"),
        ((), "nothing to split"),
        ((1.0, "text"), "nothing to split"),
        ((np.zeros(3), {1, 2, 3}), r"batch\[1\] is a set"),
        ((np.zeros(3), iter("abc")), r"batch\[1\] is a str"),
    ],
)
def test_a_batch_that_cannot_be_split_is_an_error_that_names_the_field(batch, text):
    with pytest.raises(instep.BatchError, match=text):
        split(*batch)


def test_batches_of_one_form_share_their_plan():
    splitter = Splitter(2)
    first = splitter.split((np.zeros(4), 0.1))
    assert splitter.split((np.ones(4), 0.2)).plan is first.plan
    for other in [
        (np.zeros(5), 0.1),
        (np.zeros(4, np.float32), 0.1),
        (np.zeros(4), 1),
        (np.zeros(4), np.float64(0.1)),
        (np.zeros(4), {"rate": 0.1}),
    ]:
        assert splitter.split(other).plan is not splitter.split((np.zeros(4), 0.1)).plan


def test_a_failed_split_does_not_spoil_the_next():
    splitter = Splitter(2)
    good = np.zeros(4)
    splitter.split((good,))
    with pytest.raises(instep.BatchError):
        splitter.split((good, np.zeros(3)))
    assert splitter.split((good,)).plan.bounds == ((0, 2), (2, 4))


def test_rows_that_are_not_an_array_are_sliced():
    assert slice_items(["a", "b", "c"], 1, 3) == ["b", "c"]
    assert slice_items(scipy.sparse.csr_array(np.eye(4)), 1, 3).shape == (2, 4)
