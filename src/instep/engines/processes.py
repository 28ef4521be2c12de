"""The one-machine engine: worker processes, shared memory, pipes of a few bytes.

    master ── orders ──> template ── fork ──> worker 0, 1, ...
       │ ── commands (one pipe each) ───────────> │
       │ <── reports (one pipe for all) ───────── │
       └─────── shared memory: parameters, batch, slots, one outbox each ───────┘

Nothing on the hot path is pickled or allocated. No port is opened: the order
socket is a nameless pair. A worker that ends, however it does, is reported by the
template; the end of the master, however it comes, ends them all.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from instep._cores import move_to, move_to_own_cores, usable_cores
from instep._errors import EngineUnavailableError, PoolClosedError, StartError
from instep._exceptions import unpack_error
from instep._frame import RESIDENT, FrameRef, FrameWriter, aligned
from instep._layout import Layout
from instep._memory import Block
from instep._partials import any_present
from instep._program import Array, Program, Task
from instep._reduction import average_slots, present_views, reduce_slots
from instep._sharding import Batch
from instep._shelf import Shelf
from instep._ship import ship
from instep._slots import Slots
from instep._template import Setup, open_process
from instep._wire import REPORT_NBYTES, Command, ForkOrder, Kind, Op, Plan, Report
from instep.engines._base import Done, Event, Failed, Kept, Lost, Ready

# Seconds a worker may take from its start to its first word, the framework's import
# included: TensorFlow takes 8 s on a slow disk, more under load.
START_TIMEOUT_S = 180.0
# When the workers are late with averaging: far more than the memory-bound pass takes.
# The master then does it, so that a stopped worker costs a moment and no more.
AVERAGE_MOMENT_S = 0.25
AVERAGE_BYTES_PER_S = 200e6
# How many workers in a row may end before one starts.
START_FAILURES = 3
# Bytes of outputs from which the workers average, each its part; below, the master
# is done before they are awake and through with theirs.
LARGE = 1 << 22
# The least a worker is woken up for.
PART = 1 << 20

# -P keeps the current folder, whose files may be named like modules, off the import
# path. Assertions of a loss run where they run in the master.
_FLAGS = ["-P"] * (sys.version_info >= (3, 11)) + ["-O"] * sys.flags.optimize

_NO_TASK = Task(0, 0, 0, 0, 0, False, 0)
_NO_FRAME = FrameRef(0, 0)


@dataclass(slots=True)
class _Seat:
    """The place of one worker; its process may change, its number stays."""

    worker: int
    incarnation: int
    commands: int
    outbox: Block
    pid: int = 0
    number: int = 0  # the command it carries out, 0: none
    shard: int = -1  # what it computes: of a call
    key: int | None = None  # or of kept frames
    slot: int = -1  # the slot it may write to


class Processes:
    """Workers on this machine, forked from a template that has imported the framework.

    Raises:
        EngineUnavailableError: on a system without fork, such as Windows.
    """

    def __init__(self) -> None:
        if not hasattr(os, "fork"):
            raise EngineUnavailableError(
                f"engine='processes' needs fork, which {sys.platform} does not have; "
                "use engine='serial', or run under WSL"
            )
        self._template: subprocess.Popen[bytes] | None = None
        self._reports: int | None = None
        self._end_of_template: int | None = None
        self._modules: tuple[str, ...] = ()
        self._threads = 0
        self._program = Block(-1)
        self._pending: list[Event] = []
        self.cores: dict[int, set[int]] = {}  # of workers that are told where to run

    def start(self, program: Program, workers: int, threads: int) -> None:
        self.start_shipped(ship(program), program.modules, range(workers), threads)

    def start_shipped(
        self,
        text: bytes | memoryview,
        modules: Sequence[str],
        workers: Sequence[int],
        threads: int,
    ) -> None:
        """Starts workers of these numbers with a program that is pickled already."""
        modules = tuple(modules)
        if self._template is None or (modules, threads) != (
            self._modules,
            self._threads,
        ):
            self.close()
            self._modules, self._threads = modules, threads
            self._open()
        else:  # the template has imported all there is to import
            self._program.close()
            self._pending.clear()
            self._start_failures = 0
        self._program = Block.create()
        self._program.at_least(len(text))[: len(text)] = text
        for worker in [w for w in self._seats if w in workers]:
            self.replace(worker)
        self.staff(workers)

    def _open(self) -> None:
        """Memory for the workers and the template to fork them from."""
        self._owner = os.getpid()
        self._seats: dict[int, _Seat] = {}
        self._starting: dict[int, float] = {}  # and since when
        self._idle: dict[int, None] = {}  # an ordered set
        self._leaving: dict[tuple[int, int], int] = {}  # killed, and the slot it held
        self._incarnations: dict[int, int] = {}  # of the next process in a seat
        self._pending.clear()
        self._number = 0
        self._oldest = 0  # commands with a lower number are forgotten
        self._start_failures = 0
        self._are_missing = self._is_closing = self._is_receiving = False
        self._workers: Sequence[int] = ()
        self._layout: Layout | None = None
        self._slot_of: dict[int, int] = {}  # of a call's shards
        self._kept_slots: dict[int, int] = {}  # by key
        with _descriptors(), ExitStack() as opened:
            self._blocks = [
                opened.enter_context(closing(Block.create())) for _ in range(5)
            ]
            self._params = FrameWriter(self._blocks[0])
            self._batch = FrameWriter(self._blocks[1])
            self._slots = Slots(self._blocks[2])
            self.kept_params = Shelf(self._blocks[3])
            self.kept_batches = Shelf(self._blocks[4])
            self._start_template()
            opened.pop_all()  # all is there: it stays

    def publish(self, params: Batch, batch: Batch, layout: Layout) -> int:
        self._oldest = self._number + 1
        for _, slot in sorted(self._slot_of.items()):
            self._slots.give(slot)
        self._slot_of.clear()
        self.lay_out(layout)
        self._refs = self._params.write(params, layout), self._batch.write(batch)
        return sum(ref.nbytes for ref in self._refs)

    def lay_out(self, layout: Layout) -> None:
        if self._are_missing:
            self._start_missing()
        if layout is not self._layout:
            self._slots.resize(layout.nbytes)
            self._layout = layout

    def idle(self) -> list[int]:
        told = {event.worker for event in self._pending}  # when `wait` has said so
        return [worker for worker in self._idle if worker not in told]

    def busy(self) -> list[int]:
        return [w for w, seat in self._seats.items() if seat.number and seat.pid]

    def submit(self, worker: int, task: Task, kept: Kept | None = None) -> None:
        params, batch = self._refs if kept is None else kept[:2]
        self._params_ref = params  # which say how outputs are laid out
        seat = self._seats[worker]
        seat.shard, seat.key = task.shard, None if kept is None else kept.key
        self._command(worker, Op.COMPUTE, self._slots.take(), task, params, batch)

    def wait(self, timeout: float | None) -> list[Event]:
        if not self._pending:
            self._receive(timeout)
        events, self._pending = self._pending, []
        return events

    def average(
        self, weights: Sequence[float], keys: Sequence[int] | None = None
    ) -> list[Array | None]:
        if keys is None:
            self._oldest = self._number + 1  # a late worker may still compute a shard
            return self._average(
                [self._slot_of[k] for k in range(len(weights))], weights
            )
        try:
            return self._average([self._kept_slots[key] for key in keys], weights)
        finally:
            for key in keys:
                self.forget(key)

    def forget(self, key: int) -> None:
        self._slots.give(self._kept_slots.pop(key))

    def offsets(
        self, shards: Sequence[int], keys: Sequence[int] | None = None
    ) -> list[int]:
        """Where the outputs of a call's shards lie, or those with these keys."""
        if keys is None:
            return [self._slot_of[shard] for shard in shards]
        return [self._kept_slots[key] for key in keys]

    def node(self, offsets: list[int], weights: Sequence[float]) -> Array:
        """Outputs at these offsets, combined, as they lie in the working layout."""
        assert self._layout is not None
        working = self._layout.working
        if working is self._layout:
            slots = self._slots.rows(offsets)
            out = self._combined(offsets, weights)
        else:
            rows = [self._slots.array(offset) for offset in offsets]
            slots = [self._layout.convert(row, working) for row in rows]
            out = None
        if out is None:
            out = np.empty(working.nbytes, np.uint8)
            reduce_slots(slots, weights, working, out)
        working.present(out)[:] = any_present(slots, working)
        return out

    def _average(
        self, offsets: list[int], weights: Sequence[float]
    ) -> list[Array | None]:
        assert self._layout is not None
        slots = self._slots.rows(offsets)
        out = self._combined(offsets, weights)
        if out is None:
            return average_slots(slots, weights, self._layout)
        return present_views(slots, self._layout, out)

    def _combined(self, offsets: list[int], weights: Sequence[float]) -> Array | None:
        """Large outputs, combined by the workers; None: they are not, or too late."""
        assert self._layout is not None
        if self._layout.nbytes < LARGE or not self._idle:
            return None
        if len(offsets) == 1:  # the average is there already
            self._slots.hold(offsets[0])
            return self._slots.lend(offsets[0])
        result = self._slots.take()
        try:
            if self._average_in_workers(offsets, weights, result):
                self._slots.hold(result)
                return self._slots.lend(result)
        finally:
            self._slots.give(result)  # a late worker may hold it still, and write to it
        return None

    def resident(self) -> list[Array]:
        return self._params.resident()

    @property
    def params_ref(self) -> FrameRef:
        """The frame of the published parameters."""
        return self._refs[0]

    def params_at(self, ref: FrameRef) -> memoryview:
        """Where a frame of parameters lies, or will."""
        if ref.base != RESIDENT:
            return self.kept_params.view(ref)
        return self._blocks[0].at_least(ref.nbytes)[: ref.nbytes]

    def resize(self, workers: int) -> None:
        self.staff(range(workers))

    def staff(self, workers: Sequence[int]) -> None:
        """Starts those of these workers that are missing, and ends all others."""
        self._workers = workers
        self._start_missing()
        for worker in [w for w in self._seats if w not in workers]:
            self._dismiss(worker)
        for seat in self._seats.values():
            self._move_to_own_cores(seat)

    def _start_missing(self) -> None:
        """Starts workers in seats that are empty, if nobody is told to do so."""
        told = {event.worker for event in self._pending if isinstance(event, Lost)}
        for worker in self._workers:
            seat = self._seats.get(worker)
            if seat is None:
                self._start_worker(worker, self._incarnations.get(worker, 0))
            elif not seat.pid and worker not in {*self._starting, *told}:
                self.replace(worker)
        self._are_missing = False

    def replace(self, worker: int) -> None:
        self._dismiss(worker)
        self._start_worker(worker, self._incarnations[worker])

    def _dismiss(self, worker: int) -> None:
        """Ends the process of a worker."""
        seat = self._vacate(worker)
        self._incarnations[worker] = seat.incarnation + 1
        self._order(Op.KILL, seat)
        self._pending = [e for e in self._pending if e.worker != worker]

    def abandon(self, *, at_once: bool) -> None:
        self._oldest = self._number + 1
        self._pending = [e for e in self._pending if isinstance(e, Lost | Ready)]
        if at_once:
            for worker in [w for w in self._seats if w not in self._idle]:
                self.replace(worker)

    def pids(self) -> tuple[int, ...]:
        # A list first: other threads may ask, and seats change.
        return tuple(seat.pid for seat in list(self._seats.values()) if seat.pid)

    def pid(self, worker: int) -> int:
        """Of this worker's process; 0: it has not started."""
        return self._seats[worker].pid if worker in self._seats else 0

    def interrupt(self) -> None:
        if self._template is None or os.getpid() != self._owner or self._is_closing:
            return  # closed, or a fork of the master is ending: not its to close
        self._is_closing = True
        if not any(self.pids()):  # it may still import, and hear nothing meanwhile
            self._template.kill()
        # The template then kills its workers and ends. Closing would not be enough
        # where a fork of the master has the socket too.
        with contextlib.suppress(OSError):  # it has ended before
            self._orders.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        if self._template is None or os.getpid() != self._owner:
            return
        template, self._template = self._template, None
        for worker in list(self._seats):
            self._vacate(worker)
        self._orders.close()
        try:
            template.wait(timeout=5)
        except subprocess.TimeoutExpired:
            template.kill()  # the kernel then kills the workers
            template.wait()
        if not self._is_receiving:  # else a signal's handler closes in mid-step
            self._close_reports()
        for block in (*self._blocks, self._program):
            block.close()
        del self._params, self._batch, self._slots  # they hold views of the blocks
        del self.kept_params, self.kept_batches

    # Starting and ending processes

    def _start_template(self) -> None:
        with ExitStack() as ours, ExitStack() as theirs:
            self._reports, report_fd = os.pipe()
            ours.callback(self._close_reports)
            # Only workers and template may hold these ends: their end is then seen.
            theirs.callback(os.close, report_fd)
            self._orders, orders = socket.socketpair()
            ours.callback(self._orders.close)
            theirs.callback(orders.close)
            setup = theirs.enter_context(closing(Block.create()))
            self._template = self._popen(setup, report_fd, orders.fileno())
            self._end_of_template = open_process(self._template.pid)
            self._poll = select.poll()
            for fd in (self._reports, self._end_of_template):
                if fd is not None:
                    self._poll.register(fd, select.POLLIN)
            ours.pop_all()  # all is there: it stays

    def _close_reports(self) -> None:
        fds = self._reports, self._end_of_template
        self._reports = self._end_of_template = None
        for fd in fds:
            if fd is not None:
                os.close(fd)

    def _popen(self, block: Block, report_fd: int, orders: int) -> Any:
        shared = tuple(block.fd for block in self._blocks)
        setup = Setup(
            master=os.getpid(),
            sys_path=tuple(sys.path),
            modules=self._modules,
            threads=self._threads,
            report_fd=report_fd,
            block_fds=shared,
        )
        text = pickle.dumps(setup)
        block.at_least(len(text))[: len(text)] = text
        fds = block.fd, orders
        return subprocess.Popen(
            [sys.executable, *_FLAGS, "-m", "instep._worker", *map(str, fds)],
            stdin=subprocess.DEVNULL,
            pass_fds=(*fds, report_fd, *shared),
            env=worker_environment(self._threads),
            start_new_session=True,  # Ctrl-C is the master's to handle
        )

    def _start_worker(self, worker: int, incarnation: int) -> None:
        self._are_missing = True  # should this fail
        with _descriptors(), ExitStack() as opened:
            outbox = opened.enter_context(closing(Block.create()))
            commands, write_end = os.pipe()
            opened.pop_all()
        seat = _Seat(worker, incarnation, write_end, outbox)
        self._seats[worker] = seat
        self._starting[worker] = time.monotonic()
        self._order(Op.START, seat, commands, outbox.fd, self._program.fd)
        os.close(commands)

    def _order(self, op: Op, seat: _Seat, *fds: int) -> None:
        order = ForkOrder(op, seat.worker, seat.incarnation)
        with contextlib.suppress(BrokenPipeError):  # seen as the end of the reports
            socket.send_fds(self._orders, [order.pack()], list(fds))

    def _vacate(self, worker: int) -> _Seat:
        """Takes the process out of its seat; its slot stays held until it has ended."""
        seat = self._seats.pop(worker)
        self._idle.pop(worker, None)
        self._starting.pop(worker, None)
        if seat.slot >= 0:
            self._leaving[worker, seat.incarnation] = seat.slot
        os.close(seat.commands)
        seat.outbox.close()
        return seat

    # Commands and reports

    def _command(
        self,
        worker: int,
        op: Op,
        slot: int,
        task: Task = _NO_TASK,
        params: FrameRef = _NO_FRAME,
        batch: FrameRef = _NO_FRAME,
        plan: int = 0,
    ) -> None:
        """Sends a command; the worker holds the slot until it has answered."""
        seat = self._seats[worker]
        self._idle.pop(worker)
        self._number += 1
        seat.number, seat.slot = self._number, slot
        command = Command(
            op, self._number, task, params, batch, slot, self._slots.end, plan
        )
        with contextlib.suppress(BrokenPipeError):  # the template reports its end
            os.write(seat.commands, command.pack())

    def _receive(self, timeout: float | None) -> None:
        """Waits for reports and turns them into pending events."""
        limit = _earliest(timeout, self._start_limit())
        self._is_receiving = True
        try:
            milliseconds = None if limit is None else max(0, 1000 * limit)
            ready = [fd for fd, _ in self._poll.poll(milliseconds)]
            records = b""
            if self._reports is not None and self._reports in ready:
                records = os.read(self._reports, 64 * REPORT_NBYTES)
        finally:
            self._is_receiving = False
        if ready and not records:  # a child of a worker may hold the pipe open
            self._restart_template()
        elif not ready:
            self._give_up_late_starts()
        for start in range(0, len(records), REPORT_NBYTES):
            self._note(Report.unpack(records[start : start + REPORT_NBYTES]))

    def _note(self, report: Report) -> None:
        if report.kind == Kind.ENDED:
            self._note_end(report)
            return
        seat = self._seats.get(report.worker)
        if seat is None or seat.incarnation != report.incarnation:
            return  # the word of a process that was replaced
        if report.kind == Kind.READY:
            self._note_ready(seat, report)
        elif report.number == 0:
            self._pending.append(self._failed(seat, report, at_start=True))
        else:
            self._note_answer(seat, report)

    def _note_ready(self, seat: _Seat, report: Report) -> None:
        seat.pid, self._start_failures = report.status, 0
        self._starting.pop(seat.worker, None)
        self._idle[seat.worker] = None
        self._move_to_own_cores(seat)
        self._pending.append(Ready(seat.worker))

    def _move_to_own_cores(self, seat: _Seat) -> None:
        if not seat.pid:
            return
        if seat.worker in self.cores:
            move_to(seat.pid, self.cores[seat.worker])
        elif seat.worker in self._workers:
            place = self._workers.index(seat.worker), len(self._workers)
            move_to_own_cores(seat.pid, *place, self._threads)

    def _note_answer(self, seat: _Seat, report: Report) -> None:
        self._idle[seat.worker] = None
        slot, seat.slot, seat.number = seat.slot, -1, 0
        is_wanted = report.number >= self._oldest
        if report.kind == Kind.FAILED and seat.shard < 0:
            self._average_failed, is_wanted = True, False
        slots, key = self._slot_of, seat.shard
        if seat.key is not None:
            slots, key = self._kept_slots, seat.key
        if report.kind == Kind.DONE and is_wanted and key not in slots:
            slots[key] = slot  # of a shard's answers the first counts
        else:
            self._slots.give(slot)
        if report.kind == Kind.AVERAGED:
            return
        if not is_wanted:
            self._pending.append(Ready(seat.worker))
        elif report.kind == Kind.FAILED:
            self._pending.append(self._failed(seat, report))
        else:
            self._pending.append(self._done(seat, report))

    def _done(self, seat: _Seat, report: Report) -> Done | Failed:
        aux = None
        try:
            if report.nbytes:
                text = seat.outbox.at_least(report.nbytes)[: report.nbytes]
                aux = self.unpack_aux(text)
        except Exception as error:  # a class that only the worker could import
            trace = "".join(traceback.format_exception(error))
            return Failed(seat.worker, error, trace)
        return Done(seat.worker, report.loss, report.weight, aux, report.seconds)

    def _failed(self, seat: _Seat, report: Report, *, at_start: bool = False) -> Failed:
        text = bytes(seat.outbox.at_least(report.nbytes)[: report.nbytes])
        return Failed(seat.worker, *self.unpack_error(text), at_start)

    def unpack_aux(self, text: memoryview) -> Any:
        """The aux of a shard."""
        return pickle.loads(text)

    def unpack_error(self, text: bytes) -> tuple[BaseException, str]:
        """The exception of a worker and its traceback."""
        return unpack_error(text)

    def _note_end(self, report: Report) -> None:
        slot = self._leaving.pop((report.worker, report.incarnation), -1)
        if slot >= 0:
            self._slots.give(slot)
        seat = self._seats.get(report.worker)
        if seat is not None and seat.incarnation == report.incarnation:
            has_failed = self._has_failed_start(seat, report)
            self._empty(seat)
            if not has_failed:  # else the next call tries again
                self._pending.append(Lost(seat.worker, ending(report.status)))

    def _empty(self, seat: _Seat) -> None:
        """The process has ended; the seat waits for another."""
        if seat.slot >= 0:
            self._slots.give(seat.slot)
        seat.slot, seat.pid = -1, 0
        self._are_missing = True
        self._idle.pop(seat.worker, None)
        self._starting.pop(seat.worker, None)

    # What can go wrong at the start

    def _start_limit(self) -> float | None:
        """Seconds until the first worker has taken too long to start."""
        if not self._starting:
            return None
        return min(self._starting.values()) + START_TIMEOUT_S - time.monotonic()

    def _give_up_late_starts(self) -> None:
        """Reports workers that take too long; an error if there is no other."""
        moment = time.monotonic() - START_TIMEOUT_S
        late = [w for w, since in self._starting.items() if since <= moment]
        text = f"no word from a new worker for {START_TIMEOUT_S:.0f} s"
        if late and not any(self.pids()):
            raise StartError(
                f"{text}; its imports ({', '.join(self._modules)}) may hang, or the "
                "machine be overloaded"
            )
        for worker in late:
            del self._starting[worker]
            self._pending.append(Lost(worker, text))

    def _has_failed_start(self, seat: _Seat, report: Report) -> bool:
        """Whether too many have ended while starting; an error if no other lives."""
        self._start_failures += not seat.pid
        has_failed = not seat.pid and self._start_failures >= START_FAILURES
        if has_failed and not any(self.pids()):
            raise StartError(
                f"{self._start_failures} workers in a row ended while starting, the "
                f"last with {ending(report.status)}. The system may be out of memory, "
                "or loading the loss may end the process; try "
                "engine='serial' to see it happen in this process."
            )
        return has_failed

    def _restart_template(self) -> None:
        """The template has ended and all workers with it: starts them anew."""
        if self._template is None:
            self._close_reports()
        if self._template is None or self._is_closing:
            raise PoolClosedError("the pool was closed during this call")
        reason = ending(self._template.wait())
        self._start_failures += not any(self.pids())
        if self._start_failures >= START_FAILURES:
            raise StartError(
                f"the process that starts the workers ended with {reason}, "
                f"{self._start_failures} times; it only imports "
                f"{', '.join(self._modules)}: try that in a Python of its own"
            )
        self._close_reports()
        self._orders.close()
        try:
            with _descriptors():
                self._start_template()
        except OSError as error:
            raise StartError(f"workers cannot be started again: {error}") from error
        self._pending = [e for e in self._pending if not isinstance(e, Lost)]
        for seat in self._seats.values():
            self._empty(seat)
            self._pending.append(Lost(seat.worker, f"its template's {reason}"))
        for slot in self._leaving.values():
            self._slots.give(slot)
        self._leaving.clear()

    # Averaging large vectors

    def _average_in_workers(
        self, offsets: list[int], weights: Sequence[float], result: int
    ) -> bool:
        """Each idle worker combines its part of all slots into the result's.

        Returns whether all have done so in time.
        """
        assert self._layout is not None
        numbers, self._average_failed = dict[int, int](), False
        for worker, part in zip(self._idle.copy(), self._parts(), strict=False):
            self._slots.hold(result)
            plan = Plan(result, *part, tuple(offsets), tuple(weights))
            self._send_plan(worker, plan.pack(), result)
            numbers[worker] = self._number
        return self._are_averaged(numbers)

    def _parts(self) -> list[tuple[int, int]]:
        assert self._layout is not None
        nbytes = self._layout.nbytes
        number = min(len(self._idle), usable_cores(), nbytes // PART)
        cuts = [aligned(nbytes * k // number) for k in range(number)] + [nbytes]
        return list(itertools.pairwise(cuts))

    def _send_plan(self, worker: int, plan: bytes, result: int) -> None:
        self._seats[worker].outbox.at_least(len(plan))[: len(plan)] = plan
        self._seats[worker].shard = -1
        layout = self._params_ref
        self._command(worker, Op.AVERAGE, result, params=layout, plan=len(plan))

    def _are_averaged(self, numbers: dict[int, int]) -> bool:
        """Waits for the workers with these commands; False if one is late or lost."""
        assert self._layout is not None
        nbytes = self._layout.nbytes * len(self._slot_of)
        deadline = time.monotonic() + AVERAGE_MOMENT_S + nbytes / AVERAGE_BYTES_PER_S
        seats = {worker: self._seats[worker] for worker in numbers}
        while True:
            if self._average_failed or not all(seat.pid for seat in seats.values()):
                return False
            if all(seats[w].number != number for w, number in numbers.items()):
                return True
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self._receive(left)


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of template and workers.

    Every library that counts threads is told the number before it is loaded: some
    start their threads at import, which must not happen in the template.
    """
    counted = ["OMP", "OPENBLAS", "MKL", "BLIS", "VECLIB_MAXIMUM", "NUMEXPR"]
    limits = {f"{library}_NUM_THREADS": str(threads) for library in counted}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    # One hash seed for all: it decides the order of sets, hence of sums over them.
    shared = {"PYTHONHASHSEED": "0", **quiet, **os.environ}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**shared, **limits, "PYTHONPATH": path}


def ending(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"


@contextlib.contextmanager
def _descriptors() -> Iterator[None]:
    """Says what to do where there are none left."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise OSError(
            error.errno,
            f"{error.strerror}: a pool needs 3 file descriptors for each worker and 14 "
            "besides; use fewer workers, or raise the limit (ulimit -n)",
        ) from error


def _earliest(first: float | None, second: float | None) -> float | None:
    limits = [limit for limit in (first, second) if limit is not None]
    return min(limits) if limits else None
