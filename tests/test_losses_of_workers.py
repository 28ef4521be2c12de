"""A worker that ends, at any moment and in any way, costs no bit of the result."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
import termios
import threading
import time

import numpy as np
import psutil
import pytest

import faults
import instep
from conftest import wait_until
from faults import HANGS, MOMENTS, WAYS, EndsItsReader, EndsWhenItArrives, mark
from helpers import bits, make, started
from instep._options import Options
from instep.engines import processes
from instep.numpy import GradientPool, NumpyProgram
from losses import least_squares, toy, wide

ONE = np.float64(1)
ROWS = np.arange(1.0, 14.0)
WIDE = {"a": np.linspace(0, 1, 600_003)}  # more than 4 MiB: the workers average


def serial_bits(fun, *arguments, shards):
    with make(fun, shards=shards, engine="serial") as pool:
        return bits(pool(*arguments))


def step_until(condition, step, problem):
    """Steps until a condition holds that another process brings about."""
    wait_until(lambda: step() and condition(), problem, 20)


# In any way


@pytest.mark.parametrize("way", WAYS)
def test_workers_that_end_in_mid_step_cost_no_bit(tmp_path, way):
    expected = serial_bits(wide, WIDE, ROWS, shards=6)
    with make(faults.fragile, workers=3, shards=6, retries=9) as pool:
        for number in (1, 2, 3):  # all at once, the last time
            doomed = mark(tmp_path, number)
            assert bits(pool(WIDE, ROWS, doomed, way)) == expected
            assert not list(tmp_path.iterdir())
        step_until(
            lambda: pool.statistics().workers_lost == 6,
            lambda: bits(pool(WIDE, ROWS, str(tmp_path), way)) == expected,
            "not every loss is counted",
        )


def test_a_shard_that_ends_every_worker_is_an_error_with_the_signal(tmp_path):
    expected = serial_bits(wide, WIDE, ROWS, shards=2)
    with make(faults.fragile, workers=1, shards=2, retries=0) as pool:
        for way, how in [
            ("segfaults", r"11 \(SIGSEGV\)"),
            ("killed", r"9 \(SIGKILL\)"),
        ]:
            with pytest.raises(instep.WorkerLostError, match=how) as caught:
                pool(WIDE, ROWS, mark(tmp_path, 1), way)
            assert "Worker 0" in str(caught.value)
            assert "shard 0 of 2" in str(caught.value)
            assert bits(pool(WIDE, ROWS, str(tmp_path), way)) == expected


def test_a_worker_that_ends_in_every_step_costs_no_bit(tmp_path):
    def fun(w, x, y, folder):
        if faults.is_doomed(folder):
            faults.killed()
        return least_squares(w, x, y)

    generator = np.random.default_rng(2)
    x, y = generator.normal(size=(50, 3)), generator.normal(size=50)

    def train(pool, number):
        w = np.zeros(3)
        for _ in range(20):
            w = w - 0.1 * pool(w, x, y, mark(tmp_path, number))[1]
        return bits(w)

    with make(fun, shards=4, engine="serial") as serial:
        expected = train(serial, 0)
    with make(fun, workers=2, shards=4, retries=20) as pool:
        assert train(pool, 1) == expected
        assert pool.statistics().shards_recomputed >= 19


# At any moment


@pytest.mark.parametrize("moment", MOMENTS)
def test_workers_that_end_at_any_moment_cost_no_bit(tmp_path, moment):
    expected = serial_bits(wide, WIDE, ROWS, shards=4)
    with make(faults.fragile_at, workers=2, shards=4, retries=9) as pool:
        started(pool, WIDE, ROWS, str(tmp_path), moment)
        for lost, number in ((1, 1), (3, 2)):
            doomed = mark(tmp_path, number)
            step_until(
                lambda lost=lost: pool.statistics().workers_lost == lost,
                lambda doomed=doomed: (
                    bits(pool(WIDE, ROWS, doomed, moment)) == expected
                ),
                "no worker was lost",
            )


def test_a_worker_that_ends_while_reading_the_batch_costs_no_bit(tmp_path):
    def fun(w, x, rows):
        return wide(w, x)

    expected = serial_bits(wide, WIDE, ROWS, shards=4)
    rows = [EndsItsReader(str(tmp_path)) for _ in ROWS]
    with make(fun, workers=2, shards=4, retries=9) as pool:
        started(pool, WIDE, ROWS, [0 for _ in ROWS])
        mark(tmp_path, 2)
        assert bits(pool(WIDE, ROWS, rows)) == expected
        assert not list(tmp_path.iterdir())


def test_a_worker_that_ends_between_two_steps_costs_no_bit():
    expected = serial_bits(wide, WIDE, ROWS, shards=4)
    with make(wide, workers=3, shards=4) as pool:
        for number in (1, 2, 3):
            started(pool, WIDE, ROWS)
            for pid in pool.statistics().pids[:number]:
                os.kill(pid, signal.SIGKILL)
            assert bits(pool(WIDE, ROWS)) == expected


# The process that starts the workers


def test_the_template_may_end_in_mid_step(tmp_path):
    def fun(w, x, folder):
        if faults.is_doomed(folder):
            os.kill(os.getppid(), signal.SIGKILL)
        return wide(w, x)

    expected = serial_bits(wide, WIDE, ROWS, shards=4)
    with make(fun, workers=2, shards=4, retries=9) as pool:
        for _ in range(2):
            assert bits(pool(WIDE, ROWS, mark(tmp_path, 1))) == expected
        step_until(
            lambda: len(pool.statistics().pids) == 2,
            lambda: bits(pool(WIDE, ROWS, str(tmp_path))) == expected,
            "the workers do not come back",
        )


def test_the_end_of_the_template_is_seen_though_a_child_of_a_worker_lives(tmp_path):
    def fun(w, x, path):
        if path and os.fork() == 0:
            while not os.path.exists(path):
                time.sleep(0.01)
            os._exit(0)
        return toy(w, x)

    end = tmp_path / "end"
    with make(fun, workers=1) as pool:
        try:
            pool(ONE, ROWS, str(end))
            template = psutil.Process(pool.statistics().pids[0]).parent()
            family = template.children(recursive=True)
            template.kill()
            wait_until(
                lambda: not template.is_running() or template.status() == "zombie",
                "the template lives",
            )
            assert len(family) == 2
            late = threading.Timer(15, end.touch)
            late.start()
            assert pool(ONE, ROWS, "") == toy(ONE, ROWS)
            late.cancel()
            assert not end.exists(), "the step waited for the child to end"
        finally:
            end.touch()


# Workers that hang


@pytest.mark.parametrize("way", HANGS)
def test_workers_that_hang_in_mid_step_are_replaced_after_the_timeout(tmp_path, way):
    expected = serial_bits(wide, WIDE, ROWS, shards=4)
    options = {"workers": 2, "shards": 4, "retries": 9, "timeout": 1.0}
    with make(faults.fragile, **options) as pool:
        assert bits(pool(WIDE, ROWS, mark(tmp_path, 2), way)) == expected
        assert pool.statistics().workers_lost >= 2


def test_a_stopped_worker_holds_nobody_up_while_another_is_idle(tmp_path):
    expected = serial_bits(wide, WIDE, ROWS, shards=4)
    with make(faults.fragile, workers=2, shards=4) as pool:
        assert bits(pool(WIDE, ROWS, mark(tmp_path, 1), "stops")) == expected
        assert bits(pool(WIDE, ROWS, str(tmp_path), "stops")) == expected
        # Once, unless the machine lets another shard wait, too.
        assert pool.statistics().shards_late >= 1
        assert pool.statistics().workers_lost == 0


# Errors


def test_a_loss_without_memory_is_an_error_of_its_shard():
    def fun(w, x):
        if x[0] == 1.0:
            used = psutil.Process().memory_info().vms
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), most))
            np.ones(1 << 28)
        return toy(w, x)

    with make(fun, workers=2, shards=3) as pool:
        with pytest.raises(MemoryError, match=r"2\.00 GiB") as caught:
            pool(ONE, ROWS)
        assert "shard 0 of 3, on worker" in str(caught.value.__cause__)
        for _ in range(3):
            assert pool(ONE, ROWS[1:4]) == (3.0, 3.0)


def test_a_worker_without_memory_to_average_costs_no_bit():
    def fun(w, x, tight):
        if tight:  # the average needs a longer mapping than the shards
            used = psutil.Process().memory_info().vms
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), most))
        return np.mean(x), {"a": w["a"][:]}

    expected = serial_bits(fun, WIDE, ROWS, False, shards=2)
    with make(fun, workers=2, shards=2) as pool:
        held = pool(WIDE, ROWS, False)  # so that the next result lies elsewhere
        assert bits(pool(WIDE, ROWS, True)) == bits(held) == expected


class Unfinished(BaseException):
    """Not an Exception: `except Exception` in a loss lets it pass."""


def test_a_base_exception_of_a_shard_is_raised_and_the_pool_works_on():
    def fun(w, x, kind):
        if x[0] == 1.0:
            raise kinds[kind]("mine")
        return toy(w, x)

    kinds = [Unfinished, KeyboardInterrupt, GeneratorExit]
    with make(fun, workers=2, shards=3) as pool:
        for number, kind in enumerate(kinds):
            with pytest.raises(kind, match="mine") as caught:
                pool(ONE, ROWS, number)
            assert "shard 0 of 3" in str(caught.value.__cause__)
            assert pool(ONE, ROWS[1:4], number) == (3.0, 3.0)


def test_an_exception_without_a_text_keeps_its_type():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def fun(w, x):
        if x[0] == 1.0:
            raise Mute
        return toy(w, x)

    with make(fun, workers=1) as pool:
        with pytest.raises((Mute, instep.WorkerError)) as caught:
            pool(ONE, ROWS)
        assert "Mute" in str(caught.value.__cause__)
        assert pool(ONE, ROWS[1:4]) == (3.0, 3.0)


@pytest.mark.parametrize("has_aux", [False, True], ids=["exception", "aux"])
def test_what_only_a_worker_can_unpickle_is_an_error_of_its_shard(tmp_path, has_aux):
    (tmp_path / "only_there.py").write_text("class Odd(Exception):\n    pass\n")

    def fun(w, x):
        loss, grad = toy(w, x)
        odd = 0
        if len(x) > 2:
            sys.path.insert(0, str(tmp_path))
            from only_there import Odd

            odd = Odd("bad row")
            if not has_aux:
                raise odd
        return ((loss, [odd] * len(x)) if has_aux else loss), grad

    with make(fun, workers=2, has_aux=has_aux) as pool:
        small = pool(ONE, ROWS[:2])
        for _ in range(3):
            with pytest.raises(Exception, match=r"only_there|bad row") as caught:
                pool(ONE, ROWS)
            assert "of 2, on worker" in str(caught.value.__cause__)
            assert pool(ONE, ROWS[:2]) == small
        assert pool.statistics().workers_lost == 0


# Reports that come together


class Held:
    """Has the master read its reports only when there are several."""

    def __init__(self, monkeypatch):
        self.number = 0
        receive = processes.Processes._receive

        def wait_and_receive(engine, timeout):
            while timeout != 0 and self.number:
                wait_until(lambda: self.waiting(engine) > 0, "no report")
                if self.waiting(engine) < self.number:
                    self.then()
                    wait_until(lambda: self.waiting(engine) >= self.number, "too few")
                self.number = 0
            receive(engine, timeout)

        monkeypatch.setattr(processes.Processes, "_receive", wait_and_receive)

    @staticmethod
    def waiting(engine):
        size = fcntl.ioctl(engine._reports, termios.FIONREAD, bytes(4))
        return int.from_bytes(size, sys.byteorder) // processes.REPORT_NBYTES


def test_a_worker_that_raises_and_then_ends_is_replaced(tmp_path, monkeypatch):
    def fun(w, x):
        if len(x) > 2:

            def end():
                wait_until((tmp_path / "end").exists, "not ended")
                faults.exits()

            threading.Thread(target=end).start()
            raise ValueError("bad row 17")
        return toy(w, x)

    with make(fun, workers=1) as pool:
        started(pool, ONE, ROWS[:2])
        held = Held(monkeypatch)
        held.number, held.then = 2, (tmp_path / "end").touch
        with pytest.raises(ValueError, match="bad row 17"):
            pool(ONE, ROWS)
        assert pool(ONE, ROWS[:2]) == toy(ONE, ROWS[:2])


def test_all_workers_that_end_at_once_are_replaced_though_the_step_failed(
    tmp_path, monkeypatch
):
    with make(faults.fragile, workers=2, retries=0) as pool:
        started(pool, WIDE, ROWS, str(tmp_path), "killed")
        held = Held(monkeypatch)
        held.number, held.then = 2, lambda: None
        with pytest.raises(instep.WorkerLostError, match="SIGKILL"):
            pool(WIDE, ROWS, mark(tmp_path, 2), "killed")
        started(pool, WIDE, ROWS, str(tmp_path), "killed")
        assert pool.statistics().workers_lost == 2


# While starting


def test_workers_that_end_while_unpickling_the_loss_are_started_again(tmp_path):
    expected = serial_bits(wide, WIDE, ROWS, shards=4)
    loss = EndsWhenItArrives(mark(tmp_path, 2))
    with make(loss, workers=2, shards=4) as pool:
        assert bits(pool(WIDE, ROWS)) == expected
        started(pool, WIDE, ROWS)
        assert pool.statistics().workers_lost == 2


def test_workers_that_end_before_they_have_replaced_another_cost_no_bit(tmp_path):
    expected = serial_bits(wide, WIDE, ROWS, shards=4)
    loss = EndsWhenItArrives(str(tmp_path))
    with make(loss, workers=2, shards=4) as pool:
        started(pool, WIDE, ROWS)
        mark(tmp_path, 2)
        for pid in pool.statistics().pids:
            os.kill(pid, signal.SIGKILL)
        assert bits(pool(WIDE, ROWS)) == expected
        started(pool, WIDE, ROWS)
        assert pool.statistics().workers_lost == 4


def framework_pool(folder, monkeypatch, text):
    """A pool whose framework is a module with this text."""
    (folder / "framework.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    program = NumpyProgram(toy, False, ("numpy", "framework"))
    return GradientPool(program, Options.of(workers=2, shards=4))


def test_an_end_during_the_import_of_the_framework_costs_no_bit(tmp_path, monkeypatch):
    text = f"""
