"""Trains a network on 1,797 scanned digits in the main modes, with four workers."""

import time
from copy import deepcopy
from functools import partial

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import instep.torch

EPOCHS, BATCH_SIZE, RATE = 24, 64, 0.1

torch.manual_seed(0)
torch.set_num_threads(1)  # the workers need the cores
x, y = load_digits(return_X_y=True)
split = train_test_split(x.astype("float32") / 16, y, random_state=0)
x_train, x_test, y_train, y_test = map(torch.from_numpy, split)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
start = deepcopy(model.state_dict())


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def batches():
    for epoch in range(EPOCHS):
        for rows in instep.shuffled(len(x_train), BATCH_SIZE, epoch=epoch):
            yield x_train[rows], y_train[rows]


sgd = partial(torch.optim.SGD, lr=RATE)
average = partial(torch.optim.SGD, lr=1)  # takes over the workers' average
MODES = {  # name: mode, the master's optimizer
    "Synchronous()": (instep.Synchronous(), sgd),
    "Synchronous(backup=1)": (instep.Synchronous(backup=1), sgd),
    "Asynchronous()": (instep.Asynchronous(), sgd),
    "Asynchronous(max_staleness=1)": (instep.Asynchronous(max_staleness=1), sgd),
    "StaleSynchronous(1)": (instep.StaleSynchronous(1), sgd),
    "Local(4, SGD)": (instep.Local(4, RATE), average),
}

print("mode                           held-out accuracy  updates  staleness  seconds")
with instep.torch.GradientPool(model, loss, workers=4) as pool:
    pool.evaluate(x_train, y_train)  # starts the workers
    for name, (mode, make) in MODES.items():
        model.load_state_dict(start)
        optimizer = make(model.parameters())
        begin, staleness = time.perf_counter(), []
        for update in pool.stream(batches(), mode):
            optimizer.step()  # the gradients are in .grad
            staleness.append(update.staleness)
        seconds, updates = time.perf_counter() - begin, len(staleness)
        accuracy = (model(x_test).argmax(1) == y_test).float().mean()
        mean = sum(staleness) / updates
        print(f"{name:30} {accuracy:17.2%}  {updates:7}  {mean:9.2f}  {seconds:7.2f}")
