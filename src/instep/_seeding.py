"""Random generators that depend on (seed, step, shard) and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from struct import pack

import numpy as np


def shard_seed(seed: int, step: int, shard: int) -> int:
    """64 bits hashed from (seed, step, shard).

    Hashed, because frameworks take seeds modulo 2**32 and some give nearby seeds
    nearby streams.
    """
    text = pack("<qqq", seed % 2**63, step, shard)
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def seed_python(seed: int) -> None:
    """Seeds `random` and `numpy.random`."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Puts `random` and `numpy.random` back as they were: the caller's stay his."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
