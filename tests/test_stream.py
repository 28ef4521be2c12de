"""Streams: one update per optimizer step, by the rules of a mode, in real processes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest

import instep
from conftest import wait_until
from helpers import bits, both_engines, make, started
from losses import least_squares, toy

X = np.random.default_rng(0).normal(size=(35, 3))
Y = X @ np.array([1.0, -2.0, 0.5])
ROWS = np.arange(1.0, 9.0)


def square(w, x):
    """(w - x)^2 / 2."""
    return np.mean((w - x) ** 2) / 2, np.asarray(np.mean(w - x))


def halves(number):
    """Batches of a regression, each with other rows."""
    order = np.random.default_rng(1).integers(len(X), size=(number, 10))
    return [(X[rows], Y[rows]) for rows in order]


def descended(pool, batches, mode, rate=0.1, **options):
    """The weights after gradient descent, and the updates."""
    w = np.zeros(3)
    updates = []
    for update in pool.stream(batches, mode, params=w, **options):
        w -= rate * update.grads
        updates.append(update)
    return w, updates


def by_calls(pool, batches, rate=0.1):
    w = np.zeros(3)
    for batch in batches:
        w = w - rate * pool(w, *batch)[1]
    return w


@both_engines
@pytest.mark.parametrize("mode", [instep.Synchronous(), instep.StaleSynchronous(0)])
def test_in_step_a_stream_gives_the_bits_of_calls(engine, mode):
    with make(least_squares, shards=3, engine="serial") as pool:
        expected = by_calls(pool, halves(6))
    with make(least_squares, workers=2, shards=3, engine=engine) as pool:
        w, updates = descended(pool, halves(6), mode)
        assert bits(w) == bits(expected)
        assert pool.statistics().steps == len(updates) == 6
        assert pool.statistics().bytes_moved > 6 * 3 * 8
        assert {(u.weight, u.staleness, u.dropped) for u in updates} == {(10.0, 0, ())}


def test_random_numbers_are_those_of_calls():
    def noisy(w, x):
        return np.mean(x) + np.random.random(), np.mean(x) * np.random.random(3)

    with make(noisy, workers=2, shards=4, seed=5) as pool:
        expected = [bits(pool(np.ones(3), ROWS)) for _ in range(3)]
    with make(noisy, workers=3, shards=4, seed=5) as pool:
        stream = pool.stream([ROWS] * 3, params=np.ones(3))
        assert [bits((u.loss, u.grads)) for u in stream] == expected


@pytest.mark.parametrize(
    "mode",
    [
        instep.Asynchronous(),
        instep.Asynchronous(max_staleness=0),
        instep.Asynchronous(correction=instep.StalenessAware()),
        instep.Asynchronous(correction=instep.DelayCompensated(0.5)),
        instep.StaleSynchronous(2),
        instep.StaleSynchronous(float("inf")),
    ],
    ids=repr,
)
@both_engines
def test_one_worker_is_plain_sgd_bit_for_bit_in_every_mode(engine, mode):
    with make(least_squares, workers=1, engine="serial") as pool:
        expected = by_calls(pool, halves(6))
    with make(least_squares, workers=1, engine=engine) as pool:
        w, updates = descended(pool, halves(6), mode)
        assert bits(w) == bits(expected)
        assert {(u.weight, u.staleness, u.worker) for u in updates} == {(10.0, 0, 0)}


def test_strength_zero_is_no_correction_bit_for_bit(tmp_path):
    record = tmp_path / "run"
    with make(least_squares, workers=3) as pool:
        w, _ = descended(pool, halves(40), instep.Asynchronous(), record=record)
    text = record.read_text()
    none = instep.DelayCompensated(0.0)
    described = '{"name":"DelayCompensated","arguments":{"strength":0.0}}'
    assert repr(none) in repr(instep.Asynchronous(correction=none))
    record.write_text(text.replace('"correction":null', f'"correction":{described}'))
    with make(least_squares, workers=2) as pool:
        again, _ = descended(pool, halves(40), instep.Replay(record))
    assert bits(again) == bits(w)


def numbered(number):
    """So many batches of one row, which is the batch's number."""
    return np.arange(float(number))[:, None]


