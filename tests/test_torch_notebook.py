"""A PyTorch pool in a notebook: cells are changed, interrupted and run again."""

from __future__ import annotations

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from conftest import wait_until

pytest.importorskip("torch")

MODEL = """
import torch, instep
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(40, 3)
y = x.sum(1, keepdim=True)

def loss(model, x, y):
    return (model(x) - y).square().mean()
"""
POOL = "pool = instep.torch.GradientPool(model, loss, workers=2)"
TRAIN = """
for _ in range(5):
    optimizer.zero_grad()
    value = pool.backward(x, y)
    optimizer.step()
expected = loss(model, x, y)
print(torch.isclose(pool.evaluate(x, y), expected).item(), *pool.statistics().pids)
"""
OTHER_LOSS = """
def loss(model, x, y):
    return (model(x) - y).abs().mean()
"""
FOR_EVER = """
print("running", flush=True)
while True:
    optimizer.zero_grad()
    pool.backward(x, y)
    optimizer.step()
"""
SLEEPING_LOSS = """
import time
def loss(model, x, y):
    if len(x) == 2:
        time.sleep(600)
    return (model(x) - y).abs().mean()
"""
ASLEEP = """
print("running", flush=True)
pool.backward(x[:4], y[:4])
"""


@pytest.mark.filterwarnings("default")  # of the kernel's own packages
def test_cells_may_be_changed_interrupted_and_run_again():
    manager, client = start_new_kernel()
    try:
        kernel = psutil.Process(manager.provisioner.process.pid)
        for cell in (MODEL, POOL):
            run(client, cell)
        seen = [run(client, TRAIN)]
        for cell in (OTHER_LOSS, POOL):
            run(client, cell)
        seen.append(run(client, TRAIN))
        interrupt(manager, client, FOR_EVER)
        seen.append(run(client, TRAIN))
        for cell in (SLEEPING_LOSS, POOL):
            run(client, cell)
        seen.append(run(client, TRAIN))
        interrupt(manager, client, ASLEEP)
        seen.append(run(client, TRAIN))
        pools = [set(output.split()[1:]) for output in seen]
        assert all(output.startswith("True") for output in seen), seen
        assert not pools[0] & pools[1]  # a new pool, and the old one is gone
        run(client, "import gc; gc.collect()")  # the kernel keeps the last traceback
        wait_until(  # the template is the one; who was killed may not be reaped yet
            lambda: len(kernel.children(recursive=True)) == 2 + 1, "an old worker lives"
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
    pids = {int(pid) for pool in pools for pid in pool}
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "a worker is left")


def run(client, code):
    """What the cell printed."""
    printed, reply = execute(client, code)
    assert reply["status"] == "ok", "\n".join(reply["traceback"])
    return printed


def interrupt(manager, client, code):
    """Starts the cell and interrupts it once it says that it is running."""
    _, reply = execute(client, code, manager.interrupt_kernel)
    assert reply["ename"] == "KeyboardInterrupt", reply


def execute(client, code, when_running=None):
    """What the cell printed, and the reply to it."""
    printed = []

    def note(message):
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
            if when_running is not None:
                when_running()

    reply = client.execute_interactive(code, output_hook=note, timeout=40)
    return "".join(printed), reply["content"]
