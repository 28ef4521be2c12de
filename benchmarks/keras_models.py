"""The two models that keras_fit.py trains, and their data: the same in every process.

A `Task` has as many batches as one turn takes steps; `fit` goes through them once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

SEED = 0
NUM_CLASSES = 10


@dataclass(frozen=True)
class Task:
    """A model and the batches of one turn.

    Attributes:
        model: makes the model, with its initial weights.
        optimizer: makes the optimizer.
        loss: makes the loss.
        x: all rows, batch after batch.
        y: what belongs to them.
        batch: rows of a batch.
    """

    model: Callable[[], Any]
    optimizer: Callable[[], Any]
    loss: Callable[[], Any]
    x: np.ndarray
    y: np.ndarray
    batch: int

    @property
    def steps(self) -> int:
        """Steps of a turn."""
        return len(self.x) // self.batch

    def compiled(self) -> Any:
        """The model, ready for `fit`."""
        model = self.model()
        model.compile(self.optimizer(), self.loss())
        return model


def parabola(steps: int = 100) -> Task:
    """A model so small that what is measured is the step around it."""
    import keras

    def model() -> Any:
        keras.utils.set_random_seed(SEED)
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((1,)), layers.Dense(10, activation="relu"), layers.Dense(1)]
        )

    random = np.random.default_rng(SEED)
    x = np.linspace(-1, 1, 50, dtype=np.float32)[:, None]
    noise = 0.05 * random.standard_normal(x.shape)
    y = (x**2 + noise).astype(np.float32)
    return Task(
        model=model,
        optimizer=lambda: keras.optimizers.SGD(0.05),
        loss=keras.losses.MeanSquaredError,
        x=np.tile(x, (steps, 1)),
        y=np.tile(y, (steps, 1)),
        batch=len(x),
    )


def cnn(steps: int = 5, batch: int = 128) -> Task:
    """A small network for images, 1.2 million weights."""
    import keras

    def model() -> Any:
        keras.utils.set_random_seed(SEED)
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(32, 3, activation="relu"),
                layers.Conv2D(64, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(NUM_CLASSES),
            ]
        )

    x, y = _images(steps * batch)
    return Task(
        model=model,
        optimizer=lambda: keras.optimizers.Adam(1e-4),
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        x=x,
        y=y,
        batch=batch,
    )


def _images(number: int) -> tuple[np.ndarray, np.ndarray]:
    """A picture per class under noise, so that there is something to learn."""
    random = np.random.default_rng(SEED)
    pictures = random.standard_normal((NUM_CLASSES, 28, 28, 1))
    y = random.integers(NUM_CLASSES, size=number)
    x = 0.1 * pictures[y] + random.standard_normal((number, 28, 28, 1))
    return x.astype(np.float32), y.astype(np.int32)


TASKS: dict[str, Callable[[], Task]] = {"parabola": parabola, "CNN": cnn}
