"""Frames that stay as they are until they are given back.

A call overwrites the frames of the one before it. Where several versions of the
parameters and several batches are in use at once, each lies in a region of its own, and
a worker that reads one never sees it change.
"""

from __future__ import annotations

from typing import Any

from instep._frame import FrameRef, FrameWriter, HeaderIds, aligned
from instep._memory import Block
from instep._program import Array
from instep._sharding import Batch


class Shelf:
    """Regions of one block, each with room for a frame."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._end = 0
        self._ids = HeaderIds()
        self._free: list[_Region] = []
        self._used: dict[int, _Region] = {}  # by base
        self._kept = 0

    def keep(self, batch: Batch, extra: Any = None) -> FrameRef:
        """Copies a tree into a region that nobody uses.

        Raises:
            MemoryError: there is no room.
        """
        region = self._free.pop() if self._free else _Region(self, self._ids)
        ref = region.writer.write(batch, extra)
        self._used[region.base] = region
        self._kept += 1
        region.version = self._kept
        return ref._replace(base=region.base)

    def arrays(self, ref: FrameRef) -> list[Array]:
        """The leaves of a kept tree that are arrays, where they lie."""
        return self._used[ref.base].writer.resident()

    def version(self, ref: FrameRef) -> int:
        """A number that no other frame has that was kept here."""
        return self._used[ref.base].version

    def release(self, ref: FrameRef) -> None:
        """Nobody reads this frame any more."""
        self._free.append(self._used.pop(ref.base))

    def clear(self) -> None:
        """Nobody reads any frame any more."""
        self._free.extend(self._used.values())
        self._used.clear()

    def view(self, ref: FrameRef) -> memoryview:
        """The bytes of a kept frame."""
        return self.region(ref.base, ref.nbytes)

    def region(self, base: int, nbytes: int) -> memoryview:
        """So many bytes of the block from here on."""
        return self._block.at_least(base + nbytes)[base : base + nbytes]

    def allot(self, nbytes: int) -> int:
        """Where so many bytes begin that nobody has had."""
        base, self._end = self._end, self._end + aligned(nbytes)
        return base


class _Region:
    """Room for one frame; where it gets too small it moves."""

    def __init__(self, shelf: Shelf, ids: HeaderIds) -> None:
        self._shelf = shelf
        self._nbytes = 0
        self.base = self.version = 0
        self.writer = FrameWriter(self, ids)

    def at_least(self, nbytes: int) -> memoryview:
        """All bytes of the region."""
        if nbytes > self._nbytes:
            # A half more than before, so that batches of ever other lengths do not
            # leave a hole each.
            self._nbytes = aligned(max(nbytes, self._nbytes * 3 // 2))
            self.base = self._shelf.allot(self._nbytes)
        return self._shelf.region(self.base, self._nbytes)
