"""What goes wrong in a worker costs no bit of the result, or ends in a clear error."""

from __future__ import annotations

import functools
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

import instep
from conftest import wait_until
from helpers import bits, both_engines, make, run_python, started, write_script
from instep.engines import processes
from instep.numpy import NumpyProgram
from losses import least_squares, toy, wide

ONE = np.float64(1)
ROWS = np.arange(1.0, 13.0)


def first_time(path):
    """True for the one process that calls it first; a file remembers it."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def template_of(pool):
    """The process that starts the workers."""
    template = psutil.Process(pool.statistics().pids[0]).parent()
    assert template.ppid() == os.getpid()
    return template


# An exception in the loss


def test_an_exception_ends_the_call_at_once_with_its_type_text_and_place(tmp_path):
    def fun(w, x):
        if x[0] == 5.0:
            raise ValueError("bad row 17")
        while len(x) > 2 and not (tmp_path / "over").exists():
            time.sleep(0.01)
        return toy(w, x)

    line = fun.__code__.co_firstlineno + 2
    with make(fun, workers=3, shards=3) as pool:
        started(pool, ONE, np.ones(1))
        with pytest.raises(ValueError, match="bad row 17") as caught:
            pool(ONE, ROWS)
        (tmp_path / "over").touch()  # until now the others have not answered
        assert str(caught.value) == "bad row 17"
        cause = str(caught.value.__cause__)
        assert f'test_faults.py", line {line}' in cause
        assert "shard 1 of 3, on worker 1" in cause
        if sys.version_info >= (3, 11):
            assert "shard 1 of 3" in caught.value.__notes__[0]
        assert pool(ONE, np.array([1.0, 3.0])) == (2.0, 2.0)
        assert pool.statistics().workers_lost == 0


@both_engines
def test_an_exception_whose_init_takes_other_arguments_keeps_type_and_state(engine):
    class RowError(Exception):
        def __init__(self, row, *, column):
            super().__init__(f"bad row {row}")
            self.column = column

    def fun(w, x):
        raise RowError(17, column=3)

    with make(fun, workers=1, engine=engine) as pool:
        with pytest.raises(RowError) as caught:
            pool(ONE, ROWS)
        assert str(caught.value) == "bad row 17"
        assert caught.value.column == 3


@pytest.mark.parametrize(
    "error",
    [
        KeyError("w"),
        OSError(2, "No such file", "data.npy"),
        UnicodeDecodeError("ascii", b"\xff", 0, 1, "not ASCII"),
        ZeroDivisionError("division by zero"),
        instep.GradientError("mine"),
        RuntimeError("two", ["arguments", 2]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_built_in_exceptions_arrive_as_they_were_raised(error):
    def fun(w, x):
        raise error

    with make(fun, workers=1) as pool:
        with pytest.raises(type(error)) as caught:
            pool(ONE, ROWS)
        assert str(caught.value) == str(error)
        assert caught.value.args == error.args


def test_an_exception_whose_init_writes_the_text_keeps_it():
    class CodeError(Exception):
        def __init__(self, code):
            super().__init__(f"failed with {code}")

    def fun(w, x):
        raise CodeError(17)

    with make(fun, workers=1) as pool:
        with pytest.raises(CodeError) as caught:
            pool(ONE, ROWS)
        assert str(caught.value) == "failed with 17"


def test_an_exception_that_holds_an_array_and_an_object_keeps_its_type():
    class Row:
        pass

    def fun(w, x):
        raise LookupError(x, Row())

    with make(fun, workers=1) as pool:
        with pytest.raises(LookupError) as caught:
            pool(ONE, ROWS)
        assert caught.value.args[0].tolist() == ROWS.tolist()


@both_engines
def test_aux_that_cannot_travel_is_an_error_of_that_shard(engine):
    def fun(w, x):
        return (0.0, threading.Lock() if len(x) > 2 else None), w * 0

    with make(fun, workers=1, has_aux=True, engine=engine) as pool:
        with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock'"):
            pool(ONE, ROWS)
        assert pool(ONE, np.ones(1)) == ((0.0, None), 0.0)


def test_aux_without_room_is_an_error_of_that_shard():
    def fun(w, x):
        if len(x) > 2:  # this process may make no file of more than a page
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
        return (0.0, np.zeros((len(x), 10_000))), w * 0

    with make(fun, workers=1, has_aux=True) as pool:
        assert pool(ONE, np.ones(1))[0][1].shape == (1, 10_000)
        with pytest.raises(OSError, match="File too large") as caught:
            pool(ONE, ROWS)
        assert "shard 0 of 1" in str(caught.value.__cause__)
        assert pool(ONE, np.ones(1))[0][1].shape == (1, 10_000)


def test_an_exception_that_cannot_travel_is_quoted():
    def fun(w, x):
        error = ValueError("bad row 17")
        error.lock = threading.Lock()
        raise error

    with (
        make(fun, workers=1) as pool,
        pytest.raises(instep.WorkerError, match=r"ValueError: bad row 17"),
    ):
        pool(ONE, ROWS)


@both_engines
def test_sys_exit_in_the_loss_is_raised_in_the_master(engine):
    def fun(w, x):
        if len(x) == 1:
            sys.exit(3)
        return toy(w, x)

    with make(fun, workers=2, shards=2, engine=engine) as pool:
        with pytest.raises(SystemExit) as caught:
            pool(ONE, np.ones(2))
        assert caught.value.code == 3
        assert pool(ONE, np.ones(4)) == (1.0, 1.0)


# A worker that dies


def train(pool, steps=6):
    """SGD with momentum; the parameters after some steps."""
    generator = np.random.default_rng(2)
    x, y = generator.normal(size=(50, 3)), generator.normal(size=50)
    w, velocity = np.zeros(3), np.zeros(3)
    for step in range(steps):
        _, grad = pool(w, x, y, step)
        velocity = 0.9 * velocity + grad
        w = w - 0.1 * velocity
    return bits(w)


def test_a_worker_killed_in_mid_step_costs_no_bit(tmp_path):
    def undisturbed(w, x, y, step):
        return least_squares(w, x, y)

    def disturbed(w, x, y, step):
        if step == 3 and first_time(tmp_path / "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return least_squares(w, x, y)

    with make(undisturbed, workers=3, shards=3) as pool:
        expected = train(pool)
    with make(disturbed, workers=3, shards=3) as pool:
        assert train(pool) == expected
        statistics = pool.statistics()
        assert (statistics.workers_lost, statistics.shards_recomputed) == (1, 1)


def test_a_shard_that_ends_every_worker_is_an_error_that_says_so():
    def fun(w, x):
        if x[0] == 5.0:
            os._exit(3)
        return toy(w, x)

    with make(fun, workers=2, shards=3, retries=1) as pool:
        with pytest.raises(instep.WorkerLostError) as caught:
            pool(ONE, ROWS)
        text = str(caught.value)
        assert "shard 1 of 3" in text
        assert "exit code 3" in text
        assert "shards=6" in text
        assert pool(ONE, np.array([1.0, 3.0])) == (2.0, 2.0)
        assert pool.statistics().workers_lost == 2


def test_workers_killed_between_steps_are_replaced():
    with make(toy, workers=3, shards=4) as pool:
        expected = started(pool, ONE, ROWS)(ONE, ROWS)
        old = pool.statistics().pids
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        assert pool(ONE, ROWS) == expected
        started(pool, ONE, ROWS)
        assert not set(old) & set(pool.statistics().pids)
        assert pool.statistics().workers_lost == 3


def test_the_pool_survives_the_end_of_the_template():
    with make(toy, workers=2, shards=4) as pool:
        expected = started(pool, ONE, ROWS)(ONE, ROWS)
        for _ in range(2):
            old = set(pool.statistics().pids)
            template_of(pool).kill()
            wait_until(
                lambda old=old: (
                    pool(ONE, ROWS) == expected
                    and not old & set(pool.statistics().pids)
                ),
                "the end of the template is not noticed",
            )
            started(pool, ONE, ROWS)


def test_a_worker_that_dies_while_averaging_costs_no_bit(tmp_path):
    def fun(w, x):
        if first_time(tmp_path / "armed"):
            # The alarm ends this worker some time after its shard, or never.
            signal.setitimer(signal.ITIMER_REAL, 0.02)
        return wide(w, x)

    w = {"a": np.linspace(0, 1, 1_000_003), "b": np.ones(65, np.float32)}
    with make(wide, shards=4, engine="serial") as pool:
        expected = bits(pool(w, ROWS))
    with make(fun, workers=2, shards=4) as pool:
        for _ in range(10):
            assert bits(pool(w, ROWS)) == expected


def test_a_worker_that_stops_while_averaging_is_replaced():
    w = {"a": np.linspace(0, 1, 1_000_003)}
    with make(wide, workers=3, shards=2, timeout=1.0) as pool:
        expected = bits(started(pool, w, ROWS)(w, ROWS))
        while len(pool._engine.idle()) < 3:
            pool(w, ROWS)
        # It has the longest been idle when the two who compute have answered.
        pid = pool._engine._seats[pool._engine.idle()[2]].pid
        os.kill(pid, signal.SIGSTOP)
        assert bits(pool(w, ROWS)) == expected  # the master averages
        assert pool.statistics().workers_lost == 0
        assert pid in pool.statistics().pids
        wait_until(
            lambda: (
                bits(pool(w, ROWS)) == expected and pool.statistics().workers_lost == 1
            ),
            "the stopped worker is not replaced",
        )
        assert pid not in pool.statistics().pids


# A worker that hangs


@pytest.mark.parametrize(
    ("workers", "timeout", "counter"),
    [(2, None, "shards_late"), (1, 1.0, "shards_recomputed")],
)
def test_a_shard_that_hangs_once_is_computed_by_another_or_the_next(
    tmp_path, workers, timeout, counter
):
    def fun(w, x):
        if x[0] == 5.0 and first_time(tmp_path / "slept"):
            time.sleep(1e6)
        return toy(w, x)

    with make(fun, workers=workers, shards=3, timeout=timeout) as pool:
        assert pool(ONE, ROWS) == toy(ONE, ROWS)
        # Once, unless the machine lets another shard wait that long, too.
        assert getattr(pool.statistics(), counter) >= 1


def test_a_late_shard_is_computed_by_an_idle_worker_too(tmp_path):
    def fun(w, x):
        if x[0] == 1.0 and first_time(tmp_path / "waits"):
            while not (tmp_path / "goes on").exists():
                time.sleep(0.01)
        return toy(w, x)

    with make(toy, shards=4, engine="serial") as serial:
        expected = bits(serial(ONE, ROWS))
    with make(fun, workers=2, shards=4) as pool:
        assert bits(pool(ONE, ROWS)) == expected
        # Once, unless the machine lets another shard wait, too.
        assert pool.statistics().shards_late >= 1
        # The one who was late answers to a call that is over, and joins in again.
        (tmp_path / "goes on").touch()
        wait_until(
            lambda: (
                bits(pool(ONE, ROWS)) == expected
                and min(pool.statistics().shards_computed) > 0
            ),
            "the late worker does not come back",
        )
        assert pool.statistics().workers_lost == 0


def test_a_shard_that_always_hangs_is_a_timeout_that_names_it():
    def fun(w, x):
        if x[0] == 5.0:
            time.sleep(1e6)
        return toy(w, x)

    with make(fun, workers=2, shards=3, timeout=0.7, retries=1) as pool:
        with pytest.raises(TimeoutError) as caught:
            pool(ONE, ROWS)
        assert isinstance(caught.value, instep.ShardTimeoutError)
        assert "shard 1 of 3" in str(caught.value)
        assert "timeout=0.7 s" in str(caught.value)
        assert "Worker " in str(caught.value)
        assert pool(ONE, np.array([1.0, 3.0])) == (2.0, 2.0)


def test_a_stopped_worker_is_replaced_after_the_timeout():
    with make(toy, workers=2, shards=4, timeout=1.0) as pool:
        expected = started(pool, ONE, ROWS)(ONE, ROWS)
        os.kill(pool.statistics().pids[0], signal.SIGSTOP)
        wait_until(
            lambda: pool(ONE, ROWS) == expected and pool.statistics().workers_lost == 1,
            "the stopped worker is not replaced",
        )


# A worker that does not start


class EndsAtArrival:
    """Ends the process that unpickles it, or raises there."""

    def __init__(self, status):
        self.status = status

    def __getstate__(self):
        return {"status": self.status}

    def __setstate__(self, state):
        if state["status"] is None:
            raise RuntimeError("cannot be unpacked here")
        os._exit(state["status"])

    def __call__(self, w, x):
        return toy(w, x)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_that_end_while_starting_are_an_error_not_a_loop(workers):
    with make(EndsAtArrival(5), workers=workers) as pool:
        with pytest.raises(instep.StartError, match="exit code 5"):
            pool(ONE, ROWS)
        with pytest.raises(instep.PoolBrokenError, match="exit code 5"):
            pool(ONE, ROWS)
        assert pool.statistics().pids == ()


class TrapAtArrival:
    """Hangs, or ends the process, where it is unpickled while its file is there."""

    def __init__(self, path, hangs):
        self.path, self.hangs = path, hangs

    def __getstate__(self):
        return vars(self)

    def __setstate__(self, state):
        vars(self).update(state)
        while self.path.exists():
            if not self.hangs:
                os._exit(3)
            time.sleep(0.01)


@pytest.mark.parametrize("hangs", [True, False])
def test_successors_that_do_not_start_leave_the_others_at_work(
    monkeypatch, tmp_path, hangs
):
    trap = TrapAtArrival(tmp_path / "trap", hangs)

    def fun(w, x):
        assert trap
        return toy(w, x)

    with make(fun, workers=2, shards=4) as pool:
        expected = started(pool, ONE, ROWS)(ONE, ROWS)
        trap.path.touch()
        monkeypatch.setattr(processes, "START_TIMEOUT_S", 0.3)
        os.kill(pool.statistics().pids[0], signal.SIGKILL)
        wait_until(
            lambda: pool(ONE, ROWS) == expected and pool.statistics().workers_lost >= 3,
            "the successor is not given up",
        )
        for _ in range(10):
            assert pool(ONE, ROWS) == expected
        monkeypatch.undo()
        trap.path.unlink()
        assert started(pool, ONE, ROWS)(ONE, ROWS) == expected


def test_an_exception_at_the_start_arrives_with_its_traceback():
    with make(EndsAtArrival(None), workers=2) as pool:
        with pytest.raises(instep.StartError, match="cannot be unpacked") as caught:
            pool(ONE, ROWS)
        assert "in __setstate__" in str(caught.value.__cause__)
        with pytest.raises(instep.PoolBrokenError):
            pool(ONE, ROWS)


# What cannot be sent


def test_functions_of_every_kind_are_sent():
    offset = np.arange(3.0)

    def closure(w, x):
        return np.mean(x) + offset.sum(), np.mean(x) * w

    class Local:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, w, x):
            return self.factor * np.mean(x), np.mean(x) * w

    def scaled(factor, w, x):
        return factor * np.mean(x), np.mean(x) * w

    functions = [
        closure,
        Local(2.0),
        functools.partial(scaled, 2.0),
        lambda w, x: (np.mean(x), np.mean(x) * w),
    ]
    for fun in functions:
        with make(fun, workers=1, shards=2) as pool:
            assert pool(ONE, ROWS) == fun(ONE, ROWS)


@both_engines
@pytest.mark.parametrize("kind", ["closure", "partial", "attribute"])
def test_what_cannot_be_sent_is_named(engine, kind):
    lock = threading.Lock()

    def closure(w, x):
        with lock:
            return toy(w, x)

    def locked(w, x, lock):
        return toy(w, x)

    class Local:
        def __init__(self):
            self.lock = lock

        def __call__(self, w, x):
            return toy(w, x)

    fun = {
        "closure": closure,
        "partial": functools.partial(locked, lock=lock),
        "attribute": Local(),
    }[kind]
    with pytest.raises(instep.ShipError, match=r"`lock`, a _thread\.lock"):
        make(fun, workers=1, engine=engine)


def test_a_batch_that_cannot_be_sent_is_an_error():
    with make(toy, workers=1) as pool:
        with pytest.raises(instep.ShipError, match=r"batch\[1\]"):
            pool(ONE, ROWS, [threading.Lock() for _ in ROWS])
        assert pool(ONE, ROWS) == toy(ONE, ROWS)


# Sizes


def test_sizes_around_pages_and_a_mebibyte_have_the_serial_bits():
    def fun(w, x):
        return x.mean(), w * x.mean()

    sizes = [1, 511, 512, 513, 131_071, 3, 131_072, 131_073, 1023, 1024, 0]
    with (
        make(fun, workers=2, shards=3) as pool,
        make(fun, shards=3, engine="serial") as serial,
    ):
        for size in sizes:
            w, x = np.linspace(0, 1, size), np.linspace(1, 2, max(size, 7))
            assert bits(pool(w, x)) == bits(serial(w, x))


# The end of a pool


@both_engines
def test_a_closed_pool_says_so_and_closes_twice(engine):
    pool = make(toy, workers=1, engine=engine)
    pool(ONE, ROWS)
    pool.close()
    pool.close()
    with pytest.raises(instep.PoolClosedError, match="closed"):
        pool(ONE, ROWS)
    assert pool.statistics().steps == 1
    assert pool.statistics().pids == ()


def test_closing_leaves_nothing_though_the_pool_is_still_referred_to():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before, processes_before = descriptors(), children()
    pool = make(wide, workers=2, shards=3)
    pool({"a": np.ones(600_000)}, ROWS)
    pool.close()
    assert descriptors() == before
    assert children() == processes_before


def test_a_forgotten_pool_ends_its_workers():
    before = children()
    pool = started(make(toy, workers=2), ONE, ROWS)
    assert children() != before
    del pool
    gc.collect()
    wait_until(lambda: children() <= before, "a forgotten pool left its workers")


def test_a_pool_that_is_closed_at_once_leaves_nothing():
    for _ in range(3):
        make(toy, workers=2).close()


def test_a_pool_is_closed_while_its_workers_compute(tmp_path):
    def fun(w, x):
        (tmp_path / "begun").touch()
        time.sleep(1e6)

    pool = make(fun, workers=2, shards=2, timeout=0.7, retries=0)
    with pytest.raises(instep.ShardTimeoutError):
        pool(ONE, ROWS)
    template = pool._engine._template
    pool.close()
    assert template.returncode == 0  # it ended by itself, not after a grace period


def test_a_pool_is_used_from_another_thread():
    results = []
    with make(toy, workers=2, shards=3) as pool:
        threads = [
            threading.Thread(target=lambda: results.append(pool(ONE, ROWS)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [toy(ONE, ROWS)] * 4


def test_a_pool_made_in_a_thread_outlives_the_thread():
    pools = []
    thread = threading.Thread(target=lambda: pools.append(make(toy, workers=1)))
    thread.start()
    thread.join()
    with pools[0] as pool:
        assert pool(ONE, ROWS) == toy(ONE, ROWS)


# The end of the master

LOOP = """
import pathlib, sys, time
import numpy as np
import instep