def wait_for_batch(folder, x, ahead):
    """In a loss of `numbered` batches: until so many more have begun.

    So batches are answered in the order in which they were begun, one at a time, with
    that many workers and one more.
    """
    (folder / f"{x[0]:.0f}").touch()
    while not (folder / f"{x[0] + ahead:.0f}").exists():
        time.sleep(0.001)


def test_the_sum_of_a_stale_gradient_and_its_correction(tmp_path):
    """Of h w^2 / 2, strength h / g^2 gives the gradient at the new parameters."""

    def steep(w, x):
        wait_for_batch(tmp_path, x, ahead=1)
        return 3 * w**2 / 2, 3 * w

    correction = instep.DelayCompensated(strength=3 / 36)  # g = 6 at w = 2
    mode = instep.Asynchronous(correction=correction)
    with make(steep, workers=2) as pool:
        w = np.array(2.0)
        stream = pool.stream(numbered(2), mode, params=w)
        first = next(stream)
        assert (first.grads, first.staleness) == (6.0, 0)
        w -= 0.25 * first.grads  # 0.5
        (tmp_path / "2").touch()
        second = next(stream)
    assert second.staleness == 1
    assert second.grads == pytest.approx(1.5, rel=1e-15)  # one rounding or two


def nap(w, x):
    """Sleeps for the first row's seconds."""
    time.sleep(x[0])
    return np.mean(x), np.asarray(w * 1.0)


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_equal_workers_settle_at_a_staleness_of_one_less_than_their_number(
    workers, tmp_path
):
    def equal(w, x):
        """Takes as long as every other worker needs to begin another batch."""
        wait_for_batch(tmp_path, x, ahead=workers - 1)
        return np.mean(x), np.asarray(w * 1.0)

    with make(equal, workers=workers) as pool:
        stream = pool.stream(numbered(99), instep.Asynchronous(), params=np.ones(2))
        updates = list(itertools.islice(stream, 20))
    assert [update.loss for update in updates] == list(range(20))
    expected = [min(number, workers - 1) for number in range(20)]
    assert [update.staleness for update in updates] == expected
    for update, later in zip(updates, updates[workers:], strict=False):
        assert update.worker == later.worker


def stops_once(w, x):
    """Stops its worker in the second of `numbered` batches."""
    if x[0] == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return np.mean(x), np.asarray(np.mean(x) + 0 * w)


class WhenAllWait(threading.Thread):
    """Lets a stopped worker go on once the others have nothing to do but wait for it.

    Args:
        pool: whose stream waits.
        look: is called before that; what it returns is `seen`.
    """

    def __init__(self, pool, look):
        super().__init__(daemon=True)
        self._engine, self._look = pool._engine, look
        self.start()

    def run(self):
        wait_until(self._is_moment, "the others do not come to a stop")
        self.seen = self._look()
        os.kill(self._pid, signal.SIGCONT)

    def _is_moment(self):
        engine, number = self._engine, self._engine._number
        busy = engine.busy()
        # If then the master waits and has given nobody a command since, nobody may
        # begin anything.
        if not engine._is_receiving or engine._number != number or len(busy) != 1:
            return False
        self._pid = engine._seats[busy[0]].pid
        return psutil.Process(self._pid).status() == psutil.STATUS_STOPPED


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_staleness_bound_is_kept_with_a_worker_that_is_stopped(limit):
    staleness, w = {}, np.array(1.0)
    with started(make(stops_once, workers=3), w, np.zeros(3)) as pool:
        mode = instep.Asynchronous(max_staleness=limit)
        others = WhenAllWait(pool, lambda: set(staleness))
        for update in pool.stream(numbered(30), mode, params=w):
            w -= 0.01 * update.grads
            staleness[int(update.loss)] = update.staleness
        others.join()
    assert others.seen >= {0}
    assert 1 not in others.seen
    assert staleness.keys() == set(range(30))
    assert staleness[1] == limit == max(staleness.values())


