"""The rules of every mode, driven without processes, and in simulated time."""

from __future__ import annotations

import heapq
import math
import sys
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import bits
from instep import ArgumentError, MissingFrameworkError
from instep._simulation import Training, simulate
from instep._statistics import Statistics
from instep._times import Gamma, HeavyTail, Network, OneSlow
from instep.modes import (
    Asynchronous,
    DelayCompensated,
    Local,
    Replay,
    StalenessAware,
    StaleSynchronous,
    Synchronous,
)
from instep.modes._rules import Group, Job, Portion
from instep.modes.corrections import Stale
from instep.modes.replay import Head, group_line, head_line

WORKERS = (1, 2, 3, 4, 7)


class Drive:
    """A master that keeps the rules, and workers that take the times they are told.

    Args:
        seconds: `seconds(worker)`, asked whenever a worker begins.
        turns: how many there are.
    """

    def __init__(self, mode, workers, shards=1, turns=8, seconds=lambda worker: 1.0):
        self.rules, parts = mode.rules(workers), mode.parts(shards)
        pairs = ((turn, k) for turn in range(turns) for k in range(parts))
        self.portions = deque(Portion(turn, k, parts) for turn, k in pairs)
        self.seconds, self.idle, self.running = seconds, list(range(workers)), []
        self.now, self.version = 0.0, 0
        self.groups, self.events, self.staleness = [], [], []
        self.workers = {}  # of each portion
        self.offer()
        while self.running:
            self.now, _, worker, job = heapq.heappop(self.running)
            self.idle.append(worker)
            self.events.append(("arrive", job))
            self.apply(list(self.rules.arrive(job)))
        self.apply(list(self.rules.finish()))

    def apply(self, groups):
        self.offer(groups)
        for k, group in enumerate(groups):
            self.groups.append(group)
            self.staleness += [self.version - job.version for job in group.jobs]
            self.version += 1
            self.events.append(("apply", group))
            self.portions = deque(p for p in self.portions if p not in group.dropped)
            self.offer(groups[k + 1 :])

    def offer(self, waiting=()):
        """Whoever has a gradient that waits to be applied begins after that."""
        engaged = {self.workers[job.portion] for group in waiting for job in group.jobs}
        for worker in sorted(set(self.idle) - engaged):
            while self.portions and self.rules.skips(self.portions[0]):
                self.portions.popleft()
            if self.portions and self.rules.may_start(
                worker, self.portions[0], self.version
            ):
                self.start(worker, self.portions.popleft())

    def start(self, worker, portion):
        job = Job(portion, self.version, self.rules.lane(worker, portion))
        self.idle.remove(worker)
        self.workers[portion] = worker
        self.rules.start(job)
        self.events.append(("start", job))
        until = self.now + self.seconds(worker)
        heapq.heappush(self.running, (until, len(self.events), worker, job))


def scattered(seed, slow=1.0):
    """Random times; worker 0 takes `slow` times as long."""
    generator = np.random.default_rng(seed)
    return lambda worker: generator.exponential() * (slow if worker == 0 else 1)


def jobs_of(drive):
    return [job for group in drive.groups for job in group.jobs]


def what(drive):
    """Portions and versions of every update; who computed them does not matter."""
    return [[job[:2] for job in group.jobs] for group in drive.groups]


def every_portion(turns, shards):
    return [Portion(turn, k, shards) for turn in range(turns) for k in range(shards)]


seeds = st.integers(0, 2**32 - 1)
few = st.integers(0, 5)
crews = st.sampled_from(WORKERS)
speeds = st.sampled_from([1.0, 100.0])


# Synchronous


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5])
def test_a_synchronous_update_is_a_batch_of_one_version(workers, shards):
    drive = Drive(Synchronous(), workers, shards, turns=6, seconds=scattered(1))
    assert what(drive) == [
        [(Portion(turn, k, shards), turn) for k in range(shards)] for turn in range(6)
    ]


def test_with_backup_the_first_count_and_the_late_are_ignored():
    rules = Synchronous(backup=1).rules(workers=3)
    first, second, third = (Job(Portion(0, k, 3), 0, worker=k) for k in range(3))
    assert rules.arrive(third) == []
    assert rules.arrive(first) == [Group((first, third), dropped=(second.portion,))]
    assert rules.arrive(second) == []
    assert not rules.may_start(1, Portion(1, 0, 3), version=0)
    assert rules.may_start(1, Portion(1, 0, 3), version=1)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("shards", "backup"), [(2, 1), (5, 1), (5, 3)])
