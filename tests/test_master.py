"""Whatever happens to the script, its pool neither hangs nor leaves anything."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

import faults
import instep
from conftest import wait_until
from helpers import make, run_python, started, write_script
from losses import toy, wide

ONE = np.float64(1)
ROWS = np.arange(1.0, 13.0)

BEGIN = """
import os, pathlib, signal, sys, threading, time
import numpy as np
import psutil
import instep

folder = pathlib.Path({folder!r})

def fun(w, x, waits=False):
    (folder / f"begun {{x[0]}}").touch()
    if waits:
        time.sleep(1e6)
    return np.mean(w * x), np.mean(x)

def family():
    return psutil.Process().children(recursive=True)

rows = np.arange(4.0)
pool = instep.numpy.value_and_grad(fun, workers=2)
"""


def script(folder, text):
    """A script in whose folder each shard leaves a file when it begins."""
    begin = BEGIN.format(folder=str(folder))
    return write_script(folder, begin + text)


def start_a_step(folder, text):
    """The process of a script, in a step that does not end, and its children."""
    master = psutil.Popen(
        [sys.executable, script(folder, text)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(
            lambda: len(list(folder.glob("begun *"))) == 2, "the step never began", 30
        )
    except AssertionError:
        master.kill()
        master.communicate()
        raise
    return master, master.children(recursive=True)


def ended(master, family):
    """What a script wrote; its processes are gone."""
    output, errors = master.communicate(timeout=20)
    wait_until(
        lambda: not any(child.is_running() for child in family), "a child is left"
    )
    return output, errors


# Signals


def test_ctrl_c_at_the_terminal_ends_a_step_and_not_the_pool(tmp_path):
    master, family = start_a_step(
        tmp_path,
        """
try:
    pool(1.0, rows, True)
except KeyboardInterrupt:
    print("interrupted")
print(pool(1.0, rows)[1])
""",
    )
    os.killpg(master.pid, signal.SIGINT)  # what the terminal does
    assert ended(master, family) == ("interrupted\n1.5\n", "")
    assert master.returncode == 0


def test_a_script_may_end_in_order_when_it_is_told_to_terminate(tmp_path):
    master, family = start_a_step(
        tmp_path,
        """
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
pool(1.0, rows, True)
""",
    )
    master.terminate()
    assert ended(master, family) == ("", "")
    assert master.returncode == 5


def test_a_script_that_ends_while_a_thread_is_in_a_step_does_not_hang(tmp_path):
    master, family = start_a_step(
        tmp_path,
        """
def step():
    try:
        pool(1.0, rows, True)
    except instep.PoolClosedError:
        pass  # this thread may or may not come to hear of it

threading.Thread(target=step, daemon=True).start()
sys.stdin.readline()
""",
    )
    assert ended(master, family) == ("", "")  # its standard input ends
    assert master.returncode == 0


def shared_bytes():
    """The shared memory that this process has."""
    sizes = 0
    for entry in Path("/proc/self/fd").iterdir():
        if entry.exists() and "memfd:instep" in os.readlink(entry):
            sizes += entry.stat().st_size
    return sizes


def test_interrupts_while_averaging_take_no_memory():
    def fun(w, x):
        if x[0] == 1.0:
            faults.interrupt_while_averaging(master)
        return wide(w, x)

    master, w = os.getpid(), {"a": np.ones(600_003)}
    with make(fun, workers=2, shards=2) as pool:
        sizes = []
        for _ in range(12):
            with pytest.raises(KeyboardInterrupt):
                pool(w, ROWS)
            sizes.append(shared_bytes())
        # Workers that are ending may still hold a few results of 1.6 MB, each counted
        # twice: the map has a descriptor of its own.
        assert sizes[-1] - sizes[0] < 16_000_000
        assert set(pool(w, ROWS[1:])[1]["a"]) == {7.0}


# Exceptions in the script


@pytest.mark.parametrize(
    "head", ["with pool:", "if True:  # no with"], ids=["with", "without"]
)
def test_an_exception_in_the_script_ends_it_and_the_workers(tmp_path, head):
    text = f"""
{head}
    for step in range(3):
        pool(1.0, rows)
        if step == 1:
            print(*[child.pid for child in family()])
            raise LookupError("no more batches")
