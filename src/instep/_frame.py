"""A tree of arrays in a block of shared memory, written once and read as views.

    | where, how long | pad | arrays ... | header: structure, dtypes, offsets, pickled |

Every array of every shard starts on a 64-byte boundary. Some BLAS kernels give
other bits for other alignments, so the alignment must not depend on who computes.
The header is written, sent and parsed again only when it changes.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cloudpickle
import numpy as np

from instep._program import Array
from instep._sharding import Batch, Bounds, Kind, Plan, slice_items
from instep._ship import ship_values
from instep._tree import Structure, leaf_names, unflatten

ALIGNMENT = 64
_HEADER = struct.Struct("<QQ")  # where it begins, how long it is
_PLAIN = (bool, int, float, complex)


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Memory(Protocol):
    """A block that can grow; the buffer it returns stays good for reading."""

    def at_least(self, nbytes: int) -> memoryview:
        """The block's bytes, `nbytes` of them or more."""


@dataclass(frozen=True, slots=True)
class _ArrayEntry:
    """Where an array lies: one place, or one per shard."""

    dtype: np.dtype[Any]
    places: tuple[tuple[int, tuple[int, ...]], ...]
    python: type | None  # Python number to read it as: 0.1 must not become a float64


@dataclass(frozen=True, slots=True)
class _ObjectEntry:
    """The index of a value that is in the header itself."""

    index: int
    sliced: bool


_Entry = _ArrayEntry | _ObjectEntry


@dataclass(frozen=True, slots=True)
class _Header:
    structure: Structure
    bounds: Bounds
    entries: tuple[_Entry, ...]
    objects: list[Any]
    extra: Any


RESIDENT = -1


class FrameRef(NamedTuple):
    """What a reader has to know of a frame.

    Attributes:
        header_id: of its header; equal for frames that differ in values alone.
        nbytes: its length.
        base: where it begins in the block of kept frames; RESIDENT: it is the one that
            every call overwrites.
    """

    header_id: int
    nbytes: int
    base: int = RESIDENT


class HeaderIds:
    """Numbers headers; equal ones, one after the other, have the same number."""

    def __init__(self) -> None:
        self._header: Any = None
        self._number = 0

    def of(self, header: Any) -> int:
        """The number of the header made from these values."""
        if header != self._header:
            self._header = header
            self._number += 1
        return self._number


class FrameWriter:
    """Writes one tree after the other into the same memory."""

    def __init__(self, memory: Memory, ids: HeaderIds | None = None) -> None:
        self._memory = memory
        self._written: Any = None  # what the header was made from
        self._ids = ids or HeaderIds()
        self._header_id = 0
        self._nbytes = 0
        self._buffer = memory.at_least(0)
        self._targets: list[tuple[Array, int, int, int]] = []

    def write(self, batch: Batch, extra: Any = None) -> FrameRef:
        """Copies the leaves into memory; `extra` travels in the header."""
        objects = _pickled_objects(batch) if batch.plan.has_objects else _NO_OBJECTS
        if self._written != (batch.plan, extra, objects):
            self._written = None  # should this be interrupted half-way
            self._layout(batch, objects, extra)
            self._written = batch.plan, extra, objects
        for target, leaf, start, stop in self._targets:
            source = batch.leaves[leaf]
            if source is not target:
                np.copyto(target, source if stop < 0 else source[start:stop])
        return FrameRef(self._header_id, self._nbytes)

    def resident(self) -> list[Array]:
        """The places of the whole leaves of the last tree, in its order.

        An array that is written as one of these is there already, and not copied.
        The places stay while the arrays of the tree keep their form.
        """
        return [target for target, _, _, stop in self._targets if stop < 0]

    def _layout(self, batch: Batch, objects: bytes, extra: Any) -> None:
        plan = batch.plan
        entries, end = _entries(batch)
        header = _Header(
            plan.structure, plan.bounds, entries, pickle.loads(objects), extra
        )
        text = cloudpickle.dumps(header)
        self._nbytes = end + len(text)
        self._buffer = self._memory.at_least(self._nbytes)
        self._buffer[: _HEADER.size] = _HEADER.pack(end, len(text))
        self._buffer[end : self._nbytes] = text
        self._targets = list(_targets(self._buffer, entries, plan.bounds))
        self._header_id = self._ids.of((plan, extra, objects))


