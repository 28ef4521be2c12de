"""Parameters of a worker's own, and the user's optimizer on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from instep._errors import LossError
from instep._program import Array, ShardResult
from instep.torch._arrays import to_array, to_tensor
from instep.torch._extras import Extras
from instep.torch._modes import DENSE, SPARSE, gradient_kinds
from instep.torch._packing import Packing


def dense_arrays(
    packing: Packing, values: Array, indices: Sequence[int]
) -> list[Array]:
    """The parameters with these indices, as their gradients lie in a slot."""
    views = packing.views(values)
    return [_as_output(packing, views[k], k) for k in indices]


def _as_output(packing: Packing, view: torch.Tensor, index: int) -> Array:
    if packing.forms[index].is_contiguous:
        return to_array(view)
    return to_array(view.as_strided((view.numel(),), (1,)))


class Private:
    """A copy of parameters and buffers."""

    def __init__(self, params: Any, seats: Packing, shelf: Packing) -> None:
        values, buffers, self._modes = params
        self._values, self._buffers = np.array(values), np.array(buffers)
        self._shelf = shelf
        kinds = gradient_kinds(self._modes, len(seats.forms))
        if SPARSE in kinds:
            raise LossError(
                "steps of a worker's own need dense gradients; make the embedding "
                "with sparse=False, or use another mode"
            )
        dense = [k for k, kind in enumerate(kinds) if kind == DENSE]
        self.arrays = dense_arrays(seats, self._values, dense)

    def params(self) -> Any:
        return self._values, self._buffers, self._modes

    def keep(self, result: ShardResult) -> None:
        """Running statistics go on from here."""
        if isinstance(result.aux, Extras):
            views = self._shelf.views(self._buffers)
            for index, array in result.aux.buffers.items():
                views[index].copy_(to_tensor(array))


class Method:
    """An optimizer of PyTorch's, on a worker's own parameters."""

    def __init__(self, make: Callable[..., Any], private: Private) -> None:
        tensors = [to_tensor(array) for array in private.arrays]
        self._parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
        self._optimizer = make(self._parameters)

    def step(self, gradients: Sequence[Array]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = to_tensor(gradient)
        self._optimizer.step()

    def state(self) -> Any:
        return self._optimizer.state_dict()

    def load(self, state: Any) -> None:
        self._optimizer.load_state_dict(state)
