"""The buffers of a worker's model: the master's before, the changed ones after."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from instep._program import Array
from instep.torch._anatomy import Place
from instep.torch._arrays import to_array
from instep.torch._packing import Packing


class Buffers:
    """They are moved into one private vector, so that one copy restores them all.

    What the loss did is found by comparing values: BatchNorm's kernel does not count
    its writes as such. A loss may also put another tensor in a buffer's place.
    """

    def __init__(self, places: Sequence[Place], packing: Packing) -> None:
        self._places, self._packing = places, packing
        self._tensors = [place.tensor for place in places]
        self._own = self._master = np.zeros(packing.nbytes, np.uint8)
        for tensor, view in zip(self._tensors, self._in(self._own), strict=True):
            if tensor is not None and view is not None:
                tensor.data = view

    def restore(self, master: Array) -> None:
        """Gives them the master's values."""
        self._master = master
        np.copyto(self._own, master)
        for place, tensor in zip(self._places, self._tensors, strict=True):
            if place.tensor is not tensor:
                place.module._buffers[place.name] = tensor

    def changed(self) -> dict[int, Array]:
        """Copies of those that have another value now, by index."""
        now = [place.tensor for place in self._places]
        stay = all(a is b for a, b in zip(now, self._tensors, strict=True))
        if stay and np.array_equal(self._own, self._master):
            return {}
        pairs = enumerate(zip(now, self._in(self._master), strict=True))
        return {
            index: to_array(tensor.detach().clone())
            for index, (tensor, before) in pairs
            if tensor is not None and not _are_equal(tensor, before)
        }

    def _in(self, vector: Array) -> list[torch.Tensor | None]:
        """The buffers in this vector; None where there was none."""
        views = iter(self._packing.views(vector))
        return [None if tensor is None else next(views) for tensor in self._tensors]


def _are_equal(now: torch.Tensor, before: torch.Tensor | None) -> bool:
    return (
        before is not None
        and (now.shape, now.dtype) == (before.shape, before.dtype)
        and torch.equal(now, before)
    )
