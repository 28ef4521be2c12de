"""Several hosts, each with a network of its own: MPI and Ray between them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

import descent
from conftest import wait_until
from helpers import write_script
from hosts import PYTHON, RAY, Hosts, reason_against

pytest.importorskip("mpi4py")
pytest.importorskip("ray")

if reason := reason_against():
    pytest.skip(reason, allow_module_level=True)

TESTS = Path(__file__).parent
RUN = ["-m", "instep", "run", "--engine", "mpi"]


@pytest.fixture
def hosts():
    opened = Hosts(4, rate="1gbit")
    yield opened
    opened.close()


# MPI

COUNTED = """
import sys
import numpy as np
import instep

sys.path.append({tests!r})
import descent

def fun(w, x):
    return np.mean(x), w * np.mean(x)

assert descent.digest("mpi") == descent.digest("serial")
weights, rows = np.linspace(0, 1, 1_000_000), np.arange(8.0)
with instep.numpy.value_and_grad(fun, shards=4) as pool:
    while True:  # until each of the four computes one shard
        before = pool.statistics().shards_computed
        pool(weights, rows)
        after = pool.statistics().shards_computed
        if all(b - a == 1 for a, b in zip(before, after)):
            break
    print("begin", flush=True)
    input()
    for _ in range({steps}):
        pool(weights, rows)
    print("end", flush=True)
    input()
"""


@pytest.mark.guard(110)
def test_four_hosts_have_the_bits_of_one_and_send_at_most_2_2_gradients(
    hosts, tmp_path
):
    """Each sends its parts of gradient and parameters, with all that TCP adds."""
    steps = 10
    text = COUNTED.format(tests=str(TESTS), steps=steps)
    script = write_script(tmp_path, text)
    job = start(hosts.mpirun([2, 1, 1, 1], *RUN, script), tmp_path / "output")
    wait_for(job, "begin")
    before = [hosts.sent(host) for host in range(4)]
    answer(job)
    wait_for(job, "end")
    after = [hosts.sent(host) for host in range(4)]
    answer(job)
    assert end(job) == 0
    gradient = 8_000_000
    sent = [(b - a) / steps / gradient for a, b in zip(before, after, strict=True)]
    assert max(sent) <= 2.2
    assert min(sent) > 1  # that much was really sent


ENDLESS = """
import numpy as np
import instep

def fun(w, x):
    return np.mean(x), w * np.mean(x)

pool = instep.numpy.value_and_grad(fun)
for step in range(10**9):
    pool(np.ones(50_000), np.ones(6))
    if step == 50:
        print("under way", flush=True)
"""


@pytest.mark.guard(110)
def test_a_host_that_is_cut_off_ends_the_job_of_mpi(hosts, tmp_path):
    script = write_script(tmp_path, ENDLESS)
    job = start(hosts.mpirun([2, 1, 1], *RUN, script), tmp_path / "output")
    wait_for(job, "under way")
    hosts.cut_off(2)
    # Who notices first: instep, which then ends the launcher, too; or the launcher,
    # which ends the ranks, and may wait for the lost host itself.
    wait_until(lambda: not ranks_on(hosts, 0), "rank 0 goes on", seconds=20)
    said = (tmp_path / "output").read_text()
    heard = f"on {hosts.names[2]} has not been heard of for 12 s" in said
    assert heard or "lost communication" in said
    job.kill()
    assert end(job) != 0


# Ray

# So that a node that says nothing is dead after some seconds.
RAY_VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0" * 64,
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "0",
}


@pytest.fixture
def cluster(hosts, monkeypatch):
    for name, value in RAY_VARIABLES.items():
        monkeypatch.setenv(name, value)
    head = ["--head", "--port=6379", f"--temp-dir={hosts.folder}"]
    start_node(hosts, 0, *head, "--include-dashboard=false")
    for host in (1, 2):
        start_node(hosts, host, address(hosts))
    return hosts


TRAINING = """
import sys
import instep

sys.path.append({tests!r})
import descent

engine = instep.engines.Ray({address!r}, workers=3)
actors = engine._actors

def between(pool, step):
    if step in (20, 90):  # until all workers are there
        while len(engine._places) < 3:
            pool.evaluate(descent.initial(), descent.X, descent.Y)
    if step in (30, 60, 90, 120):
        print("step", step, flush=True)
        input()
    if step == 60:
        engine._ray.kill(actors[max(actors)])

print(descent.digest(engine, between=between), flush=True)
input()
"""


@pytest.mark.guard(150)
def test_ray_goes_on_with_the_same_bits_whatever_happens_to_its_nodes(
    cluster, tmp_path
):
    """A daemon is killed, then an actor; a node comes, and one is cut off."""
    text = TRAINING.format(tests=str(TESTS), address=f"{cluster.addresses[0]}:6379")
    script = write_script(tmp_path, text)
    job = start(cluster.command(0, PYTHON, script), tmp_path / "output")
    wait_for(job, "step 30")
    (daemon,) = cluster.pids(1, "raylet/raylet")
    os.kill(daemon, 9)
    answer(job)
    wait_for(job, "step 60")  # and an actor is killed
    start_node(cluster, 3, address(cluster))
    answer(job)
    wait_for(job, "step 90")  # with the node that has come
    answer(job)
    wait_for(job, "step 120")
    cluster.cut_off(2)
    answer(job)
    wait_for(job, descent.digest("serial"))
    answer(job)
    assert end(job) == 0


def ranks_on(hosts, host):
    """Ranks of the job there; `mpirun`'s command line names them, too."""
    pids = hosts.pids(host, "instep")
    return [pid for pid in pids if psutil.Process(pid).name().startswith("python")]


def address(hosts):
    return f"--address={hosts.addresses[0]}:6379"


def start_node(hosts, host, *words):
    """The daemons of a node of one CPU; on a busy machine Ray gives up at times."""
    ip = f"--node-ip-address={hosts.addresses[host]}"
    command = [RAY, "start", ip, "--num-cpus=1", "--disable-usage-stats", *words]
    for _ in range(3):
        job = start(hosts.command(host, *command), hosts.folder / f"log{host}")
        if end(job) == 0:
            return
    raise AssertionError(job.said.read_text())


def start(command, output):
    """A job that writes to a file: what outlives it may hold a pipe open."""
    with open(output, "w") as file:
        job = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=output.parent,
            text=True,
        )
    job.said = output
    return job


def end(job):
    """Waits for its end."""
    with job:
        return job.wait()


def wait_for(job, text):
    """Until the job has said so."""
    while text not in job.said.read_text():
        assert job.poll() is None, job.said.read_text()[-5000:]
        time.sleep(0.05)


def answer(job):
    """Lets it go on."""
    job.stdin.write("\n")
    job.stdin.flush()