def fun(w, x):
    (pathlib.Path(sys.argv[1]) / f"begun {x[0]}").touch()
    time.sleep(1e6)

pool = instep.numpy.value_and_grad(fun, workers=2)
pool(1.0, np.arange(2.0))
"""


def start_and_interrupt(folder, number):
    """Sends a signal to a script in mid-step; how it ended, and its processes."""
    script = write_script(folder, LOOP.replace("sys.argv[1]", repr(str(folder))))
    master = psutil.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True)
    wait_until(
        lambda: len(list(folder.glob("begun *"))) == 2, "the step never began", 30
    )
    family = master.children(recursive=True)
    assert len(family) == 3
    master.send_signal(number)
    errors = master.communicate(timeout=20)[1]
    wait_until(
        lambda: not any(child.is_running() for child in family), "a child is left"
    )
    return master.returncode, errors


def test_an_interrupt_in_mid_step_is_raised_once_and_ends_the_workers(tmp_path):
    status, errors = start_and_interrupt(tmp_path, signal.SIGINT)
    assert status != 0
    assert errors.count("KeyboardInterrupt\n") == 1
    assert errors.count("Traceback") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_workers_end_with_the_master(tmp_path, number):
    assert start_and_interrupt(tmp_path, number) == (-number, "")


def test_the_pool_works_on_after_an_interrupt(tmp_path):
    def fun(w, x):
        if first_time(tmp_path / "interrupted"):
            os.kill(master, signal.SIGINT)
            time.sleep(1e6)
        return toy(w, x)

    master = os.getpid()
    with make(fun, workers=2, shards=2) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool(ONE, ROWS)
        assert pool(ONE, ROWS) == toy(ONE, ROWS)


FORK = """
import os
import numpy as np
import instep