class FrameReader:
    """Reads the tree of one shard, as views of the memory."""

    def __init__(self) -> None:
        self._header_id = 0
        self._header: _Header | None = None
        # Of each frame (by its base) and shard.
        self._places: dict[tuple[int, int], list[Array | None]] = {}
        self._memory: Any = None  # where they lie; grown, it may be another
        self.has_numbers = False  # the last tree had some: copies, not views

    def read(self, buffer: memoryview, ref: FrameRef, shard: int) -> tuple[Any, Any]:
        """The tree of this shard and the frame's `extra`. The views are read-only."""
        header = self._current(buffer, ref)
        key = ref.base, shard
        places = self._places.get(key)
        if places is None:
            places = [_place(buffer, entry, shard) for entry in header.entries]
            self._places[key] = places
        pairs = zip(header.entries, places, strict=True)
        leaves = [_leaf(entry, place, header, shard) for entry, place in pairs]
        return unflatten(header.structure, leaves), header.extra

    def extra(self, buffer: memoryview, ref: FrameRef) -> Any:
        """The frame's `extra`."""
        return self._current(buffer, ref).extra

    def _current(self, buffer: memoryview, ref: FrameRef) -> _Header:
        if self._memory is not buffer.obj:
            self._memory = buffer.obj
            self._places.clear()
        if self._header is None or ref.header_id != self._header_id:
            start, length = _HEADER.unpack(buffer[: _HEADER.size])
            header: _Header = pickle.loads(buffer[start : start + length])
            arrays = [e for e in header.entries if isinstance(e, _ArrayEntry)]
            self.has_numbers = any(entry.python for entry in arrays)
            self._header, self._header_id = header, ref.header_id
            self._places.clear()
        assert self._header is not None
        return self._header


def _place(buffer: memoryview, entry: _Entry, shard: int) -> Array | None:
    """Where a shard's part of an array lies, read-only."""
    if isinstance(entry, _ObjectEntry):
        return None
    offset, shape = entry.places[shard if len(entry.places) > 1 else 0]
    view = np.ndarray(shape, entry.dtype, buffer, offset)
    view.flags.writeable = False
    return view


def _leaf(entry: _Entry, place: Array | None, header: _Header, shard: int) -> Any:
    if isinstance(entry, _ArrayEntry):
        assert place is not None
        # Never the same array twice: a loss that remembers results by the identity of
        # its input must not be fooled.
        return _as_given(place.view(), entry.python)
    value = header.objects[entry.index]
    return slice_items(value, *header.bounds[shard]) if entry.sliced else value


def _as_given(view: Array, python: type | None) -> Any:
    if python is None:
        return view
    return view[()] if python is np.generic else python(view[()])


_NO_OBJECTS = pickle.dumps([])


_OBJECT_KINDS = (Kind.ITEMS, Kind.OBJECT)


def _pickled_objects(batch: Batch) -> bytes:
    pairs = zip(batch.leaves, batch.plan.kinds, strict=True)
    held = [leaf for leaf, kind in pairs if kind in _OBJECT_KINDS]
    return ship_values(held, lambda: _object_names(batch.plan))


def _object_names(plan: Plan) -> list[str]:
    names = leaf_names(plan.structure, "batch")
    pairs = zip(names, plan.kinds, strict=True)
    return [name for name, kind in pairs if kind in _OBJECT_KINDS]


def _entries(batch: Batch) -> tuple[tuple[_Entry, ...], int]:
    """One entry per leaf, and where the arrays end."""
    entries: list[_Entry] = []
    end, index = ALIGNMENT, 0
    for leaf, kind in zip(batch.leaves, batch.plan.kinds, strict=True):
        if kind in _OBJECT_KINDS:
            entries.append(_ObjectEntry(index, sliced=kind is Kind.ITEMS))
            index += 1
            continue
        entry, end = _array_entry(leaf, kind, batch.plan.bounds, end)
        entries.append(entry)
    return tuple(entries), end


def _array_entry(
    leaf: Any, kind: Kind, bounds: Bounds, offset: int
) -> tuple[_ArrayEntry, int]:
    array = np.asarray(leaf)
    shapes = [array.shape]
    if kind is Kind.ROWS:
        shapes = [(stop - start, *array.shape[1:]) for start, stop in bounds]
    places = []
    for shape in shapes:
        places.append((offset, shape))
        offset += aligned(array.itemsize * int(np.prod(shape, dtype=np.int64)))
    return _ArrayEntry(array.dtype, tuple(places), _python_type(leaf, kind)), offset


def _python_type(leaf: Any, kind: Kind) -> type | None:
    if kind is not Kind.SCALAR:
        return None
    return type(leaf) if type(leaf) in _PLAIN else np.generic


def _targets(buffer: memoryview, entries: tuple[_Entry, ...], bounds: Bounds) -> Any:
    """(view to copy into, leaf, first row, last row); last row -1 for whole leaves."""
    for leaf, entry in enumerate(entries):
        if isinstance(entry, _ObjectEntry):
            continue
        is_split = len(entry.places) > 1
        rows = bounds if is_split else ((0, -1),)
        for (offset, shape), (first, last) in zip(entry.places, rows, strict=True):
            view = np.ndarray(shape, entry.dtype, buffer, offset)
            yield view, leaf, first, last
