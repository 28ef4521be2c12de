"""A CPU device with a fixed number of threads inside one operation.

XLA makes one thread per core that the process may use, and the number of threads
decides how it splits a sum, hence its bits. PJRT_NPROC, read when a client is made,
says another number; it holds for compiling and for computing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jaxlib import xla_client

_config: Any = jax.config
_VARIABLES = ("PJRT_NPROC", "NPROC")  # the new name and the old one


def start_backend(threads: int) -> None:
    """Makes JAX's own backend that of the CPU, with so many threads: in a worker."""
    _config.update("jax_platforms", "cpu")
    # A computation is over when its call returns: nothing reads the shared memory
    # after that, and no time goes to waking another thread.
    _config.update("jax_cpu_enable_async_dispatch", False)
    with _announced(threads):
        jax.devices()


@functools.cache
def private_device(threads: int) -> jax.Device:
    """A device beside those of JAX's own backend, which keeps its threads.

    For the serial engine: the process is the user's, and its backend may have
    started long ago.
    """
    with _announced(threads):
        client: Any = xla_client.make_cpu_client(asynchronous=False)
    device: jax.Device = client.local_devices()[0]
    return device


@contextmanager
def _announced(threads: int) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(dict.fromkeys(_VARIABLES, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
