"""The losses of cost.py: what they cost is known."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

SLEEP_S = 0.02

_gradients: dict[int, np.ndarray] = {}


def empty(params: Any, rows: Any) -> Any:
    """Costs nothing."""
    return np.float32(0), params


def sleep(params: Any, rows: Any) -> Any:
    """Takes a while and no core."""
    time.sleep(SLEEP_S)
    return np.float32(0), params


def preset(params: Any, rows: Any) -> Any:
    """Has its gradient since before."""
    if params.size not in _gradients:
        _gradients.clear()
        _gradients[params.size] = np.ones(params.size, np.float32)
    return np.float32(0), _gradients[params.size]
