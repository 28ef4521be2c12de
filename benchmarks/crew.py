"""Processes that carry out orders together: one, or ranks that talk to each other.

`Crew` is the benchmark's side, `serve` that of the processes. A named pipe for each
rank brings orders, another its answers, both lines of JSON, so that ranks which mpirun
has started are reached like all others. Between two orders a process sleeps in a
read. The end of the orders is its end, even in the middle of one, and it comes with
the end of the benchmark, whatever that is.

No crew has a session of its own but that of mpirun, which Ctrl-C must not reach: Linux
gives each session the same share of a busy machine (autogroup), and two ranks would
get twice what one process gets. The workers of instep have one, and mpirun has.
"""

from __future__ import annotations

import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

# Seconds a rank may take to import and carry out an order.
ANSWER_TIMEOUT_S = 300.0
# Seconds a rank has to end in after the last order.
GRACE_S = 4.0

Order = dict[str, Any]
Answer = dict[str, Any]


class Crew:
    """Ranks that carry out the same order at the same time.

    Args:
        script: beside this file; started as `script *arguments FOLDER RANK`.
        arguments: the first ones of the script.
        ranks: how many.
        launcher: a command that starts all of them, such as mpirun; they take their
            number from its environment.
        environment: variables to set, for all ranks.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        ranks: int,
        *,
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="crew-"))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._orders = [self._pipe(f"orders.{rank}") for rank in range(ranks)]
        pipes = [self._pipe(f"answers.{rank}") for rank in range(ranks)]
        self._answers = [os.fdopen(pipe, "rb", buffering=0) for pipe in pipes]
        path = str(Path(__file__).with_name(script))
        command = [path, *arguments, str(self._folder)]
        started = [[sys.executable, *command, str(rank)] for rank in range(ranks)]
        if launcher:
            started = [[*launcher, *command, "-1"]]
        variables = {**os.environ, **(environment or {})}
        self._processes = [
            start(words, self._log, variables, bool(launcher)) for words in started
        ]

    def carry_out(self, order: Order) -> list[Answer]:
        """Has all ranks do it; their answers, by rank."""
        line = json.dumps(order).encode() + b"\n"
        for pipe in self._orders:
            os.write(pipe, line)
        limit = time.monotonic() + ANSWER_TIMEOUT_S
        return [self._answer(file, limit) for file in self._answers]

    def pids(self) -> list[int]:
        """Its processes and theirs."""
        parents = [psutil.Process(process.pid) for process in self._processes]
        children = [child for p in parents for child in p.children(recursive=True)]
        return [process.pid for process in (*parents, *children)]

    def end(self) -> None:
        """Has them end; does not wait for it."""
        for pipe in self._orders:
            os.close(pipe)
        self._orders.clear()

    def close(self) -> None:
        """Ends them."""
        self.end()
        for process in self._processes:
            try:
                process.wait(timeout=GRACE_S + 10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for file in (*self._answers, self._log):
            file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _pipe(self, name: str) -> int:
        os.mkfifo(self._folder / name)
        # Both ends: opening one would wait for a rank, which may never come.
        return os.open(self._folder / name, os.O_RDWR)

    def _answer(self, file: IO[bytes], limit: float) -> Answer:
        while not select.select([file], [], [], 1)[0]:
            are_well = all(process.poll() is None for process in self._processes)
            if not are_well or time.monotonic() > limit:
                self._log.seek(0)
                said = self._log.read().decode(errors="replace")
                command = self._processes[0].args
                raise RuntimeError(f"{said[-5000:]}\nno answer from {command!r}")
        answer: Answer = json.loads(file.readline())
        return answer


@contextmanager
def at_work(crews: Mapping[str, Callable[[], Crew]]) -> Iterator[dict[str, Crew]]:
    """Starts crews; they end together, and not one after the other."""
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(closing(make())) for name, make in crews.items()
        }
        try:
            yield started
        finally:
            for crew in started.values():
                crew.end()


def start(
    words: Sequence[str],
    log: IO[Any],
    environment: Mapping[str, str],
    with_session: bool,
) -> subprocess.Popen[bytes]:
    """A process, or several by mpirun, that wait for orders."""
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=with_session,
    )


def mpirun(ranks: int) -> list[str]:
    """Starts ranks of Open MPI with Python; as many as asked for, on few cores too."""
    program = str(Path(sys.executable).with_name("mpirun"))
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [program, *options, "-n", str(ranks), sys.executable]


def rank_of(text: str) -> int:
    """A rank's number, from the script's arguments or from mpirun."""
    return int(text) if int(text) >= 0 else int(os.environ["OMPI_COMM_WORLD_RANK"])


def serve(
    orders: queue.SimpleQueue[Order | None],
    folder: Path,
    rank: int,
    carry_out: Callable[[Order], Answer],
) -> None:
    """Carries out orders until there are no more."""
    with open(folder / f"answers.{rank}", "w", buffering=1) as answers:
        while (order := orders.get()) is not None:
            print(json.dumps(carry_out(order)), file=answers)


def received_orders(folder: Path, rank: int) -> queue.SimpleQueue[Order | None]:
    """The orders; None at their end, and then the process has to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the benchmark's to handle
    orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
    # Without waiting for the other end: the benchmark may have been killed already.
    pipe = os.open(folder / f"orders.{rank}", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)

    def receive() -> None:
        with open(pipe) as lines:
            for line in lines:
                orders.put(json.loads(line))
        shutil.rmtree(folder, ignore_errors=True)  # should nobody else be left
        orders.put(None)
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=receive, daemon=True).start()
    return orders