def whole(w, x):
    """An error where the parameters are torn: all entries of a version are equal."""
    if w.min() != w.max():
        raise ValueError("torn")
    return float(w[0]), np.ones_like(w)


def test_workers_never_read_parameters_that_are_being_written():
    w = np.zeros(3000)
    with make(whole, workers=3) as pool:  # with the master twice the cores
        batches = itertools.repeat(np.zeros(1), 10_000)
        for update in pool.stream(batches, instep.Asynchronous(), params=w):
            w += update.grads  # in place, while workers compute
    assert (w == 10_000).all()


def test_backup_shards_that_are_late_are_dropped_and_reported(tmp_path):
    def late(w, x):
        while x[-1] == 8 and not (tmp_path / "goes on").exists():
            time.sleep(0.001)
        return w * np.mean(x), np.asarray(np.mean(x))

    with started(make(late, workers=4), np.array(1.0), 0 * ROWS) as pool:
        mode = instep.Synchronous(backup=1)
        stream = pool.stream([ROWS, ROWS], mode, params=np.array(1.0))
        for update in itertools.islice(stream, 2):
            assert (update.loss, update.grads, update.weight) == (3.5, 3.5, 6.0)
            assert update.dropped == (6, 7)
        (tmp_path / "goes on").touch()
        assert list(stream) == []
        assert pool(np.array(1.0), ROWS) == (4.5, 4.5)  # the late ones do no harm


def test_a_short_batch_keeps_at_least_one_shard():
    with make(toy, workers=2, shards=4) as pool:
        mode = instep.Synchronous(backup=3)
        (update,) = pool.stream([ROWS[:2]], mode, params=np.array(1.0))
    assert update.weight == 1.0
    assert len(update.dropped) == 1


def slow_when_marked(w, x):
    time.sleep(float(x[0]))
    return float(np.mean(x)), w * 1.0 + x[-1]


def test_a_recorded_run_has_the_same_bits_on_any_number_of_workers(tmp_path):
    naps = np.random.default_rng(2).uniform(0, 0.002, 500)
    batches = [np.array([nap, k % 7]) for k, nap in enumerate(naps)]

    def run(pool, mode, **options):
        w = np.linspace(0, 1, 50)
        for update in pool.stream(batches, mode, params=w, **options):
            w -= 0.05 * update.grads
        return bits(w)

    record = tmp_path / "run.jsonl"
    mode = instep.Asynchronous(correction=instep.DelayCompensated(0.1, adaptive=True))
    with make(slow_when_marked, workers=4, seed=3) as pool:
        expected = run(pool, mode, record=record)
    assert len(record.read_text().splitlines()) == 1 + len(batches)
    for workers, engine in (
        (1, "processes"),
        (2, "processes"),
        (4, "processes"),
        (1, "serial"),
    ):
        with make(slow_when_marked, workers=workers, engine=engine) as pool:
            pool(np.zeros(50), np.zeros(4))  # steps and seed are those of the record
            assert run(pool, instep.Replay(record)) == expected


def test_which_backup_shards_were_dropped_is_replayed(tmp_path):
    record = tmp_path / "run"
    with make(least_squares, workers=3, shards=5) as pool:
        mode = instep.Synchronous(backup=2)
        w, updates = descended(pool, halves(12), mode, record=record)
    with make(least_squares, workers=1) as pool:
        again, replayed = descended(pool, halves(12), instep.Replay(record))
    assert bits(again) == bits(w)
    assert [u.dropped for u in replayed] == [u.dropped for u in updates]
    assert all(u.weight == 6.0 and len(u.dropped) == 4 for u in updates)


