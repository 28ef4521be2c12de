"""Trains a convolutional network on 1,797 scanned digits with four workers."""

import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import instep.torch

EPOCHS, BATCH_SIZE = 24, 64

torch.manual_seed(0)
torch.set_num_threads(1)  # the workers need the cores
images, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = map(
    torch.from_numpy,
    train_test_split(
        images.reshape(-1, 1, 8, 8).astype("float32") / 16,
        labels,
        test_size=0.2,
        random_state=0,
        stratify=labels,
    ),
)

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
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


begin = time.perf_counter()
with instep.torch.GradientPool(model, loss, workers=4) as pool:
    for epoch in range(1, EPOCHS + 1):
        for rows in torch.randperm(len(x_train)).split(BATCH_SIZE):
            optimizer.zero_grad()
            value = pool.backward(x_train[rows], y_train[rows])
            optimizer.step()
        if epoch % 4 == 0:
            print(f"epoch {epoch:2}  loss {value:.4f}")

model.eval()
accuracy = (model(x_test).argmax(1) == y_test).float().mean()
seconds = time.perf_counter() - begin
print(f"held-out accuracy {accuracy:.2%} in {seconds:.0f} s, start-up included")
