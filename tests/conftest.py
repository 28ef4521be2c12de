"""Every test ends within a minute and leaves no process, memory or descriptor."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from helpers import leave_out

GUARD_S = 60.0
FRAMEWORKS = ("tensorflow", "keras", "torch", "jax", "optax")
# TensorFlow and Keras import these where they are there, which is two of five seconds.
OPTIONAL = ("jax", "matplotlib", "sklearn")


def pytest_configure(config: pytest.Config) -> None:
    """Lets tests interrupt; in CI, a missing framework is a failure, not a skip."""
    # A shell's `&` starts programs that ignore Ctrl-C, and so would all children.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    missing = [name for name in FRAMEWORKS if not find_spec(name)]
    if missing and os.environ.get("CI"):
        raise pytest.UsageError(f"not installed: {', '.join(missing)}")


def pytest_collection_finish() -> None:
    """Sets aside what the imports made: searching it after each test takes 0.1 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _guard_against_hangs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the whole run, with every thread's traceback, rather than hang."""
    seconds = request.node.get_closest_marker("guard")
    # Not to sys.stderr, which pytest captures: the end would come without a word.
    faulthandler.dump_traceback_later(
        seconds.args[0] if seconds else GUARD_S,
        exit=True,
        file=request.config.stash[fault_handler_stderr_fd_key],
    )
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _leaves_no_trace(_guard_against_hangs: None) -> Iterator[None]:
    yield from no_trace()


@pytest.fixture(scope="session")
def only_tensorflow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An entry of the import path for scripts that need TensorFlow or Keras alone."""
    return leave_out(tmp_path_factory.mktemp("left out"), *OPTIONAL)


@pytest.fixture
def workers_with_only_tensorflow(
    monkeypatch: pytest.MonkeyPatch, only_tensorflow: str
) -> None:
    """Workers start as where nothing is installed that they do not need: faster."""
    monkeypatch.setattr(sys, "path", [only_tensorflow, *sys.path])


def no_trace() -> Iterator[None]:
    """No child process, shared memory or descriptor more than before the yield."""
    before = _instep_descriptors()
    children = _children()
    yield
    gc.collect()
    gc.freeze()  # what has survived need not be searched again after the next test
    wait_until(lambda: _children() <= children, "a child process is left")
    assert _instep_descriptors() <= before
    assert not [name for name in os.listdir("/dev/shm") if "instep" in name]


def wait_until(
    condition: Callable[[], bool], problem: str, seconds: float = 30
) -> None:
    """Waits for a condition that another process brings about.

    So many seconds are no claim about its speed: it may share a core with others.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, problem
        time.sleep(0.01)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _instep_descriptors() -> int:
    """Descriptors of this process that are shared memory of a pool."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += "memfd:instep" in os.readlink(entry)
        except OSError:
            continue  # the listing's own descriptor
    return count