"""
    result = run_python(script(tmp_path, text))
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.endswith("LookupError: no more batches\n")
    pids = list(map(int, result.stdout.split()))
    assert len(pids) == 3
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "a child is left")


# Forks


def test_a_process_forked_by_multiprocessing_leaves_the_pool_alone():
    def use(pool, answers):
        try:
            pool(ONE, ROWS)
        except instep.PoolClosedError as error:
            answers.put(str(error))
        pool.close()  # not its to close

    with make(toy, workers=2) as pool:
        pids = started(pool, ONE, ROWS).statistics().pids
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()
        child = context.Process(target=use, args=(pool, answers))
        child.start()
        child.join()
        assert "fork" in answers.get()
        assert child.exitcode == 0
        assert pool(ONE, ROWS) == toy(ONE, ROWS)
        assert pool.statistics().pids == pids
        answers.close()


def test_a_fork_while_another_thread_is_in_a_step_hears_that_it_has_no_pool(tmp_path):
    text = """
def step():
    try:
        pool(1.0, rows, True)
    except instep.PoolClosedError:
        pass

threading.Thread(target=step).start()
while len(list(folder.glob("begun *"))) < 2:
    time.sleep(0.01)
pid = os.fork()
if pid == 0:
    signal.alarm(10)  # not to wait for ever
    for use in (lambda: pool(1.0, rows), lambda: pool.resize(3)):
        try:
            use()
        except instep.PoolClosedError as error:
            assert "fork" in str(error)
        else:
            os._exit(1)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
pool.close()
"""
    result = run_python(script(tmp_path, text))
    assert (result.stdout, result.stderr) == ("0\n", "")


# Threads


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pool_closed_by_another_thread_ends_its_step_with_an_error(tmp_path, workers):
    def fun(w, x):
        (tmp_path / "begun").touch()
        signal.pause()

    def step():
        try:
            pool(ONE, ROWS)
        except BaseException as error:
            errors.append(error)

    errors = []
    before = len(os.listdir("/proc/self/fd"))
    pool = make(fun, workers=workers)
    thread = threading.Thread(target=step)
    thread.start()
    wait_until((tmp_path / "begun").exists, "the step does not begin")
    pool.close()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [instep.PoolClosedError]
    with pytest.raises(instep.PoolClosedError):
        pool(ONE, ROWS)
    errors.clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pool_closed_by_another_thread_at_any_moment_ends_in_order():
    def train():
        try:
            while True:
                assert pool(ONE, ROWS) == expected
                steps.release()
        except instep.PoolClosedError as error:
            errors.append(error)

    expected = toy(ONE, ROWS)
    for number in (1, 5, 20):
        steps, errors = threading.Semaphore(0), []
        pool = make(toy, workers=2, shards=3)
        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(number):
            steps.acquire()
        pool.close()
        for thread in threads:
            thread.join(10)
        assert len(errors) == 2


# After the end


def test_a_result_outlives_its_pool():
    pool = make(wide, workers=2)
    w = {"a": np.ones(600_003)}  # large: it lies where the workers put it
    _, grad = pool(w, ROWS)
    pool.close()
    del pool
    gc.collect()
    assert set(grad["a"]) == {6.5}
    grad["a"] += 1.0
    assert set(grad["a"]) == {7.5}
    del grad
    gc.collect()
    assert "memfd:instep" not in Path("/proc/self/maps").read_text()


def test_everything_of_a_closed_pool_says_so():
    pool = make(toy, workers=1)
    pool.close()
    for use in (
        lambda: pool(ONE, ROWS),
        lambda: pool.evaluate(ONE, ROWS),
        lambda: pool.check(ONE, ROWS),
        lambda: pool.resize(2),
    ):
        with pytest.raises(instep.PoolClosedError, match="closed"):
            use()
    assert pool.statistics().pids == ()
    assert pool.state_dict()["steps"] == 0
    with pool:
        pass  # as often as one likes
