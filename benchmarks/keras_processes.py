"""The processes of a way to train (keras_trainers.py), seen from the benchmark."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import psutil
from keras_models import TASKS
from keras_trainers import GRACE_S, WAYS

# Seconds a process may take to import and to take a turn.
ANSWER_TIMEOUT_S = 180.0
SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


class Trainer:
    """One process, or several that train together.

    Args:
        way: of `WAYS`; its ranks find each other by ports.
        task: of `TASKS`.
    """

    def __init__(self, way: str, task: str) -> None:
        self._steps = TASKS[task]().steps
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        ranks = WAYS[way].ranks
        ports = free_ports(ranks)
        self._processes = [
            start([way, task, *([str(rank), *ports] if ranks > 1 else [])], self._log)
            for rank in range(ranks)
        ]

    def take(self) -> tuple[float, float]:
        """Takes a turn; the seconds per step of the slowest process, and the loss."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write(b"\n")
            process.stdin.flush()
        answers = [self._answer(process) for process in self._processes]
        slowest = max(answer["seconds"] for answer in answers)
        return slowest / self._steps, sum(answer["loss"] for answer in answers)

    def pids(self) -> list[int]:
        """Its processes and theirs."""
        parents = [psutil.Process(process.pid) for process in self._processes]
        children = [child for p in parents for child in p.children(recursive=True)]
        return [process.pid for process in (*parents, *children)]

    def close(self) -> None:
        """Ends them."""
        for process in self._processes:
            assert process.stdin
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=GRACE_S + 10)
            except subprocess.TimeoutExpired:
                process.kill()
        self._log.close()

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, float]:
        assert process.stdout
        ready, _, _ = select.select([process.stdout], [], [], ANSWER_TIMEOUT_S)
        line = process.stdout.readline() if ready else b""
        if not line:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")
            raise RuntimeError(f"{said}\nno answer from {process.args!r}")
        answer: dict[str, float] = json.loads(line)
        return answer


def start(arguments: list[str], log: IO[Any]) -> subprocess.Popen[bytes]:
    """A process that waits for orders.

    Not in a session of its own: Linux gives each session the same share of a busy
    machine (autogroup), and two ranks would get twice what one process gets.
    """
    script = str(Path(__file__).with_name("keras_trainers.py"))
    return subprocess.Popen(
        [sys.executable, script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, **SETTINGS},
    )


def free_ports(number: int) -> list[str]:
    """Ports that nobody uses now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("localhost", 0))
        return [str(one.getsockname()[1]) for one in sockets]
