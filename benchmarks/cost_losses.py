"""The losses of cost.py: what they cost is known."""

from __future__ import annotations

import os
import signal
import struct
import time
from typing import Any

import numpy as np

SLEEP_S = 0.02

_gradients: dict[int, np.ndarray] = {}


def empty(params: Any, rows: Any) -> Any:
    """Costs nothing."""
    return np.float32(0), params


def sleep(params: Any, rows: Any) -> Any:
    """Takes a while and no core."""
    time.sleep(SLEEP_S)
    return np.float32(0), params


_ANSWER = struct.Struct("<d82x")


def sleep_when_told(answer: int) -> tuple[int, int]:
    """(process id, pipe) of a process that sleeps whenever the pipe says so."""
    told, command = os.pipe()
    if pid := os.fork():
        os.close(told)
        return pid, command
    while os.read(told, 100):
        begin = time.perf_counter()
        time.sleep(SLEEP_S)
        os.write(answer, _ANSWER.pack(time.perf_counter() - begin))
    os._exit(0)


def end(pid: int) -> None:
    """Ends a child, whose pipes its siblings hold open."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def sleeps(answers: int, number: int) -> list[float]:
    """How long so many processes say that they slept."""
    slept: list[float] = []
    while len(slept) < number:
        records = os.read(answers, 64 * _ANSWER.size)
        slept.extend(seconds for (seconds,) in _ANSWER.iter_unpack(records))
    return slept


def preset(params: Any, rows: Any) -> Any:
    """Has its gradient since before."""
    if params.size not in _gradients:
        _gradients.clear()
        _gradients[params.size] = np.ones(params.size, np.float32)
    return np.float32(0), _gradients[params.size]
