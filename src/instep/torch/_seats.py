"""Parameters that live in the workers' memory, so that a step is the broadcast.

The optimizer updates parameters in place. Once their data is a view of the shared
memory, what it writes is where the workers read, and nothing has to be copied.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from instep._program import Array
from instep.torch._packing import Packing


class Seats:
    """Which parameters live in shared memory, and where."""

    def __init__(self) -> None:
        self.assign([])

    def assign(self, parameters: Sequence[torch.Tensor]) -> None:
        """These parameters, as they are now, are to have seats."""
        self.parameters = list(parameters)
        self.packing = Packing(parameters)
        self._vector: Array | None = None
        self._seated: list[tuple[int, torch.Size, tuple[int, ...]]] = []

    def are_taken_by(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these very parameters sit in the seats, in the form they had."""
        return (
            self._vector is not None
            and len(parameters) == len(self.parameters)
            and all(map(operator.is_, parameters, self.parameters))
            and list(map(_whereabouts, parameters)) == self._seated
        )

    def values(self) -> Array:
        """The parameters, packed; once they are seated, the seats themselves."""
        if self._vector is None:
            return self.packing.packed(self.parameters)
        return self._vector

    def seat(self, vector: Array) -> None:
        """Moves the parameters to this vector, which holds their values already."""
        if vector is self._vector:
            return
        with torch.inference_mode(False):  # whose tensors could not be trained
            views = self.packing.views(vector)
            for parameter, view in zip(self.parameters, views, strict=True):
                parameter.data = view
        self._vector, self._seated = vector, list(map(_whereabouts, views))

    def leave(self) -> None:
        """Moves the parameters back to memory of their own."""
        with torch.inference_mode(False):
            pairs = zip(self.parameters, self._seated, strict=False)
            for parameter, seat in pairs:
                if _whereabouts(parameter) == seat:  # else it has left by itself
                    parameter.data = parameter.data.clone()
        self._vector, self._seated = None, []


def _whereabouts(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
