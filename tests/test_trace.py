"""A pool's trace: lanes do not overlap, faults are marks, the file is complete JSON."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

import instep
from faults import fragile, mark
from helpers import bits, make, run_python, started, write_script
from instep._events import Events, Fault, Updated
from instep._trace import Trace
from losses import toy

PAGE = Path(__file__).parent.parent / "docs" / "trace.md"
PHASES = ["script", "split, publish", "wait", "average"]


def read(path):
    """The events of a trace, which has to be JSON as the standard says."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(Path(path).read_text(), parse_constant=refuse)


def lanes(events):
    """Slices by the name of their lane, in order of time; none overlaps the next."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        found[names[event["tid"]]].append(event)
    for lane in found.values():
        for one, after in itertools.pairwise(lane):
            assert 0 <= one["ts"] <= one["ts"] + one["dur"] <= after["ts"]
    return dict(found)


def marks(events):
    """Names of the instant events, without updates."""
    return [e["name"] for e in events if e["ph"] == "i" and e["name"] != "update"]


def updates(events):
    return [e["args"] for e in events if e["name"] == "update"]


def test_a_trace_has_a_lane_for_the_master_and_one_for_each_worker(tmp_path):
    x = np.arange(8.0)
    with started(make(toy, workers=2, shards=4), 1.0, x) as pool:
        untraced = [pool(np.float64(w), x) for w in range(3)]
        with pool.trace(tmp_path / "run.json") as trace:
            traced = [pool(np.float64(w), x) for w in range(3)]
        assert bits(traced) == bits(untraced)
        assert trace.path == str(tmp_path / "run.json")
        pool(np.float64(1), x)  # nobody watches any more
    events = read(trace.path)
    assert {event["pid"] for event in events} == {os.getpid()}
    found = lanes(events)
    assert set(found) <= {"master", "worker 0", "worker 1"}
    master = [event["name"] for event in found.pop("master")]
    assert master == [*PHASES * 3, "script"]
    shards = [event for lane in found.values() for event in lane]
    numbers = sorted((e["args"]["step"], e["args"]["shard"]) for e in shards)
    assert numbers == [(step, shard) for step in (3, 4, 5) for shard in range(4)]
    for event in shards:
        assert event["name"] == f"shard {event['args']['shard']}"
        assert 0 <= 1e6 * event["args"]["compute_seconds"] <= event["dur"] + 2
    assert [u["loss"] for u in updates(events)] == [3.5 * w for w in range(3)]
    assert [u["step"] for u in updates(events)] == [3, 4, 5]
    assert marks(events) == []


def squared_error(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)


def test_a_stream_of_pytorch_shows_its_updates_with_their_staleness(tmp_path):
    model, x = torch.nn.Linear(2, 1), torch.ones(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with instep.torch.GradientPool(model, squared_error, workers=2) as pool:
        pool.trace(tmp_path / "run.json")
        seen = []
        batches = [(x, torch.ones(6, 1))] * 6
        for update in pool.stream(batches, instep.Asynchronous()):
            optimizer.step()
            seen.append((update.staleness, update.worker, pytest.approx(update.loss)))
    events = read(tmp_path / "run.json")
    told = [(u["staleness"], u["worker"], u["loss"]) for u in updates(events)]
    assert told == seen
    assert [u["rows"] for u in updates(events)] == [6] * 6
    found = lanes(events)
    names = {event["name"] for event in found.pop("master")}
    assert names == {*PHASES, "next batch"}
    computed = [event for lane in found.values() for event in lane]
    assert [e["name"] for e in computed] == ["batch"] * 6
    assert sorted(e["args"]["step"] for e in computed) == list(range(6))


@pytest.mark.parametrize(
    "mode",
    [
        instep.Synchronous(),
        instep.Asynchronous(),
        instep.StaleSynchronous(bound=1),
        instep.Local(steps=2, optimizer=0.1),
    ],
    ids=lambda mode: type(mode).__name__,
)
def test_every_mode_has_its_updates_in_the_trace(tmp_path, mode):
    batches, seen = [np.arange(4.0)] * 6, 0
    with make(toy, shards=2, engine="serial") as pool:
        pool.trace(tmp_path / "run.json")
        with pool.stream(batches, mode, params=np.float64(1)) as stream:
            for seen, _ in enumerate(stream, 1):  # noqa: B007
                stream.publish(np.float64(1))
    events = read(tmp_path / "run.json")
    assert len(updates(events)) == seen
    assert set(lanes(events)) == {"master", "worker 0"}
    assert sum(u["rows"] for u in updates(events)) == 24


def test_a_killed_worker_and_its_shard_are_marks(tmp_path):
    w, x = {"a": np.ones(3)}, np.arange(4.0)
    with make(fragile, workers=2, shards=2) as pool:
        pool.trace(tmp_path / "run.json")
        pool(w, x, mark(tmp_path, 1), "killed")
        lost = pool.statistics().workers_lost
    events = read(tmp_path / "run.json")
    assert lost == 1
    found = marks(events)
    assert len(found) == 2
    worker = re.fullmatch(r"worker (\d) lost", found[0])[1]
    shard = re.fullmatch(r"shard (\d) of step 0 computed again", found[1])[1]
    reasons = [e["args"]["reason"] for e in events if e["name"] in found]
    assert "SIGKILL" in reasons[0]
    assert reasons[1] == f"worker {worker} lost"
    by_lane = lanes(events)
    names = [e["name"] for lane in by_lane.values() for e in lane]
    assert names.count(f"shard {shard} (lost)") == 1
    assert names.count(f"shard {shard}") == 1


def test_a_worker_lost_in_a_stream_is_a_mark_too(tmp_path):
    w, folder = {"a": np.ones(3)}, mark(tmp_path, 1)
    batches = [(np.arange(4.0), folder, "killed")] * 3
    with make(fragile, workers=2) as pool:
        pool.trace(tmp_path / "run.json")
        stream = pool.stream(batches, instep.Asynchronous(), params=w)
        assert len(list(stream)) == 3
    lost, again = marks(read(tmp_path / "run.json"))
    assert re.fullmatch(r"worker \d lost", lost)
    assert re.fullmatch(r"shard 0 of step \d computed again", again)


def fails(w, x):
    if x[0] == 0:
        raise ValueError("no")
    return toy(w, x)


def test_a_loss_that_fails_leaves_a_trace(tmp_path):
    with make(fails, shards=2, engine="serial") as pool:
        pool.trace(tmp_path / "run.json")
        with pytest.raises(ValueError, match="no"):
            pool(np.float64(1), np.arange(4.0))
        pool(np.float64(1), np.arange(1.0, 5.0))
    events = read(tmp_path / "run.json")
    names = [event["name"] for event in lanes(events)["worker 0"]]
    assert names == ["shard 0 (failed)", "shard 0", "shard 1"]
    assert len(updates(events)) == 1


def test_after_kill_9_the_file_is_complete_json(tmp_path):
    script = """
        import os, signal, sys, time
        import numpy as np
        import instep

        def fun(w, x):
            time.sleep(0.01)
            return np.mean(w * x), np.mean(x)

        pool = instep.numpy.value_and_grad(fun, shards=2, engine="serial")
        pool.trace("run.json")
        while pool.statistics().steps < 40:
            pool(np.float64(1), np.arange(4.0))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    result = run_python(write_script(tmp_path, script), cwd=tmp_path)
    assert result.returncode == -signal.SIGKILL
    events = read(tmp_path / "run.json")
    assert len(updates(events)) >= 10
    assert set(lanes(events)) == {"master", "worker 0"}


