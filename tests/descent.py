"""A training whose last bit tells whether an engine has computed as the others do."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np

import instep

X = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
Y = np.sin(X.sum(1, keepdims=True))
HIDDEN = 16


def initial() -> dict[str, Any]:
    """The weights of a small network."""
    rng = np.random.default_rng(1)
    return {
        "first": rng.normal(size=(8, HIDDEN)).astype(np.float32) / 3,
        "second": rng.normal(size=(HIDDEN, 1)).astype(np.float32) / 4,
    }


def network(w: dict[str, Any], x: Any, y: Any) -> Any:
    """The squared error with noise on the hidden layer, and its gradient."""
    hidden = np.tanh(x @ w["first"])
    noise = np.random.normal(size=hidden.shape).astype(np.float32) / 10
    error = (hidden + noise) @ w["second"] - y
    slope = 2 * error / np.float32(len(x))
    back = (slope @ w["second"].T) * (1 - hidden**2)
    gradient = {"first": x.T @ back, "second": (hidden + noise).T @ slope}
    return float(np.mean(error**2)), gradient


def digest(engine: Any, steps: int = 200, between: Any = None, **options: Any) -> str:
    """SHA-256 of the weights after so many steps with momentum.

    Args:
        engine: name or object.
        steps: of the training.
        between: called with pool and step after each of them.
        **options: of the pool; 5 shards unless they say otherwise.
    """
    w = initial()
    speed = {name: np.zeros_like(value) for name, value in w.items()}
    options = {"shards": 5, **options}
    with instep.numpy.value_and_grad(network, engine=engine, **options) as pool:
        for step in range(steps):
            _, grads = pool(w, X, Y)
            for name, grad in grads.items():
                speed[name] = np.float32(0.9) * speed[name] + grad
                w[name] = w[name] - np.float32(0.01) * speed[name]
            if between is not None:
                between(pool, step)
    total = hashlib.sha256()
    for name in sorted(w):
        total.update(w[name].tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    print(digest(sys.argv[1]))
