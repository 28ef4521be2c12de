"""What shards send beside their slots -> that of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from instep._aux import ShardAnswer, merge_aux_leaves
from instep._errors import LossError
from instep._program import Array, Rule
from instep._reduction import reduce_arrays
from instep._slices import merge_slices
from instep._tree import unflatten
from instep.torch._anatomy import Place
from instep.torch._arrays import to_array, to_tensor
from instep.torch._extras import NO_EXTRAS, Extras, Slices


def extras_of(shards: Sequence[ShardAnswer]) -> list[Extras]:
    """The extras of every shard, in order."""
    return [shard.aux or NO_EXTRAS for shard in shards]


def merged_aux(shards: Sequence[ShardAnswer]) -> Any:
    """The user's aux over the batch; what were tensors in the loss are tensors."""
    extras = extras_of(shards)
    own = [s._replace(aux=e.aux) for s, e in zip(shards, extras, strict=True)]
    leaves, structure = merge_aux_leaves(own)
    pairs = zip(leaves, extras[0].tensors, strict=True)
    back = [_as_tensor(leaf) if was_tensor else leaf for leaf, was_tensor in pairs]
    return unflatten(structure, back)


def merged_gradient(
    index: int,
    shards: Sequence[ShardAnswer],
    in_slots: torch.Tensor | None,
    parameter: torch.Tensor,
    rule: Rule,
) -> torch.Tensor:
    """A parameter's gradient that some shards sent beside their slots.

    Args:
        index: the parameter's.
        shards: all shards' answers.
        in_slots: what the others gave, averaged with zeros for these; or None.
        parameter: for its shape.
        rule: of the pool.
    """
    parts = [extras.gradients.get(index) for extras in extras_of(shards)]
    there = [(p, s) for p, s in zip(parts, shards, strict=True) if p is not None]
    kept = [(p.values, p.indices) for p, _ in there if isinstance(p, Slices)]
    if len(kept) == len(there) and in_slots is None:
        total = sum(shard.weight for shard in shards)
        merged = merge_slices(kept, [s for _, s in there], rule, total)
        values, indices = map(to_tensor, merged)
        return torch.sparse_coo_tensor(
            indices, values, parameter.shape, check_invariants=False
        )
    dense = [_dense(part, parameter) for part in parts]
    summed = to_tensor(reduce_arrays(dense, [s.weight for s in shards], rule))
    return summed if in_slots is None else summed + in_slots


def merged_buffers(
    shards: Sequence[ShardAnswer], places: Sequence[Place]
) -> dict[int, Array]:
    """New values of the buffers that a shard has changed, by index.

    A shard that left one alone counts with the old value, if there was one.
    """
    changed = [extras.buffers for extras in extras_of(shards)]
    weights = [shard.weight for shard in shards]
    return {
        index: _buffer([c.get(index) for c in changed], weights, places[index])
        for index in sorted(set().union(*changed))
    }


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, list):
        return [_as_tensor(item) for item in leaf]
    return to_tensor(np.array(leaf))


def _dense(part: Slices | Array | None, parameter: torch.Tensor) -> Array:
    if part is None:
        return to_array(
            torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        )
    if not isinstance(part, Slices):
        return np.ascontiguousarray(part)
    sparse = torch.sparse_coo_tensor(
        to_tensor(part.indices), to_tensor(part.values), parameter.shape
    )
    return to_array(sparse.to_dense())


def _buffer(
    values: Sequence[Array | None], weights: Sequence[float], place: Place
) -> Array:
    """The mean by weight; of a counter the first value that is not the old one."""
    pairs = list(zip(values, weights, strict=True))
    changed = next(value for value in values if value is not None)
    if changed.dtype.kind not in "fcV":  # V: bfloat16
        return changed
    if place.tensor is not None:
        old = to_array(place.tensor)
        pairs = [(old if value is None else value, w) for value, w in pairs]
    arrays, weights = zip(*((v, w) for v, w in pairs if v is not None), strict=True)
    if all(_form(array) == _form(changed) for array in arrays):
        return _mean(arrays, weights)
    raise LossError(
        f"the buffer {place.name!r} of a {type(place.module).__name__} has the shapes "
        f"{[array.shape for array in arrays]} in the shards; expected the same in "
        "each, to be averaged"
    )


def _mean(arrays: Sequence[Array], weights: Sequence[float]) -> Array:
    """Exactly the value itself where all have the same."""
    if all(array.tobytes() == arrays[0].tobytes() for array in arrays):
        return arrays[0]
    return reduce_arrays(arrays, weights, "mean")


def _form(array: Array) -> tuple[Any, ...]:
    return array.shape, array.dtype
