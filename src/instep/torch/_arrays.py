"""PyTorch tensors <-> NumPy arrays, without copies."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from instep._program import Array

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_array(tensor: torch.Tensor) -> Array:
    """The tensor's own memory as an array; conjugate views are resolved.

    Raises:
        TypeError: a dtype or layout that NumPy does not know.
    """
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:  # unknown to NumPy itself
        array: Array = tensor.view(torch.int16).numpy().view(_BFLOAT16)
        return array
    return tensor.resolve_conj().resolve_neg().numpy()


def to_tensor(array: Array) -> torch.Tensor:
    """The array's own memory as a tensor.

    Views of shared memory are marked read-only for NumPy's sake; PyTorch knows no
    such mark, so whoever calls this takes care not to write.
    """
    if not array.flags.writeable:
        array = array.view()
        array.flags.writeable = True
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def numpy_dtype(dtype: torch.dtype) -> np.dtype[np.generic]:
    """NumPy's dtype of the same bytes."""
    return to_array(torch.empty(0, dtype=dtype)).dtype


def in_memory_order(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor's values as a vector, in the order these strides lay them down."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.stride() != strides:
        laid = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
        tensor = laid.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