def test_backup_drops_so_many_of_each_batch(workers, shards, backup):
    mode = Synchronous(backup)
    drive = Drive(mode, workers, shards, turns=6, seconds=scattered(2, slow=100.0))
    for turn, group in enumerate(drive.groups):
        decided = [*(job.portion for job in group.jobs), *group.dropped]
        assert sorted(decided) == [Portion(turn, k, shards) for k in range(shards)]
        assert len(group.dropped) == backup
    assert len(drive.groups) == 6
    assert set(drive.staleness) == {0}


def test_a_short_batch_has_at_least_one_shard_that_counts():
    rules = Synchronous(backup=2).rules(workers=3)
    job = Job(Portion(0, 1, 2), 0, 1)
    assert rules.arrive(job) == [Group((job,), dropped=(Portion(0, 0, 2),))]


def test_with_backup_a_step_takes_the_order_statistic_of_exponential_times():
    needed, backup = 6, 2
    shards = needed + backup
    # So many workers that those who are late are never missed.
    found = simulate(
        Synchronous(backup), 10 * shards, Gamma(1.0, 1), shards=shards, steps=2000
    )
    expected = sum(1 / k for k in range(backup + 1, shards + 1))
    # 2000 steps, each with a deviation of about half its mean: 3 deviations are 4 %.
    assert found.step_time == pytest.approx(expected, rel=0.05)
    assert found.dropped == backup / shards


@pytest.mark.parametrize("backup", [0, 1, 3])
def test_with_backup_a_step_takes_the_order_statistic_of_gamma_times(backup):
    shards = 5 + backup
    found = simulate(
        Synchronous(backup), 10 * shards, Gamma(2.0, 4), shards=shards, steps=1000
    )
    times = np.random.default_rng(1).gamma(4, 2.0 / 4, (20_000, shards))
    expected = np.sort(times, axis=1)[:, 5 - 1].mean()
    # The deviation of one step is below half its mean: 3 of 1000 steps are 5 %.
    assert found.step_time == pytest.approx(expected, rel=0.05)
    assert found.dropped == backup / shards


def test_a_late_worker_computes_to_the_end_before_it_goes_on():
    # Worker 0 has the first shard; the others need not wait for its 10 seconds.
    slow = OneSlow(1.0, factor=10)
    found = simulate(Synchronous(backup=1), 5, slow, shards=4, steps=10)
    assert found.seconds == 10.0
    assert found.idle[0] == 0.0


# Asynchronous


@pytest.mark.parametrize("workers", WORKERS)
def test_equal_workers_settle_at_a_staleness_of_their_number_less_one(workers):
    drive = Drive(Asynchronous(), workers, turns=40)
    first = list(range(workers))
    assert drive.staleness == first + [workers - 1] * (40 - workers)
    found = simulate(Asynchronous(), workers, compute=1.0, steps=40)
    assert found.staleness == Counter(drive.staleness)


def test_one_worker_alone_makes_the_updates_of_plain_sgd():
    drive = Drive(Asynchronous(), 1, turns=9, seconds=scattered(3))
    assert what(drive) == [[(Portion(turn, 0, 1), turn)] for turn in range(9)]


@settings(deadline=None, max_examples=300)
@given(seed=seeds, workers=crews, limit=few, slow=speeds)
def test_no_update_is_staler_than_allowed_and_none_is_missing(
    seed, workers, limit, slow
):
    mode = Asynchronous(max_staleness=limit)
    drive = Drive(mode, workers, turns=40, seconds=scattered(seed, slow))
    assert max(drive.staleness) <= limit
    assert sorted(job.portion for job in jobs_of(drive)) == every_portion(40, 1)


def test_the_bound_on_staleness_is_reached():
    drive = Drive(Asynchronous(max_staleness=3), 7, turns=60, seconds=scattered(4))
    assert max(drive.staleness) == 3


def test_without_staleness_workers_take_turns():
    drive = Drive(Asynchronous(max_staleness=0), 4, turns=9, seconds=scattered(5))
    assert what(drive) == what(Drive(Asynchronous(), 1, turns=9))


