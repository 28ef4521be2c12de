"""The messages between master, template and workers: fixed records of a few bytes.

Commands go down one pipe per worker. Everything that comes back (answers, and the
template's word that a worker has ended) goes up one pipe shared by all: a write of
less than PIPE_BUF bytes is never torn or mixed with another, and the master wakes
once for many answers.
"""

from __future__ import annotations

import enum
import functools
import struct
from typing import Any, NamedTuple

import numpy as np

from instep._frame import FrameRef
from instep._program import Task


class Op(enum.IntEnum):
    """What a command asks of a worker, or of the template."""

    COMPUTE = 1
    AVERAGE = 2
    START = 3
    KILL = 4


class Kind(enum.IntEnum):
    """What a report says."""

    READY = 1
    DONE = 2
    FAILED = 3
    AVERAGED = 4
    ENDED = 5


_COMMAND = struct.Struct("<BQqIIQQ?QQQqQQqQQQ")
COMMAND_NBYTES = _COMMAND.size
_REPORT = struct.Struct("<BIIQddQqB16s")
REPORT_NBYTES = _REPORT.size
_FORK = struct.Struct("<BII")
FORK_NBYTES = _FORK.size

# Losses travel as their 16 bytes and the place of their dtype in this list.
_LOSS_DTYPES = ("float64", "float32", "float16", "bfloat16", "longdouble")
_NO_LOSS = 255, b""


@functools.cache
def _code_of(dtype: np.dtype[Any]) -> int:
    return _LOSS_DTYPES.index(dtype.name.replace("float128", "longdouble"))


@functools.cache
def _dtype_of(code: int) -> np.dtype[Any]:
    return np.dtype(_LOSS_DTYPES[code])


class Command(NamedTuple):
    """Compute a shard, or average a part of the slots.

    To average, `plan` says how many bytes of a plan lie in the worker's outbox.
    """

    op: int
    number: int
    task: Task
    params: FrameRef
    batch: FrameRef
    slot: int
    slots_nbytes: int
    plan: int = 0

    def pack(self) -> bytes:
        """The command as bytes."""
        op, number, task, params, batch, *rest = self
        return _COMMAND.pack(op, number, *task, *params, *batch, *rest)

    @classmethod
    def unpack(cls, record: bytes) -> Command:
        """The command in these bytes."""
        fields = _COMMAND.unpack(record)
        op, number = fields[:2]
        task, params, batch = Task(*fields[2:9]), fields[9:12], fields[12:15]
        slot, slots_nbytes, plan = fields[15:]
        frames = FrameRef(*params), FrameRef(*batch)
        return cls(op, number, task, *frames, slot, slots_nbytes, plan)


_PLAN = struct.Struct("<3Q")


class Plan(NamedTuple):
    """Which part of which slots a worker combines.

    Attributes:
        result: where the slot of the average begins.
        start: first byte of the part.
        stop: the byte after its last.
        offsets: where the shards' slots begin.
        weights: of the shards.
    """

    result: int
    start: int
    stop: int
    offsets: tuple[int, ...]
    weights: tuple[float, ...]

    def pack(self) -> bytes:
        """The plan as bytes, more the more shards there are."""
        number = len(self.offsets)
        numbers = struct.pack(f"<{number}Q{number}d", *self.offsets, *self.weights)
        return _PLAN.pack(*self[:3]) + numbers

    @classmethod
    def unpack(cls, record: bytes) -> Plan:
        """The plan in these bytes."""
        number = (len(record) - _PLAN.size) // 16
        numbers = struct.unpack_from(f"<{number}Q{number}d", record, _PLAN.size)
        result, start, stop = _PLAN.unpack_from(record)
        return cls(result, start, stop, numbers[:number], numbers[number:])


class Report(NamedTuple):
    """One record of the shared pipe.

    Attributes:
        incarnation: which process with this worker's number it is; reports of one
            that was replaced are ignored.
        number: the command it answers.
        nbytes: length of the pickled aux or exception in the worker's outbox.
        status: how a process ended, as `os.waitstatus_to_exitcode` gives it; for
            READY its process id.
    """

    kind: int
    worker: int
    incarnation: int
    number: int = 0
    weight: float = 0.0
    seconds: float = 0.0
    nbytes: int = 0
    loss: Any = None
    status: int = 0

    def pack(self) -> bytes:
        """The report as bytes."""
        kind, worker, incarnation, number, weight, seconds, nbytes, loss, status = self
        code, raw = _NO_LOSS if loss is None else (_code_of(loss.dtype), loss.tobytes())
        parts = (kind, worker, incarnation, number, weight, seconds, nbytes, status)
        return _REPORT.pack(*parts, code, raw)

    @classmethod
    def unpack(cls, record: bytes) -> Report:
        """The report in these bytes."""
        *first, weight, seconds, nbytes, status, code, raw = _REPORT.unpack(record)
        kind, worker, incarnation, number = first
        loss = None
        if code != _NO_LOSS[0]:
            loss = np.frombuffer(raw, _dtype_of(code), count=1)[0]
        rest = (weight, seconds, nbytes, loss, status)
        return cls(kind, worker, incarnation, number, *rest)


class ForkOrder(NamedTuple):
    """Asks the template to start or to kill a worker."""

    op: int
    worker: int
    incarnation: int

    def pack(self) -> bytes:
        """The order as bytes."""
        return _FORK.pack(self.op, self.worker, self.incarnation)

    @classmethod
    def unpack(cls, record: bytes) -> ForkOrder:
        """The order in these bytes."""
        op, worker, incarnation = _FORK.unpack(record)
        return cls(op, worker, incarnation)
