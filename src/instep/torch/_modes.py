"""What a loss depends on besides parameters and batch: flags of model and library.

They travel with every step as one small vector, so that `model.eval()`,
`requires_grad_` or `torch.no_grad()` in the master hold in the workers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch

from instep._program import Array
from instep.torch._anatomy import Anatomy

DENSE, SPARSE = 1, 2  # kinds of gradient; 0: none is required

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_PRECISIONS = ("highest", "high", "medium")


class _Flag(NamedTuple):
    """A flag of the library as a small number: how to read and how to set it."""

    read: Callable[[], int]
    write: Callable[[int], object]


_FLAGS = (
    _Flag(
        lambda: _DTYPES.index(torch.get_default_dtype()),
        lambda k: torch.set_default_dtype(_DTYPES[k]),
    ),
    _Flag(
        lambda: _PRECISIONS.index(torch.get_float32_matmul_precision()),
        lambda k: torch.set_float32_matmul_precision(_PRECISIONS[k]),
    ),
    _Flag(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _Flag(
        lambda: int(torch.is_anomaly_enabled()),
        lambda k: torch.autograd.set_detect_anomaly(bool(k)),
    ),
)
_NUM_LIBRARY = len(_FLAGS) + 3


def library_flags() -> list[int]:
    """The library's flags that are not bound to a `with`."""
    return [flag.read() for flag in _FLAGS]


def set_library_flags(values: list[int]) -> None:
    """Gives the library these flags."""
    for flag, value in zip(_FLAGS, values, strict=True):
        if flag.read() != value:  # setting is slow
            flag.write(value)


def modes_of(parts: Anatomy, sparse: set[int]) -> Array:
    """The master's flags now: the library's, `training`, and the kinds of gradients.

    Args:
        parts: of the model.
        sparse: indices of parameters whose gradients are known to be sparse.
    """
    flags = library_flags()
    flags += [
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        _DTYPES.index(torch.get_autocast_dtype("cpu")),
    ]
    flags += [module.training for module in parts.modules]
    kinds = [int(parameter.requires_grad) for parameter in parts.parameters]
    for index in sparse:
        kinds[index] *= SPARSE
    return np.frombuffer(bytes(flags + kinds), np.uint8)


def gradient_kinds(modes: Array, number: int) -> bytes:
    """One byte for each parameter, of `number`: DENSE, SPARSE or 0."""
    return modes[len(modes) - number :].tobytes()


class Modes:
    """Gives a worker's model and library the master's flags."""

    def __init__(self, parts: Anatomy) -> None:
        self._parts = parts
        self._known = b""
        self.kinds = b""  # of the parameters' gradients

    @contextmanager
    def applied(self, modes: Array) -> Iterator[None]:
        """The flags hold inside; those that are not bound to a `with` stay."""
        flags = modes.tobytes()
        if flags != self._known:
            self._set_model(flags)
            self._known = flags
        set_library_flags(list(flags[: len(_FLAGS)]))
        grad, autocast, dtype = flags[len(_FLAGS) : _NUM_LIBRARY]
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(bool(grad)))
            if autocast:
                stack.enter_context(torch.autocast("cpu", _DTYPES[dtype]))
            yield

    def _set_model(self, flags: bytes) -> None:
        modules, parameters, _ = self._parts
        self.kinds = flags[_NUM_LIBRARY + len(modules) :]
        for module, training in zip(modules, flags[_NUM_LIBRARY:], strict=False):
            module.training = bool(training)
        for parameter, kind in zip(parameters, self.kinds, strict=True):
            parameter.requires_grad_(bool(kind))
