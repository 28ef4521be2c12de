"""The models that peers.py trains, and their data: the same in every process.

All are PyTorch models with a loss over a batch. A `Task` has a few batches, which the
steps go through again and again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

SEED = 0
BATCHES = 4
VOCABULARY = 64
LENGTH = 64
STATES = 8

Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        make: makes the model; `model` gives it its initial weights.
        loss: `loss(model, x, y)`, the mean over the rows.
        batches: (x, y) each.
        steps: that a turn takes and times.
        rate: of the optimizer, which is SGD without momentum.
    """

    make: Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor]
    batches: list[Batch]
    steps: int
    rate: float

    def model(self) -> nn.Module:
        """The model with its initial weights."""
        torch.manual_seed(SEED)
        return self.make()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the model."""
        return torch.optim.SGD(model.parameters(), self.rate)

    def tensors(self, part: int = 0, parts: int = 1) -> list[Any]:
        """The batches as tensors, or this part of the rows of each."""
        return [
            tuple(torch.from_numpy(rows_of(array, part, parts)) for array in batch)
            for batch in self.batches
        ]


def rows_of(array: np.ndarray, part: int, parts: int) -> np.ndarray:
    """One of several equal parts of the rows, in memory of its own."""
    rows = len(array) // parts
    return array[part * rows : (part + 1) * rows].copy()


def squared_error(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(x), y)


def cross_entropy(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of classes, or of each next character."""
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


class Lstm(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


class Transformer(nn.Module):
    """Predicts the next character; two layers without dropout."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(x) + self.position
        return self.head(self.encoder(embedded, mask=self.mask, is_causal=True))


class Chain(nn.Module):
    """A linear-chain model; its loss is a dynamic program in Python, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.emissions = nn.Linear(4, STATES)
        self.transitions = nn.Parameter(torch.zeros(STATES, STATES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = zip(self.emissions(x), y, strict=True)
        losses = [row_loss(row, path, self.transitions) for row, path in rows]
        return torch.stack(losses).mean()


def own_loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What the model computes is its loss."""
    return model(x, y)


def row_loss(
    emissions: torch.Tensor, path: torch.Tensor, transitions: torch.Tensor
) -> torch.Tensor:
    """Minus the log-likelihood of a path of states."""
    total, steps = emissions[0], path.tolist()
    score = emissions[0, steps[0]]
    for t in range(1, len(steps)):
        total = torch.logsumexp(total[:, None] + transitions, 0) + emissions[t]
        score = score + transitions[steps[t - 1], steps[t]] + emissions[t, steps[t]]
    return torch.logsumexp(total, 0) - score


def dense(*widths: int) -> nn.Module:
    """Dense layers with ReLU in between."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutions() -> nn.Module:
    """A small network for images, 1.2 million weights."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def curve(rows: int) -> list[Batch]:
    """Points of a parabola with noise."""
    random = np.random.default_rng(SEED)
    x = np.linspace(-1, 1, rows, dtype=np.float32)[:, None]
    noise = 0.05 * random.standard_normal((BATCHES, *x.shape))
    return [(x, (x**2 + e).astype(np.float32)) for e in noise]


def pictures(rows: int, *shape: int) -> list[Batch]:
    """A picture per class under noise."""
    random = np.random.default_rng(SEED)
    classes = random.standard_normal((10, *shape))
    batches = []
    for _ in range(BATCHES):
        y = random.integers(10, size=rows)
        x = 0.3 * classes[y] + random.standard_normal((rows, *shape))
        batches.append((x.astype(np.float32), y))
    return batches


def texts(rows: int) -> list[Batch]:
    """Characters that follow each other by a rule, most of the time."""
    random = np.random.default_rng(SEED)
    starts = random.integers(VOCABULARY, size=(BATCHES, rows, 1))
    text = (starts + 7 * np.arange(LENGTH + 1)) % VOCABULARY
    is_noise = random.random(text.shape) < 0.1
    text[is_noise] = random.integers(VOCABULARY, size=is_noise.sum())
    return [(part[:, :-1].copy(), part[:, 1:].copy()) for part in text]


def paths(rows: int, length: int = 16) -> list[Batch]:
    """Paths of states, and what can be seen of them."""
    random = np.random.default_rng(SEED)
    y = random.integers(STATES, size=(BATCHES, rows, length))
    codes = random.standard_normal((STATES, 4))
    x = codes[y] + 0.5 * random.standard_normal((*y.shape, 4))
    return list(zip(x.astype(np.float32), y, strict=True))


BIG = functools.partial(dense, 784, 4096, 4096, 1190, 10)
MLP = functools.partial(dense, 784, 512, 512, 10)
PARABOLA = functools.partial(dense, 1, 10, 1)

TASKS: dict[str, Callable[[], Task]] = {
    "parabola": lambda: Task(PARABOLA, squared_error, curve(50), 100, 0.05),
    "MLP": lambda: Task(MLP, cross_entropy, pictures(256, 784), 10, 0.05),
    "CNN": lambda: Task(convolutions, cross_entropy, pictures(128, 1, 28, 28), 3, 0.01),
    "LSTM": lambda: Task(Lstm, cross_entropy, texts(64), 4, 0.5),
    "transformer": lambda: Task(Transformer, cross_entropy, texts(32), 4, 0.05),
    "Python loop": lambda: Task(Chain, own_loss, paths(32), 3, 0.05),
    "25 M weights": lambda: Task(BIG, cross_entropy, pictures(128, 784), 2, 0.01),
}
