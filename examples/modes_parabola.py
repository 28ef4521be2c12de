"""Fits 50 points of x^2 + noise in every mode: one loop, one pool of four workers."""

from copy import deepcopy
from functools import partial

import torch
from torch import nn

import instep
import instep.torch

BATCHES, RATE = 320, 0.1

torch.set_num_threads(1)  # the workers need the cores
torch.manual_seed(0)
x = 2 * torch.rand(50, 1) - 1
y = x**2 + 0.05 * torch.randn(50, 1)
model = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1))
start = deepcopy(model.state_dict())


def loss(model, x, y):
    return nn.functional.mse_loss(model(x), y)


sgd = partial(torch.optim.SGD, lr=RATE)
average = partial(torch.optim.SGD, lr=1)  # the average of what the workers have
outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
adamw = partial(torch.optim.AdamW, lr=0.003)
stale, delay = instep.StalenessAware(), instep.DelayCompensated(0.04)
MODES = {  # name: mode, the master's optimizer
    "Synchronous()": (instep.Synchronous(), sgd),
    "Synchronous(backup=1)": (instep.Synchronous(backup=1), sgd),
    "Asynchronous()": (instep.Asynchronous(), sgd),
    "Asynchronous(max_staleness=1)": (instep.Asynchronous(max_staleness=1), sgd),
    "  with StalenessAware()": (instep.Asynchronous(correction=stale), sgd),
    "  with DelayCompensated(0.04)": (instep.Asynchronous(correction=delay), sgd),
    "StaleSynchronous(1)": (instep.StaleSynchronous(1), sgd),
    "Local(4, SGD)": (instep.Local(4, RATE), average),
    "Local(4, SGD, elastic=0.2)": (instep.Local(4, RATE, elastic=0.2), average),
    "Local(4, AdamW): DiLoCo": (instep.Local(4, adamw), outer),
}

print("mode                            updates     loss  staleness  dropped rows")
with instep.torch.GradientPool(model, loss, workers=4) as pool:
    pool.evaluate(x, y)  # the workers have started
    for name, (mode, make) in MODES.items():
        model.load_state_dict(start)
        optimizer = make(model.parameters())
        staleness, dropped = [], 0
        for update in pool.stream([(x, y)] * BATCHES, mode):
            optimizer.step()  # the gradients are in .grad
            staleness.append(update.staleness)
            dropped += len(update.dropped)
        end, mean = pool.evaluate(x, y), sum(staleness) / len(staleness)
        print(f"{name:31} {len(staleness):7}  {end:.5f}  {mean:9.2f}  {dropped:12,}")
