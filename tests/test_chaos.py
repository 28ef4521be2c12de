"""A training in chaos has the bits of an undisturbed one and leaves nothing behind."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# The workers import the benchmark's losses, too: by name, so from a folder on the path.
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import chaos
from chaos_agent import plan

QUICK = ["--steps=60", "--kills=12", "--stops=3", "--resizes=2", "--timeout=1.5"]


@pytest.mark.guard(180)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_kills_stops_and_resizes_cost_no_bit_and_leave_nothing(framework):
    if not find_spec(framework):
        pytest.skip(f"{framework} is not installed")
    report = chaos.measure(chaos.parse_options([f"--framework={framework}", *QUICK]))
    assert report.first_loss_that_differs is None
    assert report.digest == report.digest_undisturbed
    assert not report.processes_left
    assert not report.dev_shm_left
    assert (report.memory_left, report.descriptors_left) == (0, 0)
    assert (report.kills_survived, report.stops_survived) == (12, 3)
    assert (report.resizes, report.templates_killed) == (2, 1)
    assert report.is_good


def test_a_seed_has_one_plan_with_all_that_was_asked_for():
    kinds = {"kill": 30, "stop": 5, "resize": 3, "template": 1}
    first, second, other = (plan(100, kinds, 4, seed) for seed in (1, 1, 2))
    assert first == second != other
    for events in (first, other):
        counted = {kind: sum(e.kind == kind for e in events) for kind in kinds}
        assert counted == kinds
        assert [e.step for e in events] == sorted(e.step for e in events)
        assert all(0 <= e.step < 100 for e in events)
