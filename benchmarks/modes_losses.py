"""The loss of modes.py: each row says how long it takes."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

SLOW_FACTOR = 3.0


def nap(params: Any, seconds: Any, slow: int) -> Any:
    """Sleeps as long as its first row says; the process with the id `slow`, longer."""
    time.sleep(seconds[0] * (SLOW_FACTOR if os.getpid() == slow else 1.0))
    return np.float32(0), params
