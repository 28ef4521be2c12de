"""Ways for a process to end or hang, for losses: workers import this module."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any, NoReturn

import numpy as np

from losses import wide


def killed() -> None:
    """Ends as by the system, when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def segfaults() -> None:
    """Ends as by an error in a library."""
    ctypes.string_at(0)


def exits() -> NoReturn:
    """Ends without a word to Python."""
    os._exit(3)


def killed_while_allocating() -> None:
    """Takes memory until the system has enough of it."""
    hoard = [np.ones(1 << 18) for _ in range(8)]
    killed()
    hoard.clear()


def stops() -> None:
    """Is there and does nothing."""
    os.kill(os.getpid(), signal.SIGSTOP)


def loops() -> NoReturn:
    """Never comes back."""
    while True:
        pass


WAYS = {way.__name__: way for way in (killed, segfaults, exits)}
WAYS[killed_while_allocating.__name__] = killed_while_allocating
HANGS = {way.__name__: way for way in (stops, loops)}


def mark(folder: Any, number: int) -> str:
    """Has this many processes come across a fault; what a loss gives to `is_doomed`."""
    for k in range(number):
        (folder / f"doomed {k}").touch()
    return str(folder)


def is_doomed(folder: str) -> bool:
    """Whether this process took one of the marks; returns when all are taken."""
    for name in _marks(folder):
        try:
            os.unlink(os.path.join(folder, name))
        except FileNotFoundError:
            continue  # another process was faster
        while _marks(folder):
            time.sleep(0.001)
        return True
    return False


def _marks(folder: str) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith("doomed")]


def fragile(w: Any, x: Any, folder: str, way: str) -> Any:
    """`wide`, but processes that take a mark end in this way."""
    if is_doomed(folder):
        {**WAYS, **HANGS}[way]()
    return wide(w, x)


# A worker is made to end at a certain moment by changing what it runs there.


def end_when_taking_a_command() -> None:
    """Nothing of the shard is done."""
    from instep._worker import Command

    Command.unpack = _end


def end_while_writing_the_slot() -> None:
    """Half of a gradient is there, and the other half is of an earlier shard."""
    from instep import _shard

    def store(layout: Any, values: Any, views: Any, present: Any) -> None:
        present[:] = 1
        views[0][: len(views[0]) // 2] = -1.0
        killed()

    _shard.store = store


def end_before_answering() -> None:
    """All is there and nobody knows."""
    from instep import _worker

    _worker.Report = _end


def end_while_preparing_the_next_step() -> None:
    """The answer is on its way."""
    from instep import _shard

    _shard.seed_python = _end


def end_while_averaging() -> None:
    """Half of a part of the average is there."""
    from instep import _worker

    def reduce_slots(
        slots: Any, weights: Any, layout: Any, out: Any, part: tuple[int, int]
    ) -> None:
        out[part[0] : sum(part) // 2] = 255
        killed()

    _worker.reduce_slots = reduce_slots


def interrupt_while_averaging(master: int) -> None:
    """Ctrl-C in the master, and no part of the average comes."""
    from instep import _worker

    def reduce_slots(*arguments: Any) -> None:
        os.kill(master, signal.SIGINT)
        stops()

    _worker.reduce_slots = reduce_slots


MOMENTS = {
    name.removeprefix("end_"): value
    for name, value in list(vars().items())
    if name.startswith("end_")
}


def _end(*arguments: Any, **keywords: Any) -> Any:
    killed()


def fragile_at(w: Any, x: Any, folder: str, moment: str) -> Any:
    """`wide`, but processes that take a mark end at this moment, after the loss."""
    if is_doomed(folder):
        MOMENTS[moment]()
    return wide(w, x)


class EndsItsReader:
    """One row of a batch: a worker that takes a mark ends when it unpickles it."""

    def __init__(self, folder: str) -> None:
        self.master, self.folder = os.getpid(), folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.master and is_doomed(self.folder):
            killed()


class EndsWhenItArrives:
    """A loss: a worker that takes a mark ends when it unpickles it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if is_doomed(self.folder):
            killed()

    def __call__(self, w: Any, x: Any) -> Any:
        return wide(w, x)
