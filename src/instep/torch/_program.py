"""Computes shards of a PyTorch loss in a worker.

parameters: views of shared memory, never written here
buffers:    a copy of the master's before every shard; what the loss changes
            goes back beside the gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from instep._errors import LossError
from instep._program import Array, ShardResult, Task
from instep._sharding import is_row_list
from instep._tree import flatten, unflatten
from instep._values import Sum, Weighted
from instep.torch._arrays import in_memory_order, to_array, to_tensor
from instep.torch._modes import DENSE, SPARSE, Modes, gradient_kinds


class Slices(NamedTuple):
    """A sparse gradient: one row of `values` per column of `indices`."""

    values: Array
    indices: Array


class Extras(NamedTuple):
    """What a shard sends beside its loss and dense gradients.

    Attributes:
        aux: the user's, its tensors as arrays.
        tensors: which leaves of aux are tensors.
        buffers: new values of those that the loss has changed, by index.
        gradients: those that do not fit the slot, by index: sparse ones, and dense
            ones of parameters that used to have sparse ones.
    """

    aux: Any = None
    tensors: tuple[bool, ...] = ()
    buffers: dict[int, Array] = {}  # noqa: RUF012
    gradients: dict[int, Slices | Array] = {}  # noqa: RUF012


@dataclass
class TorchProgram:
    """The model and the loss, as they were when they were shipped.

    Attributes:
        strides: of every parameter, in the order of `model.parameters()`.
    """

    model: torch.nn.Module
    loss: Callable[..., Any]
    has_aux: bool
    strides: list[tuple[int, ...]]
    modules: tuple[str, ...] = field(default=("torch",))

    def start(self, threads: int) -> None:
        self._threads = threads
        self._parameters = list(self.model.parameters())
        self._buffers = _Buffers(self.model)
        self._modes = Modes(self.model, list(self._parameters))
        self._seats = [0] * len(self._parameters)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Puts the library's global state back: for the serial engine."""
        threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
        deterministic = torch.are_deterministic_algorithms_enabled()
        with torch.random.fork_rng(devices=[]):
            try:
                yield
            finally:
                torch.set_num_threads(threads)
                torch.set_default_dtype(dtype)
                if deterministic != torch.are_deterministic_algorithms_enabled():
                    torch.use_deterministic_algorithms(deterministic)

    def compute(self, params: Any, batch: tuple[Any, ...], task: Task) -> ShardResult:
        values, buffers, modes = params
        self._take_seats(values)
        self._buffers.restore(buffers)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        torch.default_generator.manual_seed(task.seed >> 1)
        with self._modes.applied(modes):
            if task.gradient:
                return self._gradient(_arguments(batch), modes)
            with torch.no_grad():
                loss, weight, aux = self._call(_arguments(batch))
        return ShardResult(to_array(loss), weight, [], _extras(aux, {}, {}))

    def _gradient(self, arguments: tuple[Any, ...], modes: Array) -> ShardResult:
        for parameter in self._parameters:
            parameter.grad = None
        loss, weight, aux = self._call(arguments)
        loss.backward()  # type: ignore[no-untyped-call]
        kinds = gradient_kinds(modes, len(self._parameters))
        grads = {k: self._parameters[k].grad for k in kinds}
        outside = {
            k: _outside(g)
            for k, g in grads.items()
            if g is not None and (g.is_sparse or kinds[k] == SPARSE)
        }
        dense = [
            None if g is None or k in outside else self._flat(k, g)
            for k, g in grads.items()
            if kinds[k] == DENSE
        ]
        extras = _extras(aux, self._buffers.changed(), outside)
        return ShardResult(to_array(loss), weight, dense, extras)

    def _call(self, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, Any, Any]:
        value, aux, weight = self.loss(self.model, *arguments), None, None
        if self.has_aux:
            value, aux = _pair(value)
        if isinstance(value, Weighted):
            value, weight = value.value, float(value.weight)
        if not isinstance(value, torch.Tensor) or value.shape != ():
            raise LossError(_loss_problem(value))
        return value, weight, aux

    def _take_seats(self, values: list[Array]) -> None:
        """Points the parameters at the values in shared memory."""
        for index, (parameter, value) in enumerate(
            zip(self._parameters, values, strict=True)
        ):
            address = value.__array_interface__["data"][0] if value.size else 0
            if self._seats[index] != address or not address:
                flat = to_tensor(value)
                parameter.data = flat.as_strided(parameter.shape, self.strides[index])
                self._seats[index] = address

    def _flat(self, index: int, gradient: torch.Tensor) -> Array:
        return to_array(in_memory_order(gradient, self.strides[index]))


class _Buffers:
    """The buffers of a worker's model, found by name: a loss may replace them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._places = buffer_places(model)
        self._tensors = [module._buffers[name] for module, name in self._places]
        self._values: list[torch.Tensor] = []

    def restore(self, values: list[Array]) -> None:
        """Gives them the master's values."""
        self._values = [to_tensor(value) for value in values]
        for (module, name), tensor, value in zip(
            self._places, self._tensors, self._values, strict=True
        ):
            assert tensor is not None
            module._buffers[name] = tensor.copy_(value)

    def changed(self) -> dict[int, Array]:
        """Copies of those that have another value now.

        Values are compared: BatchNorm's kernel does not count its writes as such.
        """
        changed = {}
        for index, (module, name) in enumerate(self._places):
            now = module._buffers[name]
            if now is not None and not torch.equal(now, self._values[index]):
                changed[index] = to_array(now.detach().clone())
        return changed


def buffer_places(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Module and name of every buffer, each tensor once."""
    places: dict[int, tuple[torch.nn.Module, str]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                places.setdefault(id(buffer), (module, name))
    return list(places.values())


def _arguments(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """The batch with the tensors it had in the master.

    Copies, so that a loss which works in place spoils neither a shard that must be
    computed again nor what all shards share.
    """
    *arguments, is_tensor = batch
    leaves, structure = flatten(tuple(arguments), is_row_list)
    pairs = zip(leaves, is_tensor.tolist(), strict=True)
    return tuple(
        unflatten(
            structure,
            [to_tensor(leaf).clone() if is_t else leaf for leaf, is_t in pairs],
        )
    )


def _outside(gradient: torch.Tensor) -> Slices | Array:
    if not gradient.is_sparse:
        return to_array(gradient.clone())
    # Not coalesced: one shard's gradient comes back as it is.
    return Slices(to_array(gradient._values()), to_array(gradient._indices()))


def _extras(aux: Any, buffers: dict[int, Array], gradients: Any) -> Extras | None:
    if aux is None and not buffers and not gradients:
        return None
    leaves, structure = flatten(aux, _is_aux_leaf)
    tensors = tuple(_is_tensor(leaf) for leaf in leaves)
    arrays = unflatten(structure, [_plain(leaf) for leaf in leaves])
    return Extras(arrays, tensors, buffers, gradients)


def _is_aux_leaf(node: Any) -> bool:
    return isinstance(node, Sum)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf.value if isinstance(leaf, Sum) else leaf, torch.Tensor)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, Sum):
        return Sum(_plain(leaf.value))
    return to_array(leaf.clone()) if isinstance(leaf, torch.Tensor) else leaf


def _pair(value: Any) -> tuple[Any, Any]:
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    raise LossError(f"the loss returned a {type(value).__name__}; expected (loss, aux)")


def _loss_problem(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"the loss returned {value!r}; expected a scalar tensor"
    return (
        f"the loss has shape {tuple(value.shape)}; expected a scalar. Average it over "
        "the rows (loss.mean()), or add it up and use reduction='sum'"
    )
