"""A tree of arrays in a block of shared memory, written once and read as views.

    | length | header: structure, dtypes, offsets (pickled) | pad | arrays ... |

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
_LENGTH = struct.Struct("<Q")
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


class FrameRef(NamedTuple):
    """What a reader has to know of a frame: which header, and how many bytes."""

    header_id: int
    nbytes: int


class FrameWriter:
    """Writes one tree after the other into the same memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._written: Any = None  # what the header was made from
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
            np.copyto(target, source if stop < 0 else source[start:stop])
        return FrameRef(self._header_id, self._nbytes)

    def _layout(self, batch: Batch, objects: bytes, extra: Any) -> None:
        entries, size = _entries(batch)
        plan = batch.plan
        header = _Header(
            plan.structure, plan.bounds, entries, pickle.loads(objects), extra
        )
        text = cloudpickle.dumps(header)
        start = aligned(_LENGTH.size + len(text))
        self._nbytes = start + size
        self._buffer = self._memory.at_least(self._nbytes)
        self._buffer[: _LENGTH.size] = _LENGTH.pack(len(text))
        self._buffer[_LENGTH.size : _LENGTH.size + len(text)] = text
        self._targets = list(_targets(self._buffer, start, entries, plan.bounds))
        self._header_id += 1


class FrameReader:
    """Reads the tree of one shard, as views of the memory."""

    def __init__(self) -> None:
        self._header_id = 0
        self._header: _Header | None = None
        self._start = 0

    @property
    def has_numbers(self) -> bool:
        """Whether the last tree had numbers: copies, where all else are views."""
        entries = self._header.entries if self._header else ()
        return any(isinstance(e, _ArrayEntry) and e.python for e in entries)

    def read(self, buffer: memoryview, ref: FrameRef, shard: int) -> tuple[Any, Any]:
        """The tree of this shard and the frame's `extra`. The views are read-only."""
        header = self._current(buffer, ref)
        leaves = [self._leaf(buffer, entry, header, shard) for entry in header.entries]
        return unflatten(header.structure, leaves), header.extra

    def _current(self, buffer: memoryview, ref: FrameRef) -> _Header:
        if self._header is None or ref.header_id != self._header_id:
            (length,) = _LENGTH.unpack(buffer[: _LENGTH.size])
            text = buffer[_LENGTH.size : _LENGTH.size + length]
            self._header, self._header_id = pickle.loads(text), ref.header_id
            self._start = aligned(_LENGTH.size + length)
        assert self._header is not None
        return self._header

    def _leaf(
        self, buffer: memoryview, entry: _Entry, header: _Header, shard: int
    ) -> Any:
        if isinstance(entry, _ObjectEntry):
            value = header.objects[entry.index]
            return slice_items(value, *header.bounds[shard]) if entry.sliced else value
        offset, shape = entry.places[shard if len(entry.places) > 1 else 0]
        view = np.ndarray(shape, entry.dtype, buffer, self._start + offset)
        view.flags.writeable = False
        return _as_given(view, entry.python)


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
    """One entry per leaf, and how many bytes the arrays take together."""
    entries: list[_Entry] = []
    size = index = 0
    for leaf, kind in zip(batch.leaves, batch.plan.kinds, strict=True):
        if kind in _OBJECT_KINDS:
            entries.append(_ObjectEntry(index, sliced=kind is Kind.ITEMS))
            index += 1
            continue
        entry, size = _array_entry(leaf, kind, batch.plan.bounds, size)
        entries.append(entry)
    return tuple(entries), size


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


def _targets(
    buffer: memoryview, start: int, entries: tuple[_Entry, ...], bounds: Bounds
) -> Any:
    """(view to copy into, leaf, first row, last row); last row -1 for whole leaves."""
    for leaf, entry in enumerate(entries):
        if isinstance(entry, _ObjectEntry):
            continue
        is_split = len(entry.places) > 1
        rows = bounds if is_split else ((0, -1),)
        for (offset, shape), (first, last) in zip(entry.places, rows, strict=True):
            view = np.ndarray(shape, entry.dtype, buffer, start + offset)
            yield view, leaf, first, last
