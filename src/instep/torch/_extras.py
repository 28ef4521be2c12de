"""What a shard sends beside its loss and its dense gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from instep._aux import is_aux_leaf
from instep._program import Array
from instep._tree import flatten, unflatten
from instep._values import marked, marker_of, unmarked
from instep.torch._arrays import to_array


class Slices(NamedTuple):
    """A sparse gradient: one row of `values` per column of `indices`."""

    values: Array
    indices: Array


class Extras(NamedTuple):
    """All of it; a shard that has none sends nothing.

    Attributes:
        aux: the user's, its tensors as arrays.
        tensors: which leaves of aux are tensors.
        buffers: new values of those that the loss has changed, by index.
        gradients: those that do not fit the slot, by index: sparse ones, and dense
            ones of parameters that used to have sparse ones.
        is_constant: nothing that requires a gradient took part in the loss.
    """

    aux: Any = None
    tensors: tuple[bool, ...] = ()
    buffers: dict[int, Array] = {}  # noqa: RUF012
    gradients: dict[int, Slices | Array] = {}  # noqa: RUF012
    is_constant: bool = False


NO_EXTRAS = Extras()


def extras(
    aux: Any,
    buffers: dict[int, Array] | None = None,
    gradients: dict[int, Slices | Array] | None = None,
    is_constant: bool = False,
) -> Extras | None:
    """What has to be sent besides loss and dense gradients; mostly nothing."""
    if aux is None and not (buffers or gradients or is_constant):
        return None
    leaves, structure = flatten(aux, is_aux_leaf)
    tensors = tuple(_holds_tensors(leaf) for leaf in leaves)
    arrays = unflatten(structure, [_plain(leaf) for leaf in leaves])
    return Extras(arrays, tensors, buffers or {}, gradients or {}, is_constant)


def outside_slot(gradient: torch.Tensor) -> Slices | Array:
    """A gradient as it is sent where it has no slot."""
    if not gradient.is_sparse:
        return to_array(gradient.clone())
    # Not coalesced: one shard's gradient comes back as it is.
    return Slices(to_array(gradient._values()), to_array(gradient._indices()))


def _holds_tensors(leaf: Any) -> bool:
    leaf = unmarked(leaf)
    if isinstance(leaf, list):  # a row list: 0-d tensors, if any
        return any(isinstance(item, torch.Tensor) for item in leaf)
    return isinstance(leaf, torch.Tensor)


def _plain(leaf: Any) -> Any:
    if marker := marker_of(leaf):
        return marked(marker, _plain(unmarked(leaf)))
    if isinstance(leaf, list):
        return [_plain(item) for item in leaf]
    return to_array(leaf.clone()) if isinstance(leaf, torch.Tensor) else leaf