def test_a_pool_that_is_never_closed_completes_its_trace(tmp_path):
    script = """
        import numpy as np
        import instep

        def fun(w, x):
            return np.mean(w * x), np.mean(x)

        pool = instep.numpy.value_and_grad(fun, engine="serial")
        pool.trace("run.json")
        pool(np.float64(1), np.arange(4.0))
    """
    result = run_python(write_script(tmp_path, script), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(updates(read(tmp_path / "run.json"))) == 1


def test_nothing_is_recorded_when_nobody_watches(tmp_path):
    path = tmp_path / "run.json"
    with make(toy, engine="serial") as pool:
        events = pool._dispatcher.events
        pool(np.float64(1), np.arange(4.0))
        assert (events.is_on, events._hands) == (False, {})
        pool.trace(path)
        pool(np.float64(1), np.arange(4.0))
        assert pool.trace(None) is None
        assert not events.is_on
        before = path.read_bytes()
        pool(np.float64(1), np.arange(4.0))
        pool.trace(None)
    assert path.read_bytes() == before


def test_another_path_ends_the_trace_before(tmp_path):
    with make(toy, engine="serial") as pool:
        for name, steps in [("a", 1), ("b", 2)]:
            pool.trace(tmp_path / name)
            for _ in range(steps):
                pool(np.float64(1), np.arange(4.0))
    assert [len(updates(read(tmp_path / name))) for name in "ab"] == [1, 2]


def test_a_pool_that_is_garbage_closes_its_trace(tmp_path):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = descriptors()
    pool = make(toy, engine="serial")
    pool.trace(tmp_path / "run.json")
    del pool
    gc.collect()
    assert descriptors() == before
    assert read(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("missing/run.json", "No such file or directory"),
        (".", "Is a directory"),
        ("/dev/full", "No space left on device"),
    ],
)
def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path, path, problem):
    with make(toy, engine="serial") as pool:
        with pytest.raises(instep.ArgumentError, match=problem) as caught:
            pool.trace(tmp_path / path)
        assert "expected the path of a file" in str(caught.value)
        assert pool(np.float64(1), np.arange(4.0))[1] == 1.5