@both_engines
def test_one_local_step_is_the_synchronous_step(engine):
    rows = np.arange(1.0, 6.0)  # 3 + 2 rows
    with make(square, workers=2, engine=engine) as pool:
        w = np.array(1.0)
        (update,) = pool.stream([rows], instep.Local(1, 0.1), params=w)
        w -= update.grads
    assert update.weight == 5.0
    assert w == pytest.approx(1.2, rel=1e-15)  # an average of parameters, rounded


def test_local_steps_average_how_far_each_shard_came():
    rows = np.array([2.0, 4.0])  # a row for each shard
    with make(square, workers=2) as pool:
        w = np.array(0.0)
        for update in pool.stream([rows, rows], instep.Local(2, 0.5), params=w):
            w -= update.grads
    assert w == (1.5 + 3.0) / 2  # each goes 3/4 of its way: 2, 4 -> 1.5, 3.0


def test_one_worker_with_plain_sgd_as_outer_optimizer_keeps_its_own_parameters():
    with make(square, workers=1) as pool:
        w = np.array(0.0)
        stream = pool.stream([ROWS] * 6, instep.Local(3, 0.25), params=w)
        for update in stream:
            w -= update.grads  # rate 1: the sign is that of a gradient
    expected = 0.0
    for _ in range(6):
        expected -= 0.25 * (expected - 4.5)
    assert w == pytest.approx(expected, rel=1e-14)  # old - (old - new) is rounded


class Momentum:
    """An optimizer with a state."""

    velocity = 0.0

    def __call__(self, w, grad):
        self.velocity = 0.5 * self.velocity + grad
        return w - 0.1 * self.velocity


@pytest.mark.parametrize(
    "mode",
    [
        instep.Local(2, Momentum()),
        instep.Local(2, 0.1, elastic=0.25),
        instep.Local(3, Momentum(), warmup=2),
    ],
    ids=["momentum", "elastic", "warmup"],
)
def test_local_steps_have_the_same_bits_on_any_number_of_workers(mode, tmp_path):
    def run(workers, engine="processes", doomed=False):
        with make(least_squares, workers=workers, shards=3, engine=engine) as pool:
            w, count = np.zeros(3), 0
            for update in pool.stream(halves(12), mode, params=w):
                w -= update.grads
                count += 1
                if doomed and count == 2:
                    os.kill(pool.statistics().pids[0], signal.SIGKILL)
        return bits(w), count

    expected = run(1, "serial")
    for workers in (1, 2, 3):
        assert run(workers) == expected
    assert run(2, doomed=True) == expected


def test_elastic_averaging_pulls_both_to_the_midpoint():
    with make(square, workers=1) as pool:
        w = np.array(0.0)
        mode = instep.Local(1, 0.5, elastic=0.5)
        (update,) = pool.stream([np.array([4.0])], mode, params=w)
        w -= update.grads
    assert w == 1.0  # x goes from 0 to 2, and both meet half-way


def test_elastic_averaging_adds_up_over_shards():
    with make(square, workers=2) as pool:
        w = np.array(0.0)
        mode = instep.Local(1, 0.5, elastic=0.25)
        (update,) = pool.stream([np.array([4.0, 8.0])], mode, params=w)
        w -= update.grads
    assert w == 0.25 * 2 + 0.25 * 4


def test_gathered_gradients_bring_the_master_where_the_worker_is():
    with make(square, workers=1) as pool:
        w = np.array(0.0)
        mode = instep.Asynchronous(push=3, rate=0.25)
        local = 0.0
        for update in pool.stream([ROWS] * 6, mode, params=w):
            w -= 0.25 * update.grads
            for _ in range(3):
                local -= 0.25 * (local - 4.5)
            assert w == pytest.approx(local, rel=1e-14)  # added in another order
        assert update.weight == 24.0


