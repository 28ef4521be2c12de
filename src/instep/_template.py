"""The template: one process that imports the framework once and forks the workers.

A framework takes seconds to import and a fork takes milliseconds, so starting many
workers, and replacing one that died, is cheap. The master itself is never forked:
it may hold threads and locks of any library. The template holds none: it imports,
waits and forks, and never runs a line of the user's or the framework's own code.

It is also the one who notices: a worker that ends is reported to the master, and
when the master ends, however it does, every worker is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from instep._quiet import held_back_stderr
from instep._wire import FORK_NBYTES, ForkOrder, Kind, Op, Report

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """What the template and its workers start from, sent once by the master.

    Attributes:
        master: its process id.
        sys_path: its import path.
        modules: what to import before forking.
        threads: threads per worker inside one operation.
        report_fd: write end of the pipe to the master.
        block_fds: shared memory of parameters, batch, slots, kept parameters and kept
            batches.
    """

    master: int
    sys_path: tuple[str, ...]
    modules: tuple[str, ...]
    threads: int
    report_fd: int
    block_fds: tuple[int, ...]


# (setup, worker, incarnation, descriptors of commands, outbox and program)
RunWorker = Callable[[Setup, int, int, int, int, int], None]


def serve(setup: Setup, orders: socket.socket, run_worker: RunWorker) -> None:
    """Forks and reaps workers until the master closes `orders` or ends."""
    template = _Template(setup, orders, run_worker)
    try:
        with contextlib.suppress(BrokenPipeError):  # the master ended before a worker
            template.serve()
    finally:
        template.kill_all()


class _Template:
    def __init__(
        self, setup: Setup, orders: socket.socket, run_worker: RunWorker
    ) -> None:
        self._setup = setup
        self._orders = orders
        self._run_worker = run_worker
        self._children: dict[int, tuple[int, int]] = {}  # pid -> worker, incarnation
        self._wakeup, self._wakeup_end = os.pipe()
        self._master = open_process(setup.master)

    def serve(self) -> None:
        os.set_blocking(self._wakeup_end, False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup_end, warn_on_full_buffer=False)
        sys.path[:] = self._setup.sys_path
        with held_back_stderr():  # TensorFlow's words on its build; the user has them
            for name in self._setup.modules:
                # A module that cannot be imported is reported by the worker, which
                # fails to unpickle the program, with the traceback.
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        # What is here now stays: no worker's garbage collector need look at it, nor
        # touch, and so copy, the pages it shares with the others.
        gc.collect()
        gc.freeze()
        self._loop()

    def _loop(self) -> None:
        sources = [self._orders.fileno(), self._wakeup]
        if self._master is not None:
            sources.append(self._master)
        poll = select.poll()
        for source in sources:
            poll.register(source, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._master in ready:
                return
            if self._orders.fileno() in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """Carries out one order; False when the master has closed the socket."""
        record, fds, _, _ = socket.recv_fds(self._orders, FORK_NBYTES, 3)
        if len(record) < FORK_NBYTES:
            return False
        order = ForkOrder.unpack(record)
        if order.op == Op.START:
            self._fork(order, fds)
        else:
            self._kill(order)
        return True

    def _fork(self, order: ForkOrder, fds: list[int]) -> None:
        with warnings.catch_warnings():
            # Python warns of a fork while threads exist; a framework's import may
            # have started some, but they wait idle and hold no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._become_worker(order, fds)
        self._children[pid] = order.worker, order.incarnation
        for fd in fds:
            os.close(fd)

    def _become_worker(self, order: ForkOrder, fds: list[int]) -> None:
        status = 1
        try:
            template = os.getppid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent(template)
            for fd in (self._wakeup, self._wakeup_end, self._master):
                if fd is not None:
                    os.close(fd)
            self._orders.close()
            self._run_worker(self._setup, order.worker, order.incarnation, *fds)
            status = 0
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(status)

    def _kill(self, order: ForkOrder) -> None:
        for pid, child in self._children.items():
            if child == (order.worker, order.incarnation):
                os.kill(pid, signal.SIGKILL)  # not yet reaped: the pid is still his

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            worker, incarnation = self._children.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            report = Report(Kind.ENDED, worker, incarnation, status=code)
            os.write(self._setup.report_fd, report.pack())

    def kill_all(self) -> None:
        """Kills every worker and waits until all are gone."""
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that forked it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def open_process(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if unsupported.

    Elsewhere the closed socket says it, unless a fork of the master keeps it open.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
