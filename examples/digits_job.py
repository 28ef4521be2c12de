"""Scanned digits, as a job file: do several processes pay, and in which mode?

instep tune digits_job.py
instep compare digits_job.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import instep


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def job():
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images.reshape(-1, 1, 8, 8).astype("float32") / 16)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(32 * 4 * 4, 10),
    )
    return instep.Job(
        model=model,
        loss=loss,
        data=(x, torch.from_numpy(labels)),
        batch_size=256,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        steps=160,
    )
