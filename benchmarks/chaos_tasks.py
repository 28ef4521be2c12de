"""Two trainings with a pool: what chaos.py disturbs and soak.py watches.

Both draw random numbers inside the loss, and both have a gradient of more than
four mebibytes, which the workers average themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

import instep
import instep.numpy

ROWS = 2000
BATCH_ROWS = 64  # the last batch of an epoch is smaller
NUM_CLASSES = 10


class Training(Protocol):
    """A model, a pool and a data set."""

    pool: Any
    gradient_nbytes: int

    def step(self) -> float:
        """Takes one step; the loss before it."""

    def evaluate(self) -> None:
        """Has the pool compute something that changes nothing."""

    def digest(self) -> str:
        """SHA-256 of all parameters."""

    def close(self) -> None:
        """Ends the pool."""


def batches() -> Iterator[Any]:
    """Row numbers of one minibatch after the other, without end."""
    epoch = 0
    while True:
        yield from instep.shuffled(ROWS, BATCH_ROWS, seed=1, epoch=epoch)
        epoch += 1


def noisy_regression(w: Any, x: Any, y: Any) -> Any:
    """Squared error per row, of inputs with noise drawn anew in every shard."""
    x = x + 0.1 * np.random.standard_normal(x.shape)
    error = x @ w - y
    return np.sum(error**2) / len(x), 2 * x.T @ error / len(x)


class NumpyTraining:
    """Gradient descent for a linear map."""

    width = 736
    gradient_nbytes = 8 * width**2

    def __init__(self, **options: Any) -> None:
        generator = np.random.default_rng(0)
        self._x = generator.standard_normal((ROWS, self.width))
        self._y = self._x @ generator.standard_normal((self.width, self.width))
        self._w = np.zeros((self.width, self.width))
        self._batches = batches()
        self.pool = instep.numpy.value_and_grad(noisy_regression, **options)

    def step(self) -> float:
        rows = next(self._batches)
        loss, gradient = self.pool(self._w, self._x[rows], self._y[rows])
        self._w = self._w - 0.01 * gradient
        return float(loss)

    def evaluate(self) -> None:
        self.pool.evaluate(self._w, self._x[:BATCH_ROWS], self._y[:BATCH_ROWS])

    def digest(self) -> str:
        return hashlib.sha256(self._w.tobytes()).hexdigest()

    def close(self) -> None:
        self.pool.close()


def cross_entropy(model: Any, x: Any, y: Any) -> Any:
    """The mean over the rows."""
    import torch

    return torch.nn.functional.cross_entropy(model(x), y)


class TorchTraining:
    """A perceptron with dropout, trained by Adam."""

    width = 1024
    gradient_nbytes = 4 * (65 * width + width * (width + 1) + (width + 1) * NUM_CLASSES)

    def __init__(self, **options: Any) -> None:
        import torch

        from instep.torch import GradientPool

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._x = torch.randn(ROWS, 64)
        self._y = torch.randint(NUM_CLASSES, (ROWS,))
        self._model = self._perceptron(torch.nn)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)
        self._batches = batches()
        self.pool = GradientPool(self._model, cross_entropy, **options)

    def _perceptron(self, nn: Any) -> Any:
        return nn.Sequential(
            *(nn.Linear(64, self.width), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Linear(self.width, self.width), nn.ReLU(), nn.Dropout(0.2)),
            nn.Linear(self.width, NUM_CLASSES),
        )

    def step(self) -> float:
        rows = next(self._batches)
        self._optimizer.zero_grad()
        loss = self.pool.backward(self._x[rows], self._y[rows])
        self._optimizer.step()
        return float(loss)

    def evaluate(self) -> None:
        self.pool.evaluate(self._x[:BATCH_ROWS], self._y[:BATCH_ROWS])

    def digest(self) -> str:
        total = hashlib.sha256()
        for parameter in self._model.parameters():
            total.update(parameter.detach().numpy().tobytes())
        return total.hexdigest()

    def close(self) -> None:
        self.pool.close()


TRAININGS = {"numpy": NumpyTraining, "torch": TorchTraining}
