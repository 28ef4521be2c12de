"""A training of each framework goes on from its checkpoint to the same bits."""

from __future__ import annotations

import pytest

from helpers import run_python
from jobs import JAX, KERAS, TORCH

SCRIPT = """
from pathlib import Path

import instep
from instep._commands._job_file import load_job
from instep._training import checkpoint
from instep._training.batches import batches_between
from instep._training.choice import SYNCHRONOUS, Choice
from instep._training.learner import digest
from instep._training.loop import take_steps
from instep._training.training import Training
from instep.modes._rules import Group, Job, Portion
from instep.modes.replay import Head, group_line, head_line

OPTIONS, PATH = {"engine": "serial", "shards": 2}, Path("run.ckpt")

with Training(load_job(Path("job.py")), SYNCHRONOUS, OPTIONS) as training:
    list(training.steps(4))
    checkpoint.save(training.state_dict(), PATH)
    half = digest(training.learner)
    list(training.steps(6))
    straight = digest(training.learner)
with Training(load_job(Path("job.py")), SYNCHRONOUS, OPTIONS) as training:
    training.load_state_dict(checkpoint.load(PATH))
    found = [digest(training.learner)]
    list(training.steps(6))
    found.append(digest(training.learner))
    mode = Choice("local", instep.Local, {"steps": 1}).mode(training.learner)
    # Shard 1 is an update of its own and comes first; it sends no counters.
    jobs = [Job(Portion(0, shard, 2), 0, shard) for shard in (1, 0)]
    head = head_line(Head(instep.StaleSynchronous(1), 2, 2, 0, 0))
    lines = [head, *(group_line(Group((job,))) for job in jobs)]
    Path("record").write_text("".join(lines))
    batches, record = batches_between(training.job, 6, 7), instep.Replay("record")
    number = len(list(take_steps(training.pool, training.learner, batches, record)))
print(found == [half, straight], half == straight, number)
print(mode.optimizer)
"""


@pytest.mark.parametrize(
    ("framework", "text", "name"),
    [
        ("torch", TORCH, "AdamW'>, lr=0.01"),
        ("tensorflow", KERAS, "Adam"),
        ("jax", JAX, "GradientTransformation"),
    ],
)
def test_a_resumed_training_has_the_bits_of_one_in_one_go(
    framework, text, name, tmp_path
):
    pytest.importorskip(framework)
    (tmp_path / "job.py").write_text(text)
    result = run_python("-c", SCRIPT, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    same, optimizer = result.stdout.splitlines()
    assert same == "True False 2"
    assert name in optimizer  # of local workers, made like the job's