def test_a_worker_that_fetches_seldom_goes_on_with_its_own_parameters():
    with make(square, workers=1) as pool:
        w, seen = np.array(0.0), []
        mode = instep.Asynchronous(push=1, fetch=2, rate=0.5)
        for update in pool.stream([np.array([4.0])] * 4, mode, params=w):
            seen.append((float(update.grads), update.staleness))
            w += 1.0  # the master goes elsewhere
    # 0 -> 2 by itself; then from the master's 2 -> 3 by itself
    assert seen == [(-4.0, 0), (-2.0, 1), (-2.0, 0), (-1.0, 1)]


def test_a_warm_start_has_one_worker():
    with started(make(toy, workers=3), np.array(1.0), ROWS) as pool:
        mode = instep.Asynchronous(warm_start=5)
        stream = pool.stream([ROWS] * 12, mode, params=np.array(1.0))
        updates = list(stream)
    assert [u.staleness for u in updates[:5]] == [0] * 5


def die_once(w, x, folder):
    if x[0] == 3:
        mark = os.path.join(folder, "died")
        if not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return np.mean(x), np.asarray(w + x[0])


@pytest.mark.parametrize(
    "mode", [instep.Synchronous(), instep.Asynchronous()], ids=repr
)
def test_a_killed_worker_s_batch_is_computed_again(mode, tmp_path):
    with make(die_once, workers=2) as pool:
        batches = [(np.array([float(k), 0.0]), str(tmp_path)) for k in range(6)]
        updates = list(pool.stream(batches, mode, params=np.zeros(2)))
        assert pool.statistics().workers_lost == 1
        assert pool.statistics().shards_recomputed == 1
    assert sorted(float(u.loss) for u in updates) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


def test_a_batch_that_ends_every_worker_is_an_error_that_names_it():
    def fatal(w, x):
        if x[0] == 2:
            os._exit(7)
        return np.mean(x), w

    with make(fatal, workers=2, retries=1) as pool:
        stream = pool.stream(
            np.arange(4.0)[:, None], instep.Asynchronous(), params=np.ones(1)
        )
        with pytest.raises(instep.WorkerLostError, match=r"batch 2 \(exit code 7\)"):
            list(stream)
        assert list(stream) == []  # it has ended
        assert pool(np.ones(1), np.zeros(2))[0] == 0.0


def test_a_batch_that_takes_too_long_is_an_error_that_names_it():
    with make(nap, workers=1, timeout=0.2, retries=0) as pool:
        stream = pool.stream(
            [np.array([60.0])], instep.Asynchronous(), params=np.ones(1)
        )
        with pytest.raises(
            instep.ShardTimeoutError,
            match=r"timeout=0\.2 s for shard 0 of 1 of batch 0",
        ):
            next(stream)


def test_an_error_of_the_loss_is_raised_with_its_batch():
    def refuse(w, x):
        if x[0] == 1:
            raise KeyError("one")
        return np.mean(x), w

    with make(refuse, workers=2) as pool:
        stream = pool.stream(
            np.arange(4.0)[:, None], instep.Asynchronous(), params=np.ones(1)
        )
        with pytest.raises(KeyError, match="one") as caught:
            list(stream)
        assert "batch 1" in str(caught.value.__cause__)
        assert len(list(pool.stream([0 * ROWS] * 3, params=np.ones(1)))) == 3


def test_the_pool_works_on_between_updates():
    with make(toy, workers=2) as pool:
        for update in pool.stream(
            [ROWS] * 9, instep.Asynchronous(), params=np.array(1.0)
        ):
            assert pool.evaluate(np.array(2.0), ROWS) == 9.0
            assert update.loss == 4.5
            pool.resize(1 + int(update.staleness > 0))
        assert pool.statistics().steps == 9


def test_a_stream_that_is_left_gives_the_workers_back():
    with make(nap, workers=2) as pool:
        for _ in pool.stream(
            [np.array([0.01])] * 50, instep.Asynchronous(), params=np.ones(1)
        ):
            break
        assert pool(np.ones(2), np.zeros(2))[0] == 0.0
        with pool.stream(
            [ROWS * 0] * 5, instep.Asynchronous(), params=np.ones(1)
        ) as stream:
            next(stream)
        assert list(stream) == []
        assert len(list(pool.stream([ROWS * 0] * 5, params=np.ones(1)))) == 5