def test_a_closed_pool_has_no_trace(tmp_path):
    pool = make(toy, engine="serial")
    pool.close()
    with pytest.raises(instep.PoolClosedError):
        pool.trace(tmp_path / "run.json")
    pool.trace(None)
    assert list(tmp_path.iterdir()) == []


def test_without_room_the_trace_ends_with_a_warning_and_the_pool_goes_on(tmp_path):
    path, limits = tmp_path / "run.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    with make(toy, engine="serial") as pool:
        trace = pool.trace(path)
        pool(np.float64(1), np.arange(4.0))
        trace._flush()
        before = read(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
        try:
            pool(np.float64(1), np.arange(4.0))
            with pytest.warns(RuntimeWarning, match=r"ends here: File too large"):
                trace._flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert pool(np.float64(1), np.arange(4.0))[1] == 1.5
    assert read(path) == before


def test_a_fork_of_the_script_leaves_the_file_alone(tmp_path):
    with make(toy, engine="serial") as pool:
        trace = pool.trace(tmp_path / "run.json")
        pool(np.float64(1), np.arange(4.0))
        if (child := os.fork()) == 0:
            trace.close()
            os._exit(0)
        os.waitpid(child, 0)
        pool(np.float64(1), np.arange(4.0))
    assert len(updates(read(tmp_path / "run.json"))) == 2


def test_numbers_and_words_that_json_does_not_have(tmp_path):
    events = Events()
    with Trace(tmp_path / "run.json", events) as trace:
        for loss in (math.nan, math.inf, -math.inf, 1e-9):
            trace.note(Updated(0, loss, 1, 0, None, 0, 1.0))
        trace.note(Fault("worker 0 lost", 0, 'a "quoted"\nreason \\', 1.0))
    found = read(tmp_path / "run.json")
    assert [u["loss"] for u in updates(found)] == ["nan", "inf", "-inf", 1e-9]
    assert found[-2]["args"]["reason"] == 'a "quoted"\nreason \\'


def test_the_code_of_the_page_runs(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    assert len(blocks) >= 2
    result = subprocess.run(
        [sys.executable, write_script(tmp_path, "\n".join(blocks))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert len(updates(read(tmp_path / "run.json"))) > 0