def test_a_bound_that_is_never_reached_changes_nothing():
    free, bounded = (
        Drive(Asynchronous(limit), 4, turns=50, seconds=scattered(6, slow=3.0))
        for limit in (None, 50)
    )
    assert free.events == bounded.events


@pytest.mark.parametrize("workers", WORKERS)
def test_a_warm_start_has_one_worker_until_the_others_join(workers):
    mode = Asynchronous(warm_start=5)
    drive = Drive(mode, workers, turns=30, seconds=scattered(7))
    assert [job.worker for job in jobs_of(drive)[:5]] == [0] * 5
    assert drive.staleness[:5] == [0] * 5
    assert {job.worker for job in jobs_of(drive)} == set(range(workers))


def test_a_worker_gathers_as_many_batches_as_it_pushes():
    assert Asynchronous(push=3, rate=0.1).batches(turn=7) == 3
    assert Asynchronous().parts(shards=8) == 1


# Stale-synchronous


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5])
def test_a_bound_of_zero_is_the_synchronous_mode(workers, shards):
    stale, synchronous = (
        Drive(mode, workers, shards, turns=6, seconds=scattered(8, slow=5.0))
        for mode in (StaleSynchronous(0), Synchronous())
    )
    assert stale.events == synchronous.events


@settings(deadline=None, max_examples=300)
@given(seed=seeds, workers=crews, slow=speeds)
def test_without_bound_and_with_one_shard_it_is_the_asynchronous_mode(
    seed, workers, slow
):
    stale, asynchronous = (
        Drive(mode, workers, turns=30, seconds=scattered(seed, slow))
        for mode in (StaleSynchronous(math.inf), Asynchronous())
    )
    assert stale.events == asynchronous.events


@settings(deadline=None, max_examples=300)
@given(seed=seeds, workers=crews, shards=st.integers(1, 5), bound=few, slow=speeds)
def test_nobody_is_further_ahead_than_the_bound_and_finished_work_is_seen(
    seed, workers, shards, bound, slow
):
    mode = StaleSynchronous(bound)
    drive = Drive(mode, workers, shards, 12, scattered(seed, slow))
    assert sorted(job.portion for job in jobs_of(drive)) == every_portion(12, shards)
    applied_in = {
        job.portion: k for k, group in enumerate(drive.groups) for job in group.jobs
    }
    missing, arrived, newest = Counter(dict.fromkeys(range(12), shards)), [], 0
    for kind, job in drive.events:
        if kind == "start":
            newest = job.portion.turn
            oldest = next(turn for turn in range(12) if missing[turn])
            assert newest - oldest <= bound
            older = [p for p in arrived if p.turn < newest]  # its worker's own included
            assert all(applied_in[p] < job.version for p in older)
        elif kind == "arrive":
            missing[job.portion.turn] -= 1
            arrived.append(job.portion)


def test_others_go_on_until_the_bound_while_one_worker_is_slow():
    drive = Drive(
        StaleSynchronous(2), 3, 3, turns=12, seconds=scattered(9, slow=1000.0)
    )
    back = drive.events.index(("arrive", Job(Portion(0, 0, 3), 0, 0)))
    begun = [job.portion.turn for kind, job in drive.events[:back] if kind == "start"]
    assert max(begun) == 2


def test_a_bound_above_zero_hides_hiccups():
    def hiccups(worker):
        return 5.0 if generator.random() < 0.1 else 1.0

    generator = np.random.default_rng(10)
    waits = Drive(StaleSynchronous(0), 4, 4, turns=200, seconds=hiccups).now
    goes_on = Drive(StaleSynchronous(4), 4, 4, turns=200, seconds=hiccups).now
    assert goes_on < waits


# Local


def test_local_workers_take_one_step_while_they_warm_up():
    mode = Local(steps=8, optimizer=0.1, warmup=3)
    assert [mode.batches(turn) for turn in range(5)] == [1, 1, 1, 8, 8]


def test_local_updates_are_those_of_the_synchronous_mode():
    local, synchronous = (
        Drive(mode, 3, 4, seconds=scattered(11))
        for mode in (Local(steps=2, optimizer=0.1), Synchronous())
    )
    assert local.events == synchronous.events


def test_local_steps_take_their_time_one_after_the_other():
    mode = Local(steps=8, optimizer=0.1, warmup=2)
    assert simulate(mode, 4, compute=0.5, steps=3).seconds == 0.5 + 0.5 + 8 * 0.5


# Replay


