"""`instep train`, `check` and `simulate`: job files and the command line."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

import instep
from conftest import wait_until
from helpers import run_python
from instep._commands import _calls
from instep._commands._job_file import NAME, load_job
from instep._commands._training_display import told
from instep._training import checkpoint
from instep._training.batches import batches_between
from instep._training.choice import SYNCHRONOUS
from instep._training.loop import PARTS
from instep._training.training import Training
from jobs import PARABOLA


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a job file."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "job.py").write_text(PARABOLA)
    return folder


def run(folder, *words):
    return run_python("-m", "instep", *words, cwd=folder)


def summary_of(folder, *words):
    result = run(folder, "train", "job.py", "--json", *words)
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def straight(folder):
    """The summary of a training that nobody interrupts."""
    return summary_of(folder, "--engine", "serial", "--shards", "3")


# What a training is


def test_the_summary_says_what_was_done(straight):
    assert straight["mode"] == "synchronous"
    assert (straight["engine"], straight["shards"], straight["seed"]) == (
        "serial",
        3,
        0,
    )
    assert straight["steps"] == straight["updates"] == len(straight["losses"]) == 40
    # Six batches of 30 rows and one of 20 are an epoch of 200.
    assert straight["examples"] == 5 * 200 + 5 * 30
    assert straight["staleness"] == {"0": 40}
    assert straight["loss"] == pytest.approx(np.mean(straight["losses"][-20:]))
    assert straight["losses"][-1] < straight["losses"][0] / 2
    assert len(straight["load"]) == 1
    assert 0 < straight["load"][0] <= 1


def test_a_training_resumed_on_other_workers_has_the_bits_of_one_in_one_go(
    folder, straight, tmp_path
):
    path = tmp_path / "run.ckpt"
    words = ("--checkpoint", str(path), "--checkpoint-every", "7")
    first = summary_of(
        folder, *words, "--shards", "3", "--workers", "2", "--steps", "17"
    )
    assert first["sha256"] != straight["sha256"]
    assert first["losses"] == straight["losses"][:17]
    assert sorted(tmp_path.iterdir()) == [path]
    rest = summary_of(folder, *words, "--resume", "--workers", "1")
    assert (rest["resumed_at"], rest["updates"], rest["shards"]) == (17, 23, 3)
    assert rest["losses"] == straight["losses"][17:]
    assert rest["sha256"] == straight["sha256"]
    again = run(folder, "train", "job.py", *words, "--resume")
    assert again.stdout.splitlines()[0] == "nothing to do: 40 steps are done"


def test_every_stretch_is_a_checkpoint():
    job = instep.Job(np.zeros(2), squares, (np.ones((9, 2)),), 3, optimizer=0.1)
    with Training(job, SYNCHRONOUS, {"engine": "serial", "shards": 2}) as training:
        list(training.steps(4))
        state = training.state_dict()
        losses = [step.loss for step in training.steps(9)]
        training.load_state_dict(state)
        assert [step.loss for step in training.steps(9)] == losses
        assert training.distance.batches == training.distance.updates == 9


def squares(w, x):
    return np.mean((x - w) ** 2), 2 * np.mean(w - x, 0)


def test_the_parts_of_a_step_are_its_time():
    job = instep.Job(np.zeros(2), squares, (np.ones((9, 2)),), 3, optimizer=0.1)
    with Training(job, SYNCHRONOUS, {"engine": "serial", "shards": 2}) as training:
        (step,) = training.steps(1)
    assert (step.loss, step.weight, step.batches, step.dropped) == (1.0, 3.0, 1, 0)
    assert len(step.parts) == len(PARTS)
    assert min(step.parts) >= 0
    assert step.seconds == pytest.approx(sum(step.parts))
    assert max(step.busy) >= step.parts[PARTS.index("compute")] > 0


def test_batches_go_on_in_the_middle_of_an_epoch():
    job = instep.Job(np.zeros(1), squares, (np.arange(10.0),), 3)
    whole = [x.tolist() for (x,) in batches_between(job, 0, 11)]
    assert [len(x) for x in whole] == [3, 3, 3, 1] * 2 + [3, 3, 3]
    assert sorted(itertools.chain(*whole[4:8])) == list(range(10))
    for start in range(11):
        rest = [x.tolist() for (x,) in batches_between(job, start, 11)]
        assert rest == whole[start:]


@pytest.mark.parametrize(
    ("mode", "updates"),
    [
        ("asynchronous(max_staleness=3)", 40),
        ("local(steps=4)", 10),
        ("stale_synchronous(1)", None),
    ],
)
def test_every_mode_trains(parabola, mode, updates):
    with Training(parabola, _calls.mode(mode), {"workers": 2}) as training:
        steps = list(training.steps(40))
    assert updates in (None, len(steps))
    assert sum(step.weight for step in steps) == 1150
    assert sum(step.batches for step in steps) == 40
    assert steps[-1].loss < steps[0].loss


def test_local_workers_have_the_job_s_optimizer(parabola):
    """One worker, one step: the job's optimizer takes it, and the master follows."""
    options = {"engine": "serial", "workers": 1}
    losses = []
    for mode in ("synchronous", "local(steps=1)"):
        fresh = dataclasses.replace(parabola, optimizer=type(parabola.optimizer)())
        with Training(fresh, _calls.mode(mode), options) as training:
            losses.append([step.loss for step in training.steps(9)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.fixture
def parabola(folder, monkeypatch):
    """The job of the job file."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    job = load_job(folder / "job.py")
    monkeypatch.delitem(sys.modules, NAME)
    return job


# Checkpoints


def test_a_checkpoint_that_does_not_fit_is_refused(folder, tmp_path):
    words = ("train", "job.py", "--engine", "serial", "--quiet")
    path = tmp_path / "run.ckpt"
    given = ("--checkpoint", str(path))
    assert run(folder, *words, *given, "--steps", "2").stdout == ""
    for more, problem in [
        ((), "run.ckpt exists; add --resume to go on from it"),
        (("--resume", "--shards", "9"), "--shards 9, but the checkpoint is of"),
        (("--resume", "--threads", "2"), "of a pool with threads=1 and this one has"),
    ]:
        result = run(folder, *words, *given, *more)
        assert (result.returncode, result.stdout) == (2, "")
        assert problem in result.stderr
    job = instep.Job(np.zeros(2), squares, (np.ones((9, 2)),), 3, optimizer=0.1)
    state = checkpoint.load(path)
    with (
        Training(job, SYNCHRONOUS, {"engine": "serial"}) as training,
        pytest.raises(instep.ArgumentError, match="of a job with rows=200"),
    ):
        training.load_state_dict(state)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(instep.ArgumentError, match="cannot be read"):
        checkpoint.load(tmp_path / "none")
    (tmp_path / "text").write_text("x")
    with pytest.raises(instep.ArgumentError, match="is no checkpoint"):
        checkpoint.load(tmp_path / "text")


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "run"
    checkpoint.save({"a": 1}, path)
    (tmp_path / "run.new").mkdir()  # in the way, also for root
    with pytest.raises(instep.InstepError, match=r"cannot write .*run: Is a directory"):
        checkpoint.save({"a": 2}, path)
    assert checkpoint.load(path) == {"a": 1}


# What is shown


def test_output_to_a_file_ends_with_three_lines(folder):
    result = run(folder, "train", "job.py", "--workers", "2", "--shards", "3")
    assert (result.returncode, result.stderr) == (0, "")
    *often, first, second, third = result.stdout.splitlines()
    assert all(line.startswith("step ") for line in often)  # every 2 s
    assert re.match(r"40 updates in \S+ s \(\S+ per second\), loss \S+$", first)
    assert re.match(r"2 workers, busy \d+%( to \d+%)? of the time$", second)
    assert re.match(r"parameters: SHA-256 [0-9a-f]{16}$", third)


def test_a_narrow_terminal_shows_a_table(folder):
    text = in_terminal(folder, 40, "train", "job.py", "--workers", "2")
    for word in ("starting", "step", "updates/s", "worker 1", "busy", "━"):
        assert word in text
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    assert max(map(len, lines[:-5])) <= 40


def in_terminal(folder, columns, *words):
    """What a command writes to a terminal so wide, without what moves the cursor."""
    master, terminal = pty.openpty()
    size = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "instep", *words],
        cwd=folder,
        env=size,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        written = b""
        while part := _read(master):
            written += part
    os.close(master)
    assert process.returncode == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def _read(descriptor):
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def test_losses_that_are_not_finite_are_said_in_words():
    view = {"updates": 3, "seconds": 1.5, "updates_per_second": 2.0, "loss": None}
    rest = {
        "engine": "processes",
        "workers": 9,
        "load": [0.5, 1.0],
        "sha256": "f" * 64,
        "workers_lost": 2,
    }
    assert told({**view, **rest}) == [
        "3 updates in 1.5 s (2 per second), loss not finite",
        "9 workers, busy 50% to 100% of the time",
        f"parameters: SHA-256 {'f' * 16}",
        "2 workers were lost and replaced",
    ]


def test_scalars_are_written_for_tensorboard(folder, tmp_path):
    stub = pytest.importorskip("tensorboard.compat.tensorflow_stub.pywrap_tensorflow")
    from tensorboard.compat.proto import event_pb2

    words = ("train", "job.py", "--engine", "serial", "--quiet", "--steps", "3")
    result = run(folder, *words, "--tensorboard", str(tmp_path / "a" / "board"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    (path,) = (tmp_path / "a" / "board").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    reader, events = stub.PyRecordReader_New(str(path)), []
    for _ in range(4):
        reader.GetNext()
        events.append(event_pb2.Event.FromString(reader.record()))
    assert events[0].file_version == "brain.Event:2"
    assert [event.step for event in events[1:]] == [1, 2, 3]
    tags = {value.tag for value in events[1].summary.value}
    assert tags == {"loss", "staleness", "updates_per_second", "load/worker_0"}


def test_without_tensorboard_it_says_what_to_install(folder, tmp_path):
    (tmp_path / "tensorboard.py").write_text("raise ModuleNotFoundError('tensorboard')")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import runpy; runpy."
    code += "run_module('instep', run_name='__main__')"
    words = ("train", "job.py", "--tensorboard", str(tmp_path / "board"))
    result = run_python("-c", code, tmp_path, *words, cwd=folder)
    assert (result.returncode, result.stdout) == (1, "")
    assert "install it with: pip install tensorboard" in result.stderr
    assert not (tmp_path / "board").exists()


def test_logging_is_silent_unless_it_is_asked_for(folder, tmp_path):
    words = ("train", "job.py", "--engine", "serial", "--steps", "2", "--verbose")
    result = run(folder, *words, "--checkpoint", str(tmp_path / "run"))
    assert result.stderr == f"instep.train: saved {tmp_path / 'run'} at step 2\n"


# What goes wrong


@pytest.fixture
def _own_interrupts():
    """What a command does about Ctrl-C is as before after the test."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train", "no.py"], "no.py is no file; expected a Python file with a job()"),
        (["train", "empty.py"], "empty.py has no function job(); expected"),
        (["train", "job.py", "--mode", "sync"], "'sync' is no mode; expected one of"),
        (["train", "job.py", "--steps", "0"], "'0'; expected a whole number"),
        (["train", "job.py", "--resume"], "--resume needs --checkpoint FILE"),
        (["train", "job.py", "--checkpoint", "x/y"], "the folder x does not exist"),
        (["train", "job.py", "--tensorboard", "job.py"], "job.py is a file"),
        (["train", "no_optimizer.py"], "the job has no optimizer; expected a function"),
        (["train", "text.py"], "the job's optimizer is a str; expected a function"),
        (["train", "job.py", "--engine", "gpu"], "invalid choice: 'gpu'"),
        (["check", "no.py"], "no.py is no file"),
        (["simulate", "--workers", "0"], "'0'; expected a whole number, at least 1"),
        (["simulate", "--compute", "x"], "'x' is no distribution; expected one of"),
        (
            ["simulate", "--mode", "synchronous(backup=8)"],
            "backup=8 of 8 shards leaves",
        ),
    ],
)
@pytest.mark.usefixtures("_own_interrupts")
def test_wrong_words_are_exit_code_2(folder, words, problem, capsys, monkeypatch):
    from instep.__main__ import main

    (folder / "empty.py").write_text("")
    text = PARABOLA.replace("optimizer=Momentum()", "optimizer=None")
    (folder / "no_optimizer.py").write_text(text)
    (folder / "text.py").write_text(text.replace("optimizer=None", "optimizer='adam'"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        code = main(words)
    except SystemExit as error:  # of argparse
        code = error.code
    found = capsys.readouterr()
    assert (code, found.out) == (2, "")
    assert problem in " ".join(found.err.split())


def test_an_error_of_the_loss_is_shown_with_its_traceback(folder):
    text = PARABOLA.replace(
        "hidden = ", "if np.min(x) < -0.99:\n        1 / 0\n    hidden = "
    )
    (folder / "broken.py").write_text(text)
    result = run(folder, "train", "broken.py", "--workers", "1")
    assert (result.returncode, result.stdout) == (1, "")
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert "broken.py" in result.stderr


def test_ctrl_c_says_where_to_go_on_and_leaves_nothing(folder, tmp_path):
    path = tmp_path / "run.ckpt"
    words = ("--steps", "1000000", "--checkpoint", str(path), "--checkpoint-every", "9")
    with subprocess.Popen(
        [sys.executable, "-m", "instep", "train", "job.py", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(path.exists, "no checkpoint was written", seconds=30)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    form = (
        r"interrupted after \d+ updates .* 1000000 steps; --resume goes on at step \d+"
    )
    assert re.search(form, err)
    assert "Traceback" not in out + err
    assert checkpoint.load(path)["distance"]["batches"] % 9 == 0
    wait_until(
        lambda: not any(child.is_running() for child in children), "a worker is left"
    )


# Other commands


def test_check_prints_the_report_and_is_1_for_a_loss_that_is_not_a_mean(folder):
    result = run(folder, "check", "job.py")
    assert (result.returncode, result.stderr) == (0, "")
    assert "the mean of the shards gives the whole batch's loss" in result.stdout
    text = PARABOLA.replace("2 * error / len(x)", "2 * error")
    (folder / "sum.py").write_text(
        text.replace("np.mean(error**2)", "np.sum(error**2)")
    )
    result = run(folder, "check", "sum.py", "--json")
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert not report["ok"]
    assert "a sum over rows, not a mean" in report["findings"][0]["reason"]


def test_simulate_says_what_instep_simulate_says(folder):
    pytest.importorskip("simpy")
    words = ("--workers", "4,2", "--compute", "1", "--slow", "10", "--steps", "100")
    result = run(folder, "simulate", *words, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    found = {(row["mode"], row["workers"]): row for row in json.loads(result.stdout)}
    assert len(found) == 4
    row = found["asynchronous", 4]
    expected = instep.simulate(instep.Asynchronous(), 4, instep.OneSlow(1.0, 10))
    assert row["seconds_per_update"] == expected.step_time == 0.33
    assert row["idle"] == list(expected.idle)
    assert found["synchronous", 4]["seconds_per_update"] == 10


# Words


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("synchronous", instep.Synchronous()),
        ("Stale-Synchronous(inf)", instep.StaleSynchronous(float("inf"))),
        ("local(8, optimizer=0.1)", instep.Local(8, 0.1)),
        (
            "asynchronous(correction=delay_compensated(0.1))",
            instep.Asynchronous(correction=instep.DelayCompensated(0.1)),
        ),
    ],
)
def test_a_mode_is_read(text, mode):
    choice = _calls.mode(text)
    assert choice.kind(**choice.arguments) == mode


def test_modes_are_split_at_the_commas_between_them():
    text = "asynchronous(push=2,rate=0.1),synchronous,local(steps=2)"
    assert [c.text for c in _calls.modes(text)] == [
        "asynchronous(push=2,rate=0.1)",
        "synchronous",
        "local(steps=2)",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("local", "'local': it is missing 1 required positional argument: 'steps'"),
        (
            "asynchronous(foo=1)",
            r"got an unexpected keyword argument 'foo'\); expected",
        ),
        ("synchronous(backup=-1)", "backup=-1; expected a whole number, at least 0"),
        ("synchronous(__import__('os'))", "is no correction; expected one of"),
        ("synchronous,synchronous", "names 'synchronous' twice"),
        ("synchronous(", "is no mode; expected one of synchronous, asynchronous"),
    ],
)
def test_a_mode_that_cannot_be_read_is_explained(text, problem):
    with pytest.raises(argparse.ArgumentTypeError, match=problem):
        _calls.modes(text)


def test_the_commands_are_in_the_help():
    text = run(Path(), "--help").stdout
    for name in ("train", "check", "tune", "compare", "simulate"):
        assert re.search(rf"^ +{name} ", text, re.MULTILINE)
