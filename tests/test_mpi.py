"""The MPI engine, in jobs of several ranks on this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import write_script

pytest.importorskip("mpi4py")

MPIRUN = Path(sys.executable).with_name("mpirun")

CONFORMANCE = """
from instep import testing

testing.check_engine("mpi", [1, 2, 3])
print("all facts hold")
"""

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
assert trained("mpi", instep.Synchronous()) == trained("serial")
recorded = trained("mpi", instep.Asynchronous(), record="run")
assert trained("serial", instep.Replay("run")) == recorded
local = instep.Local(2, 0.1)
assert trained("mpi", local) == trained("serial", local)
print("the same bits")
"""


def run(folder, text, ranks=3, **options):
    """A job that runs this script on rank 0."""
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    words = ["-m", "instep", "run", "--engine", "mpi", write_script(folder, text)]
    return subprocess.run(
        [MPIRUN, *options, "-n", str(ranks), sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=55,
        cwd=folder,
    )


def test_the_conformance_facts_hold(tmp_path):
    result = run(tmp_path, CONFORMANCE, ranks=4)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "all facts hold\n"


def test_training_has_the_bits_of_the_serial_engine_in_every_mode(tmp_path):
    result = run(tmp_path, TRAINING)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "the same bits\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("raise ValueError('of the script')", "ValueError: of the script"),
        ("pool(np.ones(1), -np.ones(4))", "ValueError: of the loss"),
        ("pool(np.ones(1), np.zeros(4))", ""),  # ends its rank
    ],
)
def test_an_error_or_a_death_on_any_rank_ends_the_job(tmp_path, line, text):
    script = f"""
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
{line}
"""
    begin = time.monotonic()
    result = run(tmp_path, script)
    assert result.returncode != 0
    assert text in result.stderr
    assert time.monotonic() - begin < 20


def test_a_job_without_workers_says_how_to_start_one(tmp_path):
    script = "import instep\ninstep.numpy.value_and_grad(print)\n"
    result = run(tmp_path, script, ranks=1)
    assert result.returncode == 1
    assert "engine='mpi' in a job of 1 ranks" in result.stderr
    assert "mpirun -n 9 instep run --engine mpi script.py" in result.stderr
