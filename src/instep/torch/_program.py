"""Computes shards of a PyTorch loss in a worker.

parameters: views of shared memory, never written here
buffers:    a copy of the master's before every shard; what the loss changes
            goes back beside the gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from instep._errors import LossError
from instep._program import Array, ShardResult, Task
from instep._values import Weighted
from instep.torch._anatomy import anatomy
from instep.torch._arrays import in_memory_order, to_array
from instep.torch._batch import to_tensors
from instep.torch._buffers import Buffers
from instep.torch._extras import Slices, extras, outside_slot
from instep.torch._modes import DENSE, SPARSE, Modes, library_flags, set_library_flags
from instep.torch._packing import Packing
from instep.torch._private import Method, Private
from instep.torch._strangers import strangers


@dataclass
class TorchProgram:
    """The model and the loss, as they were when they were shipped.

    Attributes:
        seats: where each parameter lies in the vector of parameters.
        shelf: where each buffer lies in the vector of buffers.
    """

    model: torch.nn.Module
    loss: Callable[..., Any]
    has_aux: bool
    seats: Packing
    shelf: Packing
    modules: tuple[str, ...] = field(default=("torch",))

    def start(self, threads: int) -> None:
        self._threads = threads
        parts = anatomy(self.model)
        self._parameters = parts.parameters
        self._buffers = Buffers(parts.buffers, self.shelf)
        self._modes = Modes(parts)
        self._strangers = strangers(self.loss, parts.parameters)
        self._strided = {
            index: form.strides
            for index, form in enumerate(self.seats.forms)
            if not form.is_contiguous
        }
        self._address = -1

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Puts the library's global state back: for the serial engine."""
        threads, flags = torch.get_num_threads(), library_flags()
        with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
            try:
                yield
            finally:
                torch.set_num_threads(threads)
                set_library_flags(flags)

    def compute(self, params: Any, batch: tuple[Any, ...], task: Task) -> ShardResult:
        values, buffers, modes = params
        self._take_seats(values)
        self._buffers.restore(buffers)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        torch.default_generator.manual_seed(task.seed >> 1)
        with self._modes.applied(modes), self._write_protected():
            *arrays, formats = batch
            arguments = to_tensors(tuple(arrays), formats)
            if task.gradient:
                return self._gradient(arguments)
            with torch.no_grad():
                loss, weight, aux = self._call(arguments)
        return ShardResult(to_array(loss), weight, [], extras(aux))

    def private(self, params: Any, arguments: tuple[Any, ...]) -> Private:
        """A copy of parameters and buffers, for steps of the worker's own."""
        return Private(params, self.seats, self.shelf)

    def optimizer(self, optimizer: Any, private: Private) -> Method:
        """`optimizer(parameters)`, for the copy."""
        return Method(optimizer, private)

    def _take_seats(self, values: Array) -> None:
        """Points the parameters at their values, which stay where they are for long."""
        address = values.__array_interface__["data"][0]
        if address != self._address:
            views = self.seats.views(values)
            for parameter, view in zip(self._parameters, views, strict=True):
                parameter.data = view
            self._address = address
            self._versions = self._written()

    def _written(self) -> list[int]:
        """How often each parameter has been written to."""
        return [parameter._version for parameter in self._parameters]

    @contextmanager
    def _write_protected(self) -> Iterator[None]:
        """An error where the loss writes to a parameter, which all workers read."""
        yield
        if (now := self._written()) != self._versions:
            changed = [a != b for a, b in zip(now, self._versions, strict=True)]
            name, _ = list(self.model.named_parameters())[changed.index(True)]
            self._versions = now
            raise LossError(
                f"the loss has changed the parameter {name} in place, while other "
                "workers read it; change it after the step, in the script (an "
                "Embedding with max_norm does so, too)"
            )

    def _call(self, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, Any, Any]:
        value, aux, weight = self.loss(self.model, *arguments), None, None
        if self.has_aux:
            value, aux = _pair(value)
        if isinstance(value, Weighted):
            value, weight = value.value, _detached(value.weight)
        if not isinstance(value, torch.Tensor) or value.shape != ():
            raise LossError(_loss_problem(value))
        return value, weight, aux

    def _gradient(self, arguments: tuple[Any, ...]) -> ShardResult:
        for parameter in (*self._parameters, *self._strangers.values()):
            parameter.grad = None
        loss, weight, aux = self._call(arguments)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        self._check_strangers()
        dense, outside = self._sorted_gradients()
        changed, is_constant = self._buffers.changed(), not loss.requires_grad
        beside = extras(aux, changed, outside, is_constant)
        return ShardResult(to_array(loss), weight, dense, beside)

    def _sorted_gradients(
        self,
    ) -> tuple[list[Array | None], dict[int, Slices | Array]]:
        """Those for the slot, in order, and those that do not fit it, by index."""
        dense: list[Array | None] = []
        outside: dict[int, Slices | Array] = {}
        pairs = zip(self._parameters, self._modes.kinds, strict=True)
        for index, (parameter, kind) in enumerate(pairs):
            gradient = parameter.grad
            if gradient is not None and (kind == SPARSE or gradient.is_sparse):
                outside[index], gradient = outside_slot(gradient), None
            if kind == DENSE:
                dense.append(self._laid_out(index, gradient))
        return dense, outside

    def _laid_out(self, index: int, gradient: torch.Tensor | None) -> Array | None:
        if gradient is None:
            return None
        strides = self._strided.get(index)
        if strides is None:
            return to_array(gradient)
        return to_array(in_memory_order(gradient, strides))

    def _check_strangers(self) -> None:
        lost = [n for n, t in self._strangers.items() if t.grad is not None]
        if lost:
            raise LossError(
                f"the loss has a gradient for {', '.join(lost)}, which is no parameter "
                "of the model and would stay as it is; make it one, for example by a "
                "torch.nn.ModuleList that holds it beside the model"
            )


def _detached(weight: Any) -> Any:
    return weight.detach() if isinstance(weight, torch.Tensor) else weight


def _pair(value: Any) -> tuple[Any, Any]:
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    raise LossError(f"the loss returned a {type(value).__name__}; expected (loss, aux)")


def _loss_problem(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return (
            f"the loss has shape {tuple(value.shape)}; expected a scalar. Average it "
            "over the rows (loss.mean()), or add it up and use reduction='sum'"
        )
    if isinstance(value, tuple | list):
        return (
            f"the loss returned a {type(value).__name__}; expected a scalar tensor (or "
            "a pair (loss, aux), with has_aux=True)"
        )
    return f"the loss returned {value!r}; expected a scalar tensor"