def fun(w, x):
    return np.mean(w * x), np.mean(x)

pool = instep.numpy.value_and_grad(fun, workers=2)
assert pool(1.0, np.arange(3.0)) == (1.0, 1.0)
read_end, write_end = os.pipe()
pid = os.fork()
if pid == 0:
    try:
        pool(1.0, np.arange(3.0))
    except instep.PoolClosedError as error:
        assert "fork" in str(error)
    else:
        raise AssertionError("the fork used its parent's pool")
    os.close(write_end)
    os.read(read_end, 1)  # lives until the pool is closed
    raise SystemExit(0)
assert pool(1.0, np.arange(3.0)) == (1.0, 1.0)
template = pool._engine._template
pool.close()
assert template.returncode == 0, "the fork keeps the pool from closing"
os.write(write_end, b"x")
assert os.waitpid(pid, 0)[1] == 0
"""


def test_a_fork_of_the_master_leaves_the_pool_alone(tmp_path):
    result = run_python(write_script(tmp_path, FORK))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_lines_of_the_loss_are_in_the_traceback_of_a_script(tmp_path):
    script = write_script(
        tmp_path,
        """
        import numpy as np
        import instep

        class RowError(Exception):
            def __init__(self, row, column):
                super().__init__(f"bad row {row}")

        def fun(w, x):
            raise RowError(17, 3)

        with instep.numpy.value_and_grad(fun, workers=2) as pool:
            try:
                pool(1.0, np.arange(4.0))
            except RowError:
                print("caught")
            pool(1.0, np.arange(4.0))
        """,
    )
    result = run_python(script)
    assert (result.returncode, result.stdout) == (1, "caught\n")
    line = script.read_text().splitlines().index("    raise RowError(17, 3)") + 1
    assert f'script.py", line {line}, in fun\n    raise RowError' in result.stderr
    assert result.stderr.rstrip().splitlines()[-2].startswith("RowError: bad row 17")


def test_another_program_gets_new_workers_of_the_same_template():
    with make(toy, workers=2, shards=2) as pool:
        started(pool, ONE, ROWS)
        before, template = pool.statistics().pids, template_of(pool)
        pool._ship(NumpyProgram(lambda w, x: (x.sum(), w), has_aux=False))
        started(pool, ONE, ROWS)
        assert pool(ONE, ROWS) == (39.0, 1.0)  # (21 + 57) / 2
        assert not set(before) & set(pool.statistics().pids)
        assert template_of(pool) == template
