"""The MPI engine, in jobs of several ranks on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import write_script

pytest.importorskip("mpi4py")

MPIRUN = Path(sys.executable).with_name("mpirun")

FACTS = Path(__file__).with_name("mpi_facts.py")
PREFIX = [sys.executable, "-m", "instep", "run", "--engine", "mpi"]

TRAINING = """
import hashlib
import torch
import instep

torch.set_num_threads(1)

def loss(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)

def trained(engine, mode=None, **options):
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    y = x.sum(1, keepdim=True)
    layers = torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with instep.torch.GradientPool(model, loss, shards=3, engine=engine) as pool:
        if mode is None:
            for _ in range(10):
                optimizer.zero_grad()
                pool.backward(x, y)
                optimizer.step()
        else:
            for _ in pool.stream([(x, y)] * 10, mode, **options):
                optimizer.step()
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().numpy().tobytes())
    return total.hexdigest()

assert trained("mpi") == trained("serial")
recorded = trained("mpi", instep.Asynchronous(), record="run")
assert trained("serial", instep.Replay("run")) == recorded
print("the same bits")
"""


def run(folder, script, ranks=3, machines=(), **variables):
    """A job that runs a script (or this text) on rank 0.

    machines: ranks of each, as if they were several; or all are on one.
    """
    if not isinstance(script, Path):
        script = write_script(folder, script)
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    for name, value in variables.items():
        options += ["-x", f"{name}={value}"]
    words = [MPIRUN, *options, "-n", str(ranks), *PREFIX[:-2], script]
    if machines:
        words = [MPIRUN, *options]
        for number, size in enumerate(machines):
            words += [":"] * bool(number) + ["-x", f"INSTEP_MACHINE={number}"]
            words += ["-n", str(size), *PREFIX, script]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=100, cwd=folder
    )


@pytest.mark.guard(110)
def test_the_facts_hold_on_several_machines(tmp_path):
    result = run(tmp_path, FACTS, machines=(2, 1, 1))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "all facts hold\n"


LONG_MESSAGES = """
import numpy as np
import instep

def fun(w, x):
    return np.mean(x), w * np.mean(x)

def bits(engine):
    rows = np.linspace(0, 1, 1280).reshape(160, 8)
    with instep.numpy.value_and_grad(fun, engine=engine, shards=5) as pool:
        for _ in range(3):
            loss, grad = pool(np.linspace(1, 2, 60_000), rows)
    return loss.tobytes() + grad.tobytes()

assert bits("mpi") == bits("serial")
print("the same bits")
"""


def test_messages_are_cut_where_they_are_too_long(tmp_path):
    limit = {"INSTEP_MPI_MESSAGE_BYTES": 1024}
    result = run(tmp_path, LONG_MESSAGES, machines=(2, 1, 1), **limit)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "the same bits\n"


def test_training_a_torch_model_has_the_bits_of_the_serial_engine(tmp_path):
    result = run(tmp_path, TRAINING, machines=(2, 1))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "the same bits\n"


FAILING = """
import os
import numpy as np
import instep

def fun(w, x):
    if x[0] < 0:
        raise ValueError("of the loss")
    if x[0] == 0:
        os._exit(3)
    return np.mean(x), w

pool = instep.numpy.value_and_grad(fun)
assert pool(np.ones(1), np.ones(4))[0] == 1
"""


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("raise ValueError('of the script')", "ValueError: of the script"),
        ("pool(np.ones(1), -np.ones(4))", "ValueError: of the loss"),
        ("pool(np.ones(1), np.zeros(4))", "exit code 3"),  # ends its worker
        ("os.kill(os.getpid(), 9)", "signal 9"),  # rank 0
    ],
)
def test_an_error_or_a_death_ends_the_job(tmp_path, line, text):
    begin = time.monotonic()
    result = run(tmp_path, FAILING + line, machines=(2, 1))
    assert result.returncode != 0
    assert text in result.stderr
    assert time.monotonic() - begin < 20


def test_the_death_of_a_rank_ends_the_job(tmp_path):
    """Of the one that serves on another machine, while the script computes."""
    script = (
        FAILING
        + """
while True:
    assert pool(np.ones(1), np.ones(4))[0] == 1
    ranks = [child for child in psutil.Process(os.getppid()).children()]
    ranks[-1].kill()
"""
    )
    begin = time.monotonic()
    result = run(tmp_path, "import psutil\n" + script, machines=(2, 1))
    assert result.returncode != 0
    assert time.monotonic() - begin < 20


def test_a_job_without_workers_says_how_to_start_one(tmp_path):
    script = "import instep\ninstep.numpy.value_and_grad(print)\n"
    result = run(tmp_path, script, machines=(1,))
    assert result.returncode == 1
    assert "engine='mpi' in a job of 1 ranks" in result.stderr
    assert "mpirun -n 9 instep run script.py" in result.stderr


JOB = """
import numpy as np
import instep

def loss(w, x):
    return float(np.mean((w - x) ** 2)), 2 * (w - np.mean(x))

def job():
    return instep.Job(np.zeros(1), loss, (np.arange(30.0),), 10, optimizer=0.1, steps=9)
"""


def test_a_job_is_trained_by_a_job_of_mpi(tmp_path):
    """Nobody has to say which engine."""
    job = write_script(tmp_path, JOB)
    words = ["-m", "instep", "train", job, "--json", "--shards", "3"]
    launched = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    on_ranks, alone = (
        subprocess.run(
            [*launcher, sys.executable, *words, *engine],
            capture_output=True,
            text=True,
            timeout=50,
        )
        for launcher, engine in (
            ([*launched, "-n", "3"], []),
            ([], ["--engine", "serial"]),
        )
    )
    assert on_ranks.returncode == 0, on_ranks.stderr
    found, expected = (json.loads(run.stdout) for run in (on_ranks, alone))
    assert (found["engine"], found["workers"]) == ("mpi", 2)
    assert found["losses"] == expected["losses"]
