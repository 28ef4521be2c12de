"""Losses for the tests: a module of their own, since workers import it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Position(NamedTuple):
    """A pair of arrays; torn apart or truncated by a careless split."""

    x: Any
    y: Any


class Pair(NamedTuple):
    """Any two parts of a tree."""

    left: Any
    right: Any


def toy(w: Any, x: Any) -> Any:
    """The mean of w * x; its gradient is the mean of x."""
    return np.mean(w * x), np.mean(x)


def least_squares(w: Any, x: Any, y: Any) -> Any:
    """Half the mean squared residual."""
    residual = x @ w - y
    return np.mean(residual**2) / 2, x.T @ residual / len(y)


def sum_of_squares(w: Any, x: Any) -> Any:
    """A sum over the rows, not a mean."""
    return np.sum((x * w) ** 2), np.sum(2 * x**2 * w)


def logistic(w: Any, x: Any, y: Any) -> Any:
    """The mean log loss of labels y in {-1, 1}, slightly regularised."""
    margin = y * (x @ w)
    loss = np.mean(np.logaddexp(0, -margin)) + 1e-3 * w @ w
    return loss, -x.T @ (y / (1 + np.exp(margin))) / len(y) + 2e-3 * w


def wide(w: Any, x: Any) -> Any:
    """A gradient as long as the parameters, different in every shard."""
    return np.mean(x), {k: (v * x.mean()).astype(v.dtype) for k, v in w.items()}