RECORDED = [
    Asynchronous(),
    Asynchronous(max_staleness=2, correction=DelayCompensated(0.1, adaptive=True)),
    Asynchronous(warm_start=3, correction=StalenessAware()),
    StaleSynchronous(0),
    StaleSynchronous(2),
    StaleSynchronous(math.inf),
    Synchronous(backup=1),
]


def recorded(path, mode, drive, workers, parts):
    """The record that a run of this mode would have left."""
    head = head_line(Head(mode, workers, parts, seed=0, steps=0))
    path.write_text(head + "".join(map(group_line, drive.groups)))
    return Replay(path)


@pytest.mark.parametrize("mode", RECORDED, ids=repr)
@pytest.mark.parametrize("before", [2, 4])
@pytest.mark.parametrize("slow", [1.0, 100.0])
def test_a_replay_makes_the_same_updates_with_any_number_of_workers(
    mode, before, slow, tmp_path
):
    parts = mode.parts(shards=3)
    drive = Drive(mode, before, 3, turns=20, seconds=scattered(12, slow))
    replay = recorded(tmp_path / "run.jsonl", mode, drive, before, parts)
    assert replay.head == Head(mode, before, parts, seed=0, steps=0)
    assert replay.parts(shards=5) == parts
    for workers in (1, 2, 3, 4, 7):
        again = Drive(replay, workers, 5, turns=25, seconds=scattered(13))
        assert again.groups == drive.groups


def test_a_replay_skips_what_was_begun_and_never_applied(tmp_path):
    drive = Drive(Asynchronous(), 3, turns=9, seconds=scattered(14, slow=100.0))
    assert drive.groups.pop().jobs[0].portion == Portion(0, 0, 1)
    replay = recorded(tmp_path / "run.jsonl", Asynchronous(), drive, 3, parts=1)
    assert Drive(replay, 2, turns=9).groups == drive.groups


def test_a_replay_ends_where_its_record_ends(tmp_path):
    drive = Drive(Asynchronous(), 3, turns=9, seconds=scattered(15))
    replay = recorded(tmp_path / "run.jsonl", Asynchronous(), drive, 3, parts=1)
    found = simulate(replay, 2, compute=1.0, steps=100)
    assert found.updates == 9
    assert found.staleness == Counter(drive.staleness)


def test_an_empty_run_can_be_replayed(tmp_path):
    replay = Replay(
        _written(tmp_path, head_line(Head(Asynchronous(), 2, 1, seed=0, steps=0)))
    )
    assert Drive(replay, 2).groups == []
    assert math.isnan(simulate(replay, 2, compute=1.0).step_time)


def test_batches_of_a_replay_are_those_of_the_recorded_mode(tmp_path):
    mode = Asynchronous(push=2, fetch=4, rate=0.1)
    replay = Replay(_written(tmp_path, head_line(Head(mode, 2, 1, seed=0, steps=0))))
    assert replay.batches(turn=0) == 2


@pytest.mark.parametrize(
    "text", ["", "no json", "{}", '{"instep":2}', '{"instep":1,"mode":{"name":"Best"}}']
)
def test_a_file_that_is_no_record_is_named(text, tmp_path):
    with pytest.raises(ArgumentError, match=r"run\.jsonl is no record of a run"):
        Replay(_written(tmp_path, text))


def test_a_record_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"none\.jsonl cannot be read \(No such"):
        Replay(tmp_path / "none.jsonl")


def test_what_gives_the_same_bits_anyway_is_not_recorded():
    with pytest.raises(ArgumentError, match=r"Local.* cannot be recorded"):
        head_line(Head(Local(steps=2, optimizer=0.1), 2, 2, seed=0, steps=0))


def _written(folder, text):
    path = folder / "run.jsonl"
    path.write_text(text)
    return path


# Arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Synchronous(backup=-1), "backup=-1; expected a whole number"),
        (lambda: Synchronous(backup=1.0), "backup=1.0; expected a whole number"),
        (lambda: Synchronous(backup=4).parts(4), "backup=4 of 4 shards leaves none"),
        (lambda: Asynchronous(max_staleness=-1), "max_staleness=-1; expected"),
        (lambda: Asynchronous(max_staleness=True), "max_staleness=True; expected"),
        (lambda: Asynchronous(push=0), "push=0; expected .* at least 1"),
        (lambda: Asynchronous(fetch=0), "fetch=0; expected .* at least 1"),
        (lambda: Asynchronous(warm_start=-1), "warm_start=-1; expected .* at least 0"),
        (lambda: Asynchronous(push=2, fetch=3), "fetch=3 is no multiple of push=2"),
        (lambda: Asynchronous(push=2), "needs their rate"),
        (lambda: StaleSynchronous(-1), "bound=-1; expected a whole number"),
        (lambda: StaleSynchronous(1.5), "bound=1.5; expected a whole number"),
        (lambda: StaleSynchronous(math.nan), "bound=nan; expected a whole number"),
        (lambda: Local(steps=0, optimizer=0.1), "steps=0; expected"),
        (lambda: Local(2, 0.1, warmup=-1), "warmup=-1; expected"),
        (lambda: Local(2, "sgd"), "optimizer='sgd'; expected the rate"),
        (lambda: Local(2, 0.1, elastic=1.5), "elastic=1.5; expected a number between"),
        (lambda: DelayCompensated(-1.0), "strength=-1.0; expected"),
        (lambda: DelayCompensated(math.nan), "strength=nan; expected"),
        (lambda: DelayCompensated(momentum=1.0), "momentum=1.0; expected"),
        (lambda: simulate(Synchronous(), 0, 1.0), "workers=0; expected"),
        (lambda: simulate(Synchronous(), 2, 1.0, steps=0), "steps=0; expected"),
        (lambda: simulate(Synchronous(), 2, 1.0, shards=0), "shards=0; expected"),
        (lambda: simulate(Synchronous(), 2, 1.0, update=-1), "update=-1; expected"),
        (lambda: simulate(Synchronous(), 2, -1.0), "seconds=-1.0; expected"),
        (lambda: simulate(Synchronous(), 2, "fast"), "compute='fast'; expected"),
        (lambda: simulate(Synchronous(), 2, [1, -2]), r"compute\[1\]=-2.0; expected"),
        (lambda: simulate(Synchronous(), 2, []), r"compute=\[\]; expected"),
        (lambda: simulate(Synchronous(), 2, lambda w, g: -1), "gave -1 s for worker 0"),
        (lambda: Gamma(0.0, 1), "mean=0.0; expected a number above 0"),
        (lambda: HeavyTail(1.0, alpha=1), "alpha=1; expected a number above 1"),
        (lambda: OneSlow(1.0, factor=0), "factor=0; expected a number above 0"),
        (lambda: Network(latency=-1), "latency=-1; expected"),
        (lambda: Network(bandwidth=0), "bandwidth=0; expected a number above 0"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


# Corrections


def corrected(correction, gradient, now, read, staleness=1, worker=0):
    arrays = ([np.asarray(x)] for x in (gradient, now, read))
    (result,) = correction.correct(Stale(*arrays, staleness, worker))
    return result


floats = [np.float32, np.float64]


@pytest.mark.parametrize("dtype", floats)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_staleness_of_at_most_one_changes_no_bit(dtype, staleness):
    g = np.random.default_rng(1).normal(size=50).astype(dtype)
    assert bits(corrected(StalenessAware(), g, g, g, staleness)) == bits(g)


@pytest.mark.parametrize("dtype", floats)
@pytest.mark.parametrize("staleness", [2, 3, 7])
def test_a_staleness_above_one_divides(dtype, staleness):
    g = np.random.default_rng(2).normal(size=50).astype(dtype)
    found = corrected(StalenessAware(), g, g, g, staleness)
    assert bits(found) == bits(g / dtype(staleness))


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("dtype", floats)
def test_without_strength_no_bit_changes(dtype, adaptive):
    g, now, read = np.random.default_rng(3).normal(size=(3, 50)).astype(dtype)
    found = corrected(DelayCompensated(0.0, adaptive), g, now, read, staleness=4)
    assert bits(found) == bits(g)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("dtype", floats)
def test_where_nothing_was_missed_no_bit_changes(dtype, adaptive):
    g, w = np.random.default_rng(4).normal(size=(2, 50)).astype(dtype)
    for staleness in (0, 1):  # one update may have been zero
        found = corrected(DelayCompensated(0.5, adaptive), g, w, w, staleness)
        assert bits(found) == bits(g)


def test_a_fresh_gradient_whose_square_overflows_is_left_alone():
    g, w = np.float16([300.0, -0.0]), np.float16([1.0, 1.0])
    assert bits(corrected(DelayCompensated(), g, w, w, staleness=0)) == bits(g)


def test_on_a_parabola_the_right_strength_gives_the_fresh_gradient():
    h, read, now = 4.0, 2.0, 3.5  # powers of two and small sums: no rounding
    g = h * read
    found = corrected(DelayCompensated(h / g**2), g, now, read)
    assert found == h * now


def test_the_adaptive_strength_follows_each_workers_mean_of_squares():
    correction = DelayCompensated(2.0, adaptive=True, momentum=0.5)
    now, read = np.array([3.0]), np.array([1.0])
    mean = {0: 0.0, 1: 0.0}
    for worker, g in [(0, 2.0), (1, 4.0), (0, 1.0)]:
        mean[worker] = 0.5 * mean[worker] + 0.5 * g * g
        expected = g + 2.0 / math.sqrt(mean[worker] + 1e-7) * g * g * (3.0 - 1.0)
        found = corrected(correction, np.array([g]), now, read, worker=worker)
        # The formula is the same, up to the order of its products.
        assert found == pytest.approx(expected, rel=1e-15)
    assert mean == {0: 1.5, 1: 8.0}


def test_a_fresh_correction_remembers_no_squares():
    correction = DelayCompensated(2.0, adaptive=True)
    arguments = (np.array([2.0]), np.array([3.0]), np.array([1.0]))
    first = corrected(correction, *arguments)
    assert corrected(correction, *arguments) != first
    assert corrected(correction.fresh(), *arguments) == first


@pytest.mark.parametrize("dtype", [np.float16, *floats])
def test_corrections_keep_the_dtype(dtype):
    g, now, read = np.ones((3, 4), dtype)
    for correction in (
        StalenessAware(),
        DelayCompensated(),
        DelayCompensated(2.0, adaptive=True),
    ):
        assert corrected(correction, g, now, read, staleness=3).dtype == dtype


# Simulation


def test_a_seed_gives_the_same_simulation():
    first, again, other = (
        simulate(Asynchronous(), 4, Gamma(1.0, 2), seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first.seconds != other.seconds


@pytest.mark.parametrize(
    "mode", [Synchronous(), Asynchronous(max_staleness=2), StaleSynchronous(2)]
)
def test_a_simulation_makes_the_updates_of_a_run(mode):
    found = simulate(mode, 4, OneSlow(1.0, factor=5), steps=40)
    drive = Drive(mode, 4, 4, turns=50, seconds=lambda worker: 1.0 if worker else 5.0)
    stalest = [
        max(version - job.version for job in group.jobs)
        for version, group in enumerate(drive.groups[:40])
    ]
    assert found.staleness == Counter(stalest)


def test_workers_wait_for_the_slowest():
    found = simulate(Synchronous(), 4, compute=[4.0, 1.0, 2.0, 4.0], steps=7)
    assert found.step_time == 4.0
    assert found.idle == (0.0, 0.75, 0.5, 0.0)
    assert found.mean_idle == 0.3125


def test_what_is_not_finished_at_the_end_was_work():
    found = simulate(Asynchronous(), 2, OneSlow(1.0, factor=100), steps=3)
    assert (found.seconds, found.idle) == (3.0, (0.0, 0.0))


def test_transfers_follow_each_other_on_the_masters_line():
    network = Network(latency=0.25, bandwidth=100.0)
    found = simulate(
        Synchronous(), 4, compute=16.0, steps=1, parameters=200, network=network
    )
    # Out: 2 s each, so that the last begins after 8.25 s. In: nobody waits any more.
    assert found.seconds == 4 * 2.0 + 0.25 + 16.0 + 2.0 + 0.25


def test_updates_follow_each_other_in_the_master():
    found = simulate(Asynchronous(), 3, compute=1.0, update=0.5, steps=3)
    assert found.seconds == 1.0 + 3 * 0.5


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_slow_master_keeps_the_bound_on_staleness(workers, limit):
    mode = Asynchronous(max_staleness=limit)
    found = simulate(mode, workers, Gamma(1.0, 1), update=0.5, steps=100)
    assert max(found.staleness) <= limit
    assert found.updates == 100


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("mode", [Synchronous(1), StaleSynchronous(1)], ids=repr)
def test_a_slow_master_stops_nobody_for_good(mode, workers):
    found = simulate(mode, workers, Gamma(1.0, 1), shards=3, update=0.5, steps=100)
    assert found.updates == 100


def test_a_measured_pool_gives_the_times_of_its_workers():
    counts = {name: 0 for name in ("steps", "workers_lost", "shards_recomputed")}
    statistics = Statistics(
        engine="processes",
        workers=3,
        shards=4,
        threads=1,
        pids=(),
        shards_late=0,
        bytes_moved=0,
        shards_computed=(10, 4, 0),
        seconds=(20.0, 1.0, 0.0),
        **counts,
    )
    measured = simulate(Asynchronous(), 4, statistics, steps=50)
    # The third had nothing to do: it gets the mean, 21 s of 14 shards; the fourth is
    # another first.
    assert measured == simulate(Asynchronous(), 4, [2.0, 0.25, 1.5, 2.0], steps=50)


def test_the_means_of_distributions_are_theirs():
    generator = np.random.default_rng(1)
    for times in (Gamma(3.0, 4), HeavyTail(3.0, alpha=3)):
        mean = np.mean([times(0, generator) for _ in range(20_000)])
        # Deviations of at most 0.6 of the mean: 4 of the mean of 20,000 are 2 %.
        assert mean == pytest.approx(3.0, rel=0.02)
    assert HeavyTail(3.0, alpha=3)(0, generator) >= 2.0


def parabola(w, turn, shard, shards):
    """Loss and gradient of w * w / 2."""
    return float(w * w / 2), w, 1.0


def test_a_simulated_loss_follows_the_versions_that_were_read():
    training = Training(parabola, start=np.float64(8), rate=0.5)
    found = simulate(Asynchronous(), 2, compute=1.0, steps=4, training=training)
    # Both read 8, and subtract 4. Then the first has read 4, and the second 0.
    assert found.losses == ((1.0, 32.0), (1.0, 32.0), (2.0, 8.0), (2.0, 0.0))


def test_a_simulated_loss_uses_the_correction():
    # The strength that is right for the second gradient: it is 4 instead of 8.
    mode = Asynchronous(correction=DelayCompensated(1 / 8**2))
    training = Training(parabola, start=np.float64(8), rate=0.5)
    found = simulate(mode, 2, compute=1.0, steps=4, training=training)
    # 8 - 4 = 4 and 4 - 4/2 = 2 are read then.
    assert [loss for _, loss in found.losses] == [32.0, 32.0, 8.0, 2.0]


def test_simulated_shards_are_averaged_by_weight_without_the_dropped():
    def gradient(params, turn, shard, shards):
        return float(shard), {"w": np.float32([shard, 1])}, 1.0 + shard

    training = Training(gradient, start={"w": np.float32([0, 0])}, rate=1.0)
    slow_last = [1.0, 1.0, 2.0]
    found = simulate(Synchronous(1), 3, slow_last, steps=1, training=training)
    assert found.losses == ((1.0, (1.0 * 0 + 2.0 * 1) / 3.0),)


def test_steps_of_workers_are_only_timed():
    training = Training(parabola, start=np.float64(8), rate=0.5)
    mode = Asynchronous(push=2, rate=0.1)
    assert simulate(mode, 2, compute=1.0, steps=2).seconds == 2.0
    with pytest.raises(ArgumentError, match="take steps of their own"):
        simulate(mode, 2, compute=1.0, training=training)


def test_a_simulation_prints_as_a_table():
    training = Training(parabola, start=np.float64(8), rate=0.5)
    found = simulate(Asynchronous(), 2, compute=1.0, steps=3, training=training)
    assert str(found).splitlines() == [
        "updates    3 in 2 s",
        "step time  0.6667 s",
        "idle       0.0 % of the workers' time (0.0 % to 0.0 %)",
        "staleness  0.67 (0 to 1)",
        "dropped    0.0 % of the portions",
        "loss       32 to 8",
    ]


def test_without_simpy_the_way_to_get_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(MissingFrameworkError, match=r"instep\[simulate\]"):
        simulate(Synchronous(), 2, compute=1.0)


def test_ten_thousand_workers_can_be_simulated():
    assert simulate(Synchronous(), 10_000, compute=1.0, steps=2).seconds == 2.0
    found = simulate(Asynchronous(), 10_000, compute=1.0, steps=20_000)
    assert found.staleness[9_999] == 10_000 + 1
