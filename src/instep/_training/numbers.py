"""Numbers as JSON can write them."""

from __future__ import annotations

import math


def finite(number: float) -> float | None:
    """The number, or None for NaN and infinity, which JSON does not know."""
    return number if math.isfinite(number) else None