import os
try:
    os.unlink({str(tmp_path / "dies")!r})
except FileNotFoundError:
    pass
else:
    os.kill(os.getpid(), 9)
"""
    (tmp_path / "dies").touch()
    with framework_pool(tmp_path, monkeypatch, text) as pool:
        assert bits(pool(ONE, ROWS)) == serial_bits(toy, ONE, ROWS, shards=4)
    assert not (tmp_path / "dies").exists()


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("import os; os._exit(7)", "exit code 7"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("raise RuntimeError('broken installation')", "exit code 1"),
        ("while True: pass", r"no word .* for 1 s; its imports \(numpy, framework\)"),
    ],
    ids=["exits", "segfaults", "raises", "hangs"],
)
def test_a_framework_that_cannot_be_imported_is_an_error_not_a_loop(
    tmp_path, monkeypatch, capfd, text, how
):
    monkeypatch.setattr(processes, "START_TIMEOUT_S", 1.0)
    with framework_pool(tmp_path, monkeypatch, text) as pool:
        with pytest.raises(instep.StartError, match=how):
            pool(ONE, ROWS)
        with pytest.raises(instep.PoolBrokenError, match=how):
            pool(ONE, ROWS)
    if "raise" in text:
        assert "broken installation" in capfd.readouterr().err
