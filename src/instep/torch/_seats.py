"""Parameters that live in the workers' memory, so that a step is the broadcast.

The optimizer updates parameters in place. Once their data is a view of the shared
memory, what it writes is where the workers read, and nothing has to be copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from instep._program import Array
from instep.torch._arrays import dense_strides, in_memory_order, to_array, to_tensor


class Seats:
    """Which parameters live in shared memory, and where."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self.strides = [dense_strides(p) for p in parameters]
        self._places: list[Array] = []
        self._addresses: list[int] = []

    def are_taken_by(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether these very parameters sit in the seats, in the form they had."""
        return [(id(p), p.data_ptr(), p.stride()) for p in parameters] == [
            (id(p), address, strides)
            for p, address, strides in zip(
                self.parameters, self._addresses, self.strides, strict=False
            )
        ]

    def values(self) -> list[Array]:
        """The parameters as vectors; those in their seat as the seat itself."""
        return self._places or [
            to_array(in_memory_order(parameter, strides))
            for parameter, strides in zip(self.parameters, self.strides, strict=True)
        ]

    def seat(self, places: Sequence[Array]) -> None:
        """Moves the parameters to these places, which hold their values already."""
        if not places or (self._places and places[0] is self._places[0]):
            return
        self._places = list(places)
        tensors = [to_tensor(place) for place in places]
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        for parameter, strides, flat in zip(
            self.parameters, self.strides, tensors, strict=True
        ):
            parameter.data = flat.as_strided(parameter.shape, strides)

    def leave(self) -> None:
        """Moves the parameters back to memory of their own."""
        pairs = zip(self.parameters, self._addresses, strict=False)
        for parameter, address in pairs:
            if parameter.data_ptr() == address and parameter.numel():
                parameter.data = parameter.data.clone()
        self._places, self._addresses = [], []
