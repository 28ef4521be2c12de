"""Which parts of the slots' memory are in use, and by whom.

A slot holds the outputs of one shard, or a result. It is held while a worker may
still write to it (a late or dying worker included) and while the user still has an
array that lies in it, and is used again only after that.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np

from instep._memory import Block
from instep._program import Array
from instep._reduction import Rows


class Slots:
    """Hands out slots of equal size by their byte offset."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._nbytes = 0
        self._base = 0  # what lies below has another size and is not used again
        self._end = 0
        self._free: list[int] = []  # a heap
        self._holders: dict[int, int] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}

    @property
    def end(self) -> int:
        """The bytes of the block that are in use or free; readers map this much."""
        return self._end

    def resize(self, nbytes: int) -> None:
        """Slots have this size from now on; those still held stay where they are."""
        self._take_back()
        if nbytes != self._nbytes:
            self._base = self._end = max(map(self._stop, self._in_use()), default=0)
            self._nbytes = nbytes
            self._free.clear()

    def take(self) -> int:
        """The offset of a slot that nobody uses; the caller holds it."""
        if not self._free:
            self._take_back()
        if not self._free:
            heappush(self._free, self._end)
            self._end += self._nbytes
            self._block.at_least(self._end)  # no room is said here, not in a worker
        # The lowest: a worker meets its slot again, and slots that were needed once
        # are not touched any more.
        offset = heappop(self._free)
        self._holders[offset] = 1
        return offset

    def hold(self, offset: int) -> None:
        """One more holder, who has to give it back as well."""
        self._holders[offset] += 1

    def give(self, offset: int) -> None:
        """One holder less; the last one frees the slot."""
        self._holders[offset] -= 1
        if not self._holders[offset]:
            del self._holders[offset]
            self._release(offset)

    def lend(self, offset: int) -> Array:
        """The slot as a uint8 vector; it stays in use while any view of it lives."""
        array = self.array(offset)
        self._lent[offset] = weakref.ref(array)
        self.give(offset)  # a worker that is being killed may still hold it
        return array

    def array(self, offset: int) -> Array:
        """The slot as a uint8 vector."""
        return np.frombuffer(
            self._block.at_least(self._end), np.uint8, self._nbytes, offset
        )

    def rows(self, offsets: list[int]) -> Rows:
        """The slots at these offsets, as rows to combine."""
        return rows_at(self._block.at_least(self._end), offsets, self._nbytes)

    def _take_back(self) -> None:
        for offset in [o for o, array in self._lent.items() if array() is None]:
            del self._lent[offset]
            self._release(offset)

    def _release(self, offset: int) -> None:
        is_used = offset in self._holders or offset in self._lent
        if offset >= self._base and not is_used:
            heappush(self._free, offset)

    def _in_use(self) -> Iterator[int]:
        return itertools.chain(self._holders, self._lent)

    def _stop(self, offset: int) -> int:
        """Where a slot ends, or that it ends below the base: its size is forgotten."""
        return max(self._base, offset + self._nbytes)


def rows_at(memory: memoryview, offsets: Sequence[int], nbytes: int) -> Rows:
    """Vectors of `nbytes` at these offsets; one matrix where they are evenly spaced."""
    steps = {b - a for a, b in itertools.pairwise(offsets)} or {nbytes}
    if len(steps) > 1 or min(steps) < 0:
        return [np.frombuffer(memory, np.uint8, nbytes, start) for start in offsets]
    shape, strides = (len(offsets), nbytes), (steps.pop(), 1)
    return np.ndarray(shape, np.uint8, memory, offsets[0], strides)
