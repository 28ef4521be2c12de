"""What a loss depends on besides parameters and batch: flags of model and library.

They travel with every step as one small vector, so that `model.eval()`,
`requires_grad_` or `torch.no_grad()` in the master hold in the workers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from instep._program import Array

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_NUM_GLOBAL = 5


DENSE, SPARSE = 1, 2  # kinds of gradient; 0: none is required


def modes_of(
    model: torch.nn.Module, parameters: list[torch.Tensor], sparse: set[int]
) -> Array:
    """The master's flags now: the library's, `training`, and the kinds of gradients.

    Args:
        model: its modules' `training`.
        parameters: their `requires_grad`.
        sparse: indices of those whose gradients are known to be sparse.
    """
    library = (
        _DTYPES.index(torch.get_default_dtype()),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        _DTYPES.index(torch.get_autocast_dtype("cpu")),
    )
    training = (module.training for module in model.modules())
    kinds = (
        (SPARSE if k in sparse else DENSE) if parameter.requires_grad else 0
        for k, parameter in enumerate(parameters)
    )
    return np.fromiter((*library, *training, *kinds), np.int8)


def gradient_kinds(modes: Array, number: int) -> dict[int, int]:
    """DENSE or SPARSE for each parameter, of `number`, that requires a gradient."""
    kinds = modes[len(modes) - number :].tolist()
    return {index: kind for index, kind in enumerate(kinds) if kind}


@dataclass
class Modes:
    """Gives a worker's model and library the master's flags."""

    model: torch.nn.Module
    parameters: list[torch.Tensor]
    _known: bytes = b""

    @contextmanager
    def applied(self, modes: Array) -> Iterator[None]:
        """The flags hold inside; those of model and parameters stay."""
        if modes.tobytes() != self._known:
            self._set_model(modes[_NUM_GLOBAL:])
            self._known = modes.tobytes()
        default, grad, deterministic, autocast, autocast_dtype = modes[:_NUM_GLOBAL]
        torch.set_default_dtype(_DTYPES[default])
        if deterministic != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(bool(deterministic))  # slow: imports
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(bool(grad)))
            if autocast:
                stack.enter_context(torch.autocast("cpu", _DTYPES[autocast_dtype]))
            yield

    def _set_model(self, flags: Array) -> None:
        values: Iterator[Any] = iter(flags.tolist())
        for module in self.model.modules():
            module.training = bool(next(values))
        for parameter in self.parameters:
            parameter.requires_grad_(bool(next(values)))
