"""A batch of tensors <-> a batch of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from instep._errors import BatchError
from instep._program import Array
from instep._sharding import is_row_list
from instep._tree import flatten, leaf_names, unflatten
from instep.torch._arrays import to_array, to_tensor

# How a tensor lies in memory, since kernels differ by it. 0 is for other leaves;
# channels last goes by the number of axes.
_NO_TENSOR, _CONTIGUOUS = 0, 1
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def to_arrays(batch: tuple[Any, ...], *, detach: bool) -> tuple[tuple[Any, ...], Array]:
    """The batch with arrays for tensors, and a number for the format of each leaf.

    Args:
        batch: trees of tensors and whatever else the core splits.
        detach: take tensors that require a gradient as plain values.

    Raises:
        BatchError: a tensor that cannot be split; names it.
    """
    leaves, structure = flatten(batch, _is_leaf)
    formats = [_format(leaf) for leaf in leaves]
    for index, leaf in enumerate(leaves):
        if problem := _problem(leaf, detach):
            raise BatchError(f"{leaf_names(structure, 'batch')[index]} {problem}")
    pairs = zip(leaves, formats, strict=True)
    arrays = [to_array(leaf) if number else leaf for leaf, number in pairs]
    return unflatten(structure, arrays), np.array(formats, np.uint8)


def to_tensors(batch: tuple[Any, ...], formats: Array) -> tuple[Any, ...]:
    """The batch with the tensors it had in the master.

    Copies, so that a loss which works in place spoils neither a shard that must be
    computed again nor what all shards share.
    """
    leaves, structure = flatten(batch, is_row_list)
    pairs = zip(leaves, formats.tolist(), strict=True)
    return tuple(unflatten(structure, [_tensor(*pair) for pair in pairs]))


def _is_leaf(node: Any) -> bool:
    return isinstance(node, PackedSequence) or is_row_list(node)


def _format(leaf: Any) -> int:
    if not isinstance(leaf, torch.Tensor):
        return _NO_TENSOR
    layout = _CHANNELS_LAST.get(leaf.ndim)
    if layout is None or leaf.is_contiguous():
        return _CONTIGUOUS
    return leaf.ndim if leaf.is_contiguous(memory_format=layout) else _CONTIGUOUS


def _problem(leaf: Any, detach: bool) -> str:
    """Why this leaf cannot be part of a batch; empty if it can."""
    if isinstance(leaf, PackedSequence):
        return (
            "is a PackedSequence, whose rows are no sequences; pass the padded tensor "
            "and the lengths, and pack them in the loss"
        )
    if not isinstance(leaf, torch.Tensor):
        return ""
    if not leaf.is_cpu:
        return f"is on {leaf.device}; instep computes on the CPU: tensor.cpu()"
    if leaf.layout is not torch.strided or leaf.is_quantized:
        return f"is {leaf.layout} and {leaf.dtype}; expected a dense tensor"
    if leaf.requires_grad and not detach:
        return (
            "requires a gradient, and a pool computes those of the model's parameters; "
            "pass tensor.detach(), or make what computed it a part of the model"
        )
    return ""


def _tensor(leaf: Any, number: int) -> Any:
    if number == _NO_TENSOR:
        return leaf
    layout = _CHANNELS_LAST.get(number, torch.contiguous_format)
    return to_tensor(leaf).clone(memory_format=layout)
