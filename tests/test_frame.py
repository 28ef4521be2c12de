"""What is written to memory is read back as it was given, and aligned."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import scipy.sparse

import instep
from helpers import bits
from instep._frame import ALIGNMENT, FrameReader, FrameWriter
from instep._sharding import Splitter
from instep.engines.serial import PrivateMemory
from losses import Position


class Channel:
    """A writer and a reader of the same memory."""

    def __init__(self, shards=2):
        self.memory = PrivateMemory()
        self.writer, self.reader = FrameWriter(self.memory), FrameReader()
        self.splitter, self.shards = Splitter(shards), shards

    def send(self, *batch, extra=None):
        """The reference to the frame, and what every shard reads."""
        parts = self.splitter.split(batch)
        ref = self.writer.write(parts, extra)
        buffer = self.memory.at_least(0)
        shards = range(len(parts.plan.bounds))
        return ref, [self.reader.read(buffer, ref, shard)[0] for shard in shards]


def test_shards_read_their_rows():
    _, (first, second) = Channel().send(np.arange(5.0), {"t": list("abcde")})
    assert first[0].tolist() == [0.0, 1.0, 2.0]
    assert second[0].tolist() == [3.0, 4.0]
    assert [first[1], second[1]] == [{"t": ["a", "b", "c"]}, {"t": ["d", "e"]}]


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        7,
        True,
        1 + 2j,
        2**70,
        "text",
        np.float32(0.1),
        np.int8(-3),
        np.bool_(True),
        np.datetime64("2024-02-29"),
        np.str_("text"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_number_is_read_as_the_type_it_has(value):
    _, shards = Channel().send(np.zeros(2), value)
    for shard in shards:
        assert shard[1] == value
        assert type(shard[1]) is type(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(4, 6)[:, ::2],
        np.asfortranarray(np.arange(12.0).reshape(4, 3)),
        np.arange(4, dtype=">f8"),
        np.array([["a", "bc"]] * 4),
        np.array([(1, 2.0)] * 4, [("a", "i4"), ("b", "f8")]),
        np.arange(4).astype("datetime64[s]"),
        np.arange(8.0)[::-2],
        np.zeros((4, 0)),
    ],
    ids=lambda array: str(array.dtype),
)
def test_an_array_is_read_with_its_dtype_shape_and_values(array):
    _, (first, second) = Channel().send(array)
    assert bits([first[0], second[0]]) == bits([array[:2], array[2:]])


def test_rows_of_any_other_kind_are_read_as_they_are():
    matrix = scipy.sparse.csr_array(np.diag([1.0, 2, 3, 4]))
    objects = np.array([{"a": 1}, None, "x", 2.0], object)
    masked = np.ma.masked_array([1.0, 2, 3, 4], [0, 0, 0, 1])
    _, shards = Channel().send(matrix, objects, masked)
    assert [shard[0].toarray().sum() for shard in shards] == [3.0, 7.0]
    assert [list(shard[1]) for shard in shards] == [[{"a": 1}, None], ["x", 2.0]]
    assert [shard[2].sum() for shard in shards] == [3.0, 3.0]


def test_every_array_begins_at_a_multiple_of_the_alignment():
    batch = [np.arange(7.0), np.arange(7, dtype=np.int8), np.zeros((7, 3), np.float32)]
    _, shards = Channel(shards=3).send(batch)
    for array in (leaf for shard in shards for leaf in shard[0]):
        assert array.ctypes.data % ALIGNMENT == 0


def test_arrays_are_read_only():
    _, (first, _) = Channel().send(np.zeros(4), np.zeros(()))
    for array in first:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1.0


def test_the_header_is_written_again_only_when_the_form_changes():
    channel = Channel()
    x = np.arange(4.0)
    first, _ = channel.send(x, 0.1)
    second, shards = channel.send(2 * x, 0.2)
    assert second == first
    assert shards[0] == (pytest.approx([0.0, 2.0]), 0.2)
    third, shards = channel.send(x, 1)
    assert third != first
    assert shards[0][1] == 1
    assert type(shards[0][1]) is int


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.str_("ab"), np.str_("abc")),
        (np.datetime64("2024"), np.datetime64("2024-02-29")),
        ("ab", "abc"),
        (1, 2**70),
        (np.zeros(2), np.zeros(2, int)),
        (np.zeros(2), np.zeros((2, 1))),
        (["a", "b"], ["c", "d"]),
        (["a", "b"], [1, 2]),
        ((1.0, 2.0), [1.0, 2.0]),
        ({"a": 1.0}, {"b": 1.0}),
        (Position(1.0, 2.0), (1.0, 2.0)),
        (None, 1.0),
        (0.1, np.array(0.1)),
        (np.zeros(2), np.ma.masked_array([1.0, 2.0], [1, 0])),
    ],
)
def test_a_value_of_another_form_is_read_as_it_is(first, second):
    channel = Channel()
    for value in (first, second, first):
        shards = channel.send(np.zeros(2), value)[1]
        alone = Channel().send(np.zeros(2), value)[1]
        assert repr(shards) == repr(alone)
    assert repr(channel.send(np.zeros(2), first)) != repr(
        channel.send(np.zeros(2), second)
    )


def test_frames_of_growing_size_are_read():
    channel = Channel()
    for size in (1, 1000, 10, 100_000):
        _, shards = channel.send(np.full((2, size), float(size)))
        assert [shard[0].sum() for shard in shards] == [size**2] * 2


class FullMemory(PrivateMemory):
    """Has no room for more than a page."""

    def at_least(self, nbytes):
        if nbytes > 4096:
            raise MemoryError(f"no room for {nbytes} bytes")
        return super().at_least(nbytes)


def test_a_frame_without_room_does_not_spoil_the_next():
    channel = Channel()
    channel.memory = FullMemory()
    channel.writer = FrameWriter(channel.memory)
    for _ in range(2):
        assert channel.send(np.arange(4.0))[1][1][0].tolist() == [2.0, 3.0]
        with pytest.raises(MemoryError):
            channel.send(np.zeros(10_000))


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(instep.ShipError, match=r"batch\[1\]\['f'\] cannot be sent"):
        Channel().send(np.zeros(2), {"f": [threading.Lock()] * 2, "g": "text"})