def test_batches_are_taken_when_they_are_wanted():
    taken = []

    def batches():
        for k in range(100):
            taken.append(k)
            yield ROWS

    with make(toy, workers=2) as pool:
        stream = pool.stream(batches(), instep.Asynchronous(), params=np.array(1.0))
        next(stream)
        stream.close()
    assert len(taken) <= 6


def test_batches_of_other_lengths_and_kinds():
    def count(w, fields):
        words = fields["words"]
        assert isinstance(words, list)
        return float(len(words)), np.asarray(float(len(words)) + 0 * w)

    batches = [({"words": ["a"] * n, "x": np.ones(n)},) for n in (5, 2, 9, 1, 64)]
    with make(count, workers=2) as pool:
        lengths = [len(batch[0]["words"]) for batch in batches]
        stream = pool.stream(batches, instep.Asynchronous(), params=np.array(1.0))
        assert sorted(update.loss for update in stream) == sorted(lengths)


def test_numbers_as_parameters_have_to_be_published():
    with make(toy, workers=1) as pool:
        w = 2.0
        stream = pool.stream([ROWS] * 3, instep.Asynchronous(), params=w)
        w -= 0.1 * next(stream).grads
        stream.publish(w)
        assert next(stream).loss == pytest.approx(w * 4.5, rel=1e-15)
        with pytest.raises(instep.ArgumentError, match="publish"):
            next(stream)


def test_what_is_wrong_is_said_at_once(tmp_path):
    with make(toy, workers=2) as pool:
        with pytest.raises(instep.ArgumentError, match=r"params=w"):
            next(pool.stream([ROWS]))
        with pytest.raises(instep.ArgumentError, match="mode='async'"):
            pool.stream([ROWS], "async", params=np.ones(1))
        with pytest.raises(instep.ArgumentError, match=r"instep\.Asynchronous\(\)"):
            pool.stream([ROWS], instep.Asynchronous, params=np.ones(1))
        with pytest.raises(instep.ArgumentError, match="backup=2 of 2 shards"):
            pool.stream([ROWS], instep.Synchronous(backup=2), params=np.ones(1))
        with pytest.raises(instep.ArgumentError, match="same bits every time"):
            pool.stream(
                [ROWS], instep.Local(1, 0.1), params=np.ones(1), record=tmp_path / "x"
            )
        assert not list(tmp_path.iterdir())
    with pytest.raises(instep.PoolClosedError):
        pool.stream([ROWS], params=np.ones(1))


def test_large_parameters_in_every_mode(tmp_path):
    def wide(w, x):
        return float(np.mean(x)), w * np.mean(x)

    w = np.linspace(0, 1, 600_003)
    with make(wide, workers=2) as pool:
        for mode in (instep.Synchronous(), instep.Asynchronous(), instep.Local(1, 0.1)):
            held = [u.grads for u in pool.stream([ROWS] * 4, mode, params=w)]
            scale = 0.1 * 4.5 if isinstance(mode, instep.Local) else 4.5
            for grads in held:
                assert np.abs(grads - w * scale).max() < 1e-14  # a rounding or two


def test_what_is_heard_while_workers_average_is_told_before_they_get_more():
    """Else an answer would be taken for that of the shard given since."""

    def flat(w, x):
        return float(np.mean(x)), np.full_like(w, np.mean(x))

    batches = [np.full(3, float(k)) for k in range(60)]
    with make(flat, workers=3) as pool:
        stream = pool.stream(batches, instep.Asynchronous(), params=np.ones(600_003))
        seen = []
        for update in stream:
            assert (update.grads == update.loss).all()
            seen.append(update.loss)
    assert sorted(seen) == [float(k) for k in range(60)]


