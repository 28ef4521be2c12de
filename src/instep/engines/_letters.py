"""Letters between the ranks of an MPI job: a pickled text and bytes, of any length.

    head: how long both are, and the text's beginning | rest of the text | bytes

Nothing blocks while sending, and bytes go from where they lie to where the receiver
wants them. MPI counts in 32 bits, and some networks have lower limits: what is longer
than a message may be goes in several.
"""

from __future__ import annotations

import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from instep._program import Array

_HEAD = struct.Struct("<QQ")
_HEAD_TAG, _REST_TAG, _BEAT_TAG = 71, 72, 73
# The longest message, in bytes.
_LIMIT = int(os.environ.get("INSTEP_MPI_MESSAGE_BYTES", 1 << 30))

# Looks at what is on its way before the first pause: the most is there by then.
_LOOKS = 50

# Where the bytes of a letter go: (text, how many) -> memory.
Room = Callable[[Any, int], memoryview]


class Letter(NamedTuple):
    """What a rank has received."""

    text: Any
    content: memoryview | None


class Letters:
    """Sends and receives them; one for each process.

    Args:
        mpi: the module `mpi4py.MPI`.

    Attributes:
        meanwhile: called again and again while the rest of a letter is on its way.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi, self._comm = mpi, mpi.COMM_WORLD
        self._under_way: list[tuple[Any, Any]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def post(self, to: int, text: Any, content: Array | None = None) -> None:
        """Sends a letter; the bytes must stay as they are until `flush`."""
        pickled = pickle.dumps(text, protocol=5)
        nbytes = 0 if content is None else content.nbytes
        room = _LIMIT - _HEAD.size
        self._send(to, _HEAD.pack(len(pickled), nbytes) + pickled[:room], _HEAD_TAG)
        for part in _pieces(memoryview(pickled)[room:]):
            self._send(to, part, _REST_TAG)
        if content is not None:
            for part in _pieces(content.view(np.uint8).reshape(-1).data):
                self._send(to, part, _REST_TAG)

    def receive(self, room: Room) -> Letter | None:
        """The next letter; None: there is none."""
        status = self._mpi.Status()
        if not self._comm.Iprobe(tag=_HEAD_TAG, status=status):
            return None
        sender = status.Get_source()
        head = bytearray(status.Get_count(self._mpi.BYTE))
        self._comm.Recv([head, self._mpi.BYTE], sender, _HEAD_TAG)
        length, nbytes = _HEAD.unpack_from(head)
        rest = memoryview(bytearray(length - len(head) + _HEAD.size))
        self._fill(rest, sender)
        text = pickle.loads(bytes(head[_HEAD.size :]) + bytes(rest))
        if not nbytes:
            return Letter(text, None)
        content = room(text, nbytes)
        self._fill(content, sender)
        return Letter(text, content)

    def beat(self, to: int) -> None:
        """Tells a rank that this one is there."""
        self._send(to, b"", _BEAT_TAG)

    def beats(self) -> list[int]:
        """Ranks that have said that they are there."""
        found, status = [], self._mpi.Status()
        while self._comm.Iprobe(tag=_BEAT_TAG, status=status):
            found.append(status.Get_source())
            self._comm.Recv([bytearray(0), self._mpi.BYTE], found[-1], _BEAT_TAG)
        return found

    def flush(self, watch: Callable[[], None] = lambda: None) -> None:
        """Waits until all letters have left; `watch` is called meanwhile."""
        while self.is_sending():
            watch()
            time.sleep(Pause.SHORTEST_S)

    def is_sending(self) -> bool:
        """Whether letters are leaving: MPI sends only while it is looked after."""
        self._under_way = [pair for pair in self._under_way if not pair[0].Test()]
        return bool(self._under_way)

    def rest(self, pause: Pause) -> None:
        """Pauses, for a moment only while letters are leaving."""
        if self.is_sending():
            pause.reset()
        pause.sleep()

    def _send(self, to: int, part: Any, tag: int) -> None:
        request = self._comm.Isend([part, self._mpi.BYTE], to, tag)
        if not request.Test():
            self._under_way.append((request, part))

    def _fill(self, memory: memoryview, sender: int) -> None:
        for part in _pieces(memory):
            request = self._comm.Irecv([part, self._mpi.BYTE], sender, _REST_TAG)
            while not any(request.Test() for _ in range(_LOOKS)):
                self.meanwhile()
                time.sleep(Pause.SHORTEST_S)


class Pause:
    """How long to sleep between two looks: a small part of how long it has been quiet.

    So a message waits a small part of the time that it took to come, and a process that
    waits for long takes no core from those that compute.
    """

    SHORTEST_S, LONGEST_S = 2e-5, 1e-3

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Something has happened."""
        self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long the next one is."""
        quiet = time.perf_counter() - self._since
        return min(self.LONGEST_S, max(self.SHORTEST_S, quiet / 20))

    def sleep(self) -> None:
        """Sleeps for so long."""
        time.sleep(self.seconds)


def _pieces(memory: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(memory), _LIMIT):
        yield memory[start : start + _LIMIT]
