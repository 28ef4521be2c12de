"""Seeds of a model's random generators: every shard has its own."""

from __future__ import annotations

from typing import Any

STRIDE = 0x9E3779B1
"""Odd and far from any small multiple: seeds of shards and of layers do not meet."""


def is_seed(variable: Any) -> bool:
    """Whether it is the state of a `keras.random.SeedGenerator`: (seed, counter)."""
    return bool(variable.name == "seed_generator_state")