def test_a_worker_that_was_heard_of_while_others_averaged_answers_all_the_same():
    with make(toy, workers=1, timeout=30) as pool:
        stream = pool.stream([ROWS], instep.Asynchronous(), params=1.0)
        while not pool._engine._pending:  # as averaging in the workers takes it in
            pool._engine._receive(1.0)
        assert [update.loss for update in stream] == [4.5]


def test_the_workers_that_wait_for_nothing_are_told_apart_from_the_dead():
    """Killing every worker of a stream ends in the same updates."""
    with started(make(nap, workers=2), np.ones(2), np.zeros(2)) as pool:
        stream = pool.stream(
            [np.array([0.02])] * 20, instep.Asynchronous(), params=np.ones(1)
        )
        seen = 0
        for _ in stream:
            seen += 1
            if seen == 5:
                for pid in pool.statistics().pids:
                    os.kill(pid, signal.SIGKILL)
        assert seen == 20
        wait_until(lambda: pool.statistics().workers_lost == 2, "a death is forgotten")


def adagrad(w, total, grad, gamma):
    """The master's optimizer in Dean et al. 2012, with nothing added to the root."""
    total += grad * grad
    w -= gamma * np.divide(grad, np.sqrt(total), where=total > 0, out=0 * grad)


def test_adagrad_on_the_master_with_one_worker_is_serial_adagrad():
    by_call, by_stream = np.zeros(3), np.zeros(3)
    total = np.zeros(3)
    with make(least_squares, workers=1) as pool:
        for batch in halves(8):
            adagrad(by_call, total, pool(by_call, *batch)[1], 0.1)
        total = np.zeros(3)
        stream = pool.stream(halves(8), instep.Asynchronous(), params=by_stream)
        for number, update in enumerate(stream):
            adagrad(by_stream, total, update.grads, 0.1)
            if number == 0:  # each weight moves by gamma, whatever its gradient
                assert np.abs(by_stream) == pytest.approx([0.1] * 3, rel=1e-15)
    assert bits(by_stream) == bits(by_call)


def test_local_steps_with_the_same_rows_on_all_workers_are_those_of_one():
    one, three = np.array(0.0), np.array(0.0)
    with make(square, workers=1) as pool:
        for update in pool.stream(
            [ROWS[:1] * 3] * 4, instep.Local(2, 0.25), params=one
        ):
            one -= update.grads
    with make(square, workers=3) as pool:
        rows = np.full(3, 3.0)
        for update in pool.stream([rows] * 4, instep.Local(2, 0.25), params=three):
            three -= update.grads
    assert one == pytest.approx(three, rel=1e-15)  # a mean of three equal numbers


def test_a_bound_on_batches_is_kept_with_a_worker_that_is_stopped():
    taken, rows = 0, 0.0

    def batches():
        nonlocal taken
        for number in range(20):
            taken += 1
            yield np.array([float(number), 0.0])  # a row for each shard

    with started(make(stops_once, workers=2), np.array(1.0), np.zeros(2)) as pool:
        others = WhenAllWait(pool, lambda: taken)
        stream = pool.stream(
            batches(), instep.StaleSynchronous(2), params=np.array(1.0)
        )
        for update in stream:
            rows += update.weight
        others.join()
    # Batch 0 is done, 1 to 3 are under way, and one is looked at.
    assert others.seen == 1 + 3 + 1
    assert (taken, rows) == (20, 40.0)


def test_ctrl_c_ends_a_stream_at_once_and_the_pool_works_on(tmp_path):
    master = os.getpid()

    def interrupting(w, x):
        if x[0] == 2:  # when both are under way
            while not (tmp_path / "1").exists():
                time.sleep(0.001)
            os.kill(master, signal.SIGINT)
        (tmp_path / f"{x[0]:.0f}").touch()
        time.sleep(1e6 * x[0])
        return np.mean(x), w

    with make(interrupting, workers=2) as pool:
        stream = pool.stream(numbered(3)[1:], instep.Asynchronous(), params=np.ones(1))
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        assert list(stream) == []
        assert pool(np.ones(1), np.zeros(2))[0] == 0.0
