"""A pool's happenings as a file of Chrome trace events, one lane per worker.

The file is an array of events, one a line, in the format that Perfetto and
chrome://tracing open. Viewers forgive a missing "]" at the end; other programs do not,
so every write puts one there and the next write goes over it. Therefore the file is
complete JSON at any moment, also if the process is killed, but for what happened in the
last quarter of a second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

from instep._closing import Closing
from instep._errors import ArgumentError
from instep._events import Computed, Events, Fault, Happening, Phase, Updated

# Happenings are written together, after so many seconds or so many of them.
PATIENCE_S = 0.25
LIMIT = 2000
_HEAD, _BETWEEN, _TAIL = b"[\n", b",\n", b"\n]\n"
_MASTER = 0  # its lane; that of worker w is w + 1


class Trace(Closing):
    """A file that is being written; made by `pool.trace`.

    Ends with `close`, at the end of its `with` block, or with the pool.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: str | os.PathLike[str], events: Events) -> None:
        self.path = os.fspath(path)
        self._events, self._owner = events, os.getpid()
        self._lock = threading.Lock()
        self._zero = self._written = perf_counter()
        self._pending: list[Happening] = []
        self._lanes: set[int] = set()
        self._start = f'{{"pid":{self._owner},"tid":%d,'
        self._file = _File(self.path, [_named("process_name", _MASTER, "instep")])
        events.watch(self)

    def note(self, happening: Happening) -> None:
        """Keeps it, to be written with others."""
        self._pending.append(happening)
        due = happening.end - self._written > PATIENCE_S
        if due or len(self._pending) >= LIMIT:
            self._flush()

    def close(self) -> None:
        """Writes the rest and ends the file. Calling it twice is fine."""
        if os.getpid() != self._owner:  # a fork: the file is its parent's
            return
        self._events.unwatch(self)
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        """Writes what is pending."""
        try:
            with self._lock:  # `close` may come from another thread
                pending, self._pending = self._pending, []
                self._written = perf_counter()
                lines = [line for one in pending for line in self._lines(one)]
                self._file.append(lines)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Without room for more the trace ends, and the steps go on."""
        self._file.close()
        self._events.unwatch(self)
        warnings.warn(
            f"the trace in {self.path} ends here: {error.strerror}. The pool goes on",
            RuntimeWarning,
            stacklevel=2,
        )

    def _lines(self, happening: Happening) -> list[str]:
        """Its line, after those which name its lane if it is the first there."""
        worker = happening.worker if isinstance(happening, Computed | Fault) else None
        lane = _MASTER if worker is None else worker + 1
        line = _LINES[type(happening)](happening, self._start % lane, self._zero)
        if lane in self._lanes:
            return [line]
        self._lanes.add(lane)
        name = "master" if worker is None else f"worker {worker}"
        order = _metadata("thread_sort_index", lane, {"sort_index": lane})
        return [_named("thread_name", lane, name), order, line]


class _File:
    """An array of JSON texts that is complete after every `append`."""

    def __init__(self, path: str, lines: list[str]) -> None:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file: int | None = os.open(path, flags, 0o666)
        except OSError as error:
            raise _cannot_write(path, error) from error
        self._end, self._between = 0, _HEAD
        try:
            self.append(lines)
        except OSError as error:
            self.close()
            raise _cannot_write(path, error) from error

    def append(self, lines: list[str]) -> None:
        """Writes lines over the end of the array, and the end behind them.

        Raises:
            OSError: they did not fit; the array is as it was.
        """
        if not lines or self._file is None:
            return
        text = self._between + ",\n".join(lines).encode() + _TAIL
        try:
            _write_all(self._file, text, self._end)
        except OSError:
            self._restore(self._file)
            raise
        self._end += len(text) - len(_TAIL)
        self._between = _BETWEEN

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _restore(self, file: int) -> None:
        if self._end:
            with contextlib.suppress(OSError):  # what was there before has room
                os.pwrite(file, _TAIL, self._end)
                os.ftruncate(file, self._end + len(_TAIL))


def _write_all(file: int, text: bytes, offset: int) -> None:
    """Writes all of it; a full disk may take a part before it says so."""
    written = 0
    while written < len(text):
        written += os.pwrite(file, text[written:], offset + written)


def _cannot_write(path: str, error: OSError) -> ArgumentError:
    return ArgumentError(
        f"cannot write a trace to {path!r}: {error.strerror}; expected the path of a "
        "file, in a folder that is there and may be written to"
    )


# Lines are put together by hand, which takes a fourth of the time that `json.dumps`
# does; the time is the step's. Names are ours and need no escapes. All take what has
# happened, the line's beginning, and the moment from which microseconds are counted.


def _phase(phase: Phase, start: str, zero: float) -> str:
    return f'{start}{_span(phase, zero)},"name":"{phase.name}"}}'


def _shard(shard: Computed, start: str, zero: float) -> str:
    _, step, number, shards, _, _, seconds, outcome = shard
    name = f"shard {number}" if shards > 1 else "batch"
    name += f" ({outcome})" if outcome else ""
    return (
        f'{start}{_span(shard, zero)},"name":"{name}","args":{{"step":{step},"shard":'
        f'{number},"shards":{shards},"compute_seconds":{seconds:.6f}}}}}'
    )


def _update(update: Updated, start: str, zero: float) -> str:
    step, loss, rows, staleness, worker, dropped, end = update
    number = loss if math.isfinite(loss) else f'"{loss}"'  # JSON has no NaN
    who = "null" if worker is None else worker
    return (
        f'{start}{_moment(end, zero)},"name":"update","args":{{"step":{step},"loss":'
        f'{number},"rows":{rows},"staleness":{staleness},"worker":{who},"dropped":'
        f"{dropped}}}}}"
    )


def _fault(fault: Fault, start: str, zero: float) -> str:
    facts = json.dumps({"reason": fault.reason})
    return f'{start}{_moment(fault.end, zero)},"name":"{fault.text}","args":{facts}}}'


_LINES: dict[type[Any], Callable[[Any, str, float], str]] = {
    Phase: _phase,
    Computed: _shard,
    Updated: _update,
    Fault: _fault,
}


def _span(one: Phase | Computed, zero: float) -> str:
    """Both ends are rounded, and not the length: slices must not overlap."""
    begin = max(0, int(1e6 * (one.begin - zero)))  # it may have begun before
    length = max(0, int(1e6 * (one.end - zero)) - begin)
    return f'"ph":"X","ts":{begin},"dur":{length}'


def _moment(moment: float, zero: float) -> str:
    return f'"ph":"i","s":"t","ts":{int(1e6 * (moment - zero))}'


def _named(what: str, lane: int, name: str) -> str:
    return _metadata(what, lane, {"name": name})


def _metadata(what: str, lane: int, facts: dict[str, Any]) -> str:
    event = {"pid": os.getpid(), "tid": lane, "ph": "M", "name": what, "args": facts}
    return json.dumps(event, separators=(",", ":"))
