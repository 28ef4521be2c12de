"""Tensors side by side in one vector of bytes.

So that what a pool hands to its workers is a few arrays, however many parameters a
model has. Bytes know no dtype: types that NumPy lacks need no care here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from instep._frame import aligned
from instep._program import Array
from instep.torch._arrays import to_tensor


class Form(NamedTuple):
    """A tensor without its values: its bytes begin at `start`."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    start: int
    nbytes: int

    @property
    def is_contiguous(self) -> bool:
        """Whether the values lie row by row."""
        return self.strides == torch.empty(self.shape, device="meta").stride()


class Packing:
    """Where each tensor lies: from a 64-byte boundary, in its own memory format.

    Tensors that are the same memory (what `load_state_dict(assign=True)` makes of
    tied weights) share their place, too.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.forms: list[Form] = []
        self.nbytes = 0
        starts: dict[Any, int] = {}
        for tensor in tensors:
            shape, strides, dtype = tensor.shape, dense_strides(tensor), tensor.dtype
            nbytes = tensor.numel() * tensor.element_size()
            memory = tensor.data_ptr(), shape, tensor.stride(), dtype
            start = starts.setdefault(memory, self.nbytes)
            self.forms.append(Form(shape, strides, dtype, start, nbytes))
            if start == self.nbytes:
                self.nbytes += aligned(nbytes)

    def views(self, vector: Array) -> list[torch.Tensor]:
        """The tensors that lie in this vector, each with a storage of its own."""
        return [_view(vector, form) for form in self.forms]

    def packed(self, tensors: Sequence[torch.Tensor]) -> Array:
        """A new vector with the values of these tensors."""
        vector = np.zeros(self.nbytes, np.uint8)
        fill(self.views(vector), tensors)
        return vector


def fill(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copies the tensors' values into the views."""
    with torch.no_grad():
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides that keep the tensor's memory format without gaps or overlaps."""
    return torch.empty_like(tensor, memory_format=torch.preserve_format).stride()


def _view(vector: Array, form: Form) -> torch.Tensor:
    if not form.nbytes:
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype)
    own = to_tensor(vector[form.start : form.start + form.nbytes])
    return own.view(form.dtype).as_strided(form.shape, form.strides)
