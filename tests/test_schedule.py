"""Every shard is computed exactly once, whoever is lost on the way."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from instep._pace import Pace
from instep._schedule import Schedule


def test_workers_begin_with_runs_of_neighbours():
    schedule = Schedule(7, workers=[0, 1, 2], retries=0)
    assert schedule.assign([0, 1, 2]) == [(0, 0), (1, 3), (2, 5)]
    for worker in (0, 1, 2):
        schedule.finish(worker)
    assert schedule.assign([2, 1, 0]) == [(2, 6), (1, 4), (0, 1)]


def test_a_worker_without_work_takes_the_end_of_the_longest_run():
    schedule = Schedule(8, workers=[0, 1], retries=0)
    schedule.assign([0, 1])  # 0 has 1, 2, 3 to come, and 1 has 5, 6, 7
    for shard in (5, 6, 7):
        schedule.finish(1)
        assert schedule.assign([1]) == [(1, shard)]
    schedule.finish(1)
    assert schedule.assign([1]) == [(1, 3)]


def test_with_more_workers_than_shards_some_stay_idle():
    schedule = Schedule(2, workers=[0, 1, 2], retries=0)
    assert schedule.assign([2, 1, 0]) == [(2, 0), (1, 1)]
    assert schedule.assign([0]) == []


def test_a_lost_shard_goes_to_whoever_is_idle():
    schedule = Schedule(4, workers=[0, 1], retries=1)
    schedule.assign([0, 1])
    assert schedule.lose(0) == 0
    assert not schedule.is_exhausted(0)
    schedule.finish(1)
    assert schedule.assign([1]) == [(1, 0)]
    assert schedule.lose(1) == 0
    assert schedule.is_exhausted(0)
    assert schedule.recomputed == 2


def test_losing_an_idle_worker_loses_no_shard():
    schedule = Schedule(1, workers=[0, 1], retries=0)
    schedule.assign([0])
    assert schedule.lose(1) is None
    assert schedule.recomputed == 0


class AnyOrder(RuleBasedStateMachine):
    """Workers that begin, finish and die in any order."""

    @initialize(shards=st.integers(1, 12), workers=st.integers(1, 5))
    def begin(self, shards, workers):
        self.schedule = Schedule(shards, list(range(workers)), retries=100)
        self.shards, self.workers = shards, workers
        self.running, self.finished = {}, []

    @rule(order=st.randoms())
    def assign(self, order):
        idle = [w for w in range(self.workers) if w not in self.running]
        order.shuffle(idle)
        for worker, shard in self.schedule.assign(idle):
            assert worker in idle
            assert shard not in [*self.running.values(), *self.finished]
            self.running[worker] = shard

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        worker = data.draw(st.sampled_from(sorted(self.running)))
        shard = self.running.pop(worker)
        assert self.schedule.finish(worker) == shard
        self.finished.append(shard)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose(self, data):
        worker = data.draw(st.sampled_from(sorted(self.running)))
        assert self.schedule.lose(worker) == self.running.pop(worker)

    @invariant()
    def nothing_is_forgotten(self):
        left = self.shards - len(self.finished)
        assert self.schedule.is_finished == (left == 0)
        assert self.schedule.has_waiting == (len(self.running) < left)

    def teardown(self):
        """Whatever happened, the idle workers can finish the rest."""
        while hasattr(self, "schedule") and not self.schedule.is_finished:
            self.running.update(
                self.schedule.assign(set(range(self.workers)) - set(self.running))
            )
            worker, shard = self.running.popitem()
            assert self.schedule.finish(worker) == shard
            self.finished.append(shard)
        assert sorted(getattr(self, "finished", [])) == list(
            range(getattr(self, "shards", 0))
        )


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, deadline=None)


def test_a_late_shard_is_computed_twice_and_the_first_answer_counts():
    schedule = Schedule(2, workers=[0, 1, 2], retries=0)
    assert schedule.assign([0, 1, 2]) == [(0, 0), (1, 1)]
    assert schedule.alone() == [0, 1]
    assert schedule.double(late=1, idle=2) == 1
    assert schedule.alone() == [0]
    assert schedule.finish(2) == 1
    assert schedule.finish(1) is None
    assert schedule.finish(0) == 0
    assert schedule.is_finished


def test_losing_one_of_two_who_compute_a_shard_hands_out_nothing():
    schedule = Schedule(1, workers=[0, 1], retries=1)
    schedule.assign([0])
    schedule.double(late=0, idle=1)
    assert schedule.lose(0) == 0
    assert not schedule.has_waiting
    assert schedule.lose(1) == 0
    assert schedule.has_waiting
    assert schedule.is_exhausted(0)


def test_a_shard_is_late_after_twice_the_slowest_and_a_moment():
    pace = Pace()
    assert pace.limit is None
    pace.note(1.0)
    pace.note(0.5)
    assert pace.limit == 2 * 1.0 + 0.1
    pace.begin()
    pace.note(3.0)
    assert pace.limit == 2 * 3.0 + 0.1
    pace.begin()
    pace.begin()  # a call without an answer forgets nothing
    assert pace.limit == 2 * 3.0 + 0.1
    pace.note(0.1)
    pace.begin()
    assert pace.limit == 2 * 0.1 + 0.1
