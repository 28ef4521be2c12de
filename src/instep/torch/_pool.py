"""The pool of a PyTorch script: `pool.backward(x, y)` for `loss.backward()`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from instep._errors import ArgumentError, BatchError
from instep._options import Options
from instep._pool import Outcome, Pool
from instep._program import Array, Output
from instep._sharding import is_row_list
from instep._tree import flatten, leaf_names, unflatten
from instep.torch._arrays import dense_strides, numpy_dtype, to_array, to_tensor
from instep.torch._merge import extras_of, merged_aux, merged_buffers, merged_gradient
from instep.torch._modes import DENSE, gradient_kinds, modes_of
from instep.torch._program import TorchProgram, buffer_places
from instep.torch._seats import Seats


class GradientPool(Pool):
    """Computes `loss.backward()` over the whole batch with worker processes.

    The model, the optimizer and the loop stay the script's own. The model's
    parameters move to memory that the workers share, so the optimizer's step is all
    it takes to hand them new values.

    `train()`, `eval()`, `requires_grad_`, `torch.no_grad()`, autocast and the default
    dtype hold in the workers at the next call. Other attributes of the model travel
    once, when the pool is made.

    Buffers: after a step, a floating-point buffer that the loss has changed (running
    statistics of BatchNorm) is the shards' mean by weight; a counter is counted once.
    BatchNorm normalises each shard by itself.

    Args:
        model: a `torch.nn.Module` on the CPU.
        loss: `loss(model, *batch)` -> scalar tensor, the mean over the rows, or
            `instep.Weighted(mean, weight)`; with `has_aux=True` a pair
            `(loss, aux)`.
        **keywords: see `instep.Options`.

    Raises:
        ArgumentError: not a module, not on the CPU, or lazy parameters.
        ShipError: model or loss cannot be pickled.

    Example:
        >>> import torch, instep
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> def loss(model, x):
        ...     return model(x).mean()
        >>> with instep.torch.GradientPool(
        ...     model, loss, shards=3, engine="serial"
        ... ) as pool:
        ...     value = pool.backward(torch.arange(1.0, 51.0)[:, None])
        >>> value.item(), model.weight.grad.item()
        (51.0, 25.5)
    """

    def __init__(
        self, model: torch.nn.Module, loss: Callable[..., Any], **keywords: Any
    ) -> None:
        _check_model(model)
        self._model, self._loss = model, loss
        self._leaver: Any = None
        options = Options.of(**keywords)
        self._sparse = set[int]()  # parameters that have had a sparse gradient
        self._take_in()
        super().__init__(self._program(options.has_aux), options)

    def backward(self, *batch: Any) -> Any:
        """Adds the gradient over the whole batch to `.grad`, as `loss.backward()`.

        Args:
            *batch: tensors (or trees of them) with the same number of rows; numbers
                go whole to every shard.

        Returns:
            The loss, a detached scalar tensor; `(loss, aux)` with `has_aux=True`.

        Raises:
            BatchError: the batch cannot be split; names the field.
            LossError: the loss did not return a scalar.
        """
        outcome = self._outcome(batch, gradient=True)
        gradients = self._gradients(outcome)
        self._write_buffers(outcome)
        for index, gradient in gradients.items():
            _accumulate(self._seats.parameters[index], gradient)
        return self._value(outcome)

    def evaluate(self, *batch: Any) -> Any:
        """The loss (or `(loss, aux)`) over the whole batch, without gradients.

        Buffers are left alone. Dropout and BatchNorm follow `model.training`.
        """
        return self._value(self._outcome(batch, gradient=False))

    def close(self) -> None:
        """Ends the workers; the parameters move back to memory of their own."""
        self._leaver()
        super().close()

    def _outcome(self, batch: tuple[Any, ...], *, gradient: bool) -> Outcome:
        with self._lock:
            self._check_usable()
            self._follow()
            arrays, is_tensor = _batch_arrays(batch)
            modes = modes_of(self._model, self._seats.parameters, self._sparse)
            values = self._seats.values()
            buffers = [to_array(buffer) for buffer in self._buffers()]
            outcome = self._step(
                (values, buffers, modes),
                (*arrays, is_tensor),
                self._dense_outputs(modes),
                gradient=gradient,
                split_arguments=[True] * len(arrays) + [False],
            )
            self._seats.seat(self._resident()[: len(values)])
        return outcome

    def _follow(self) -> None:
        """Catches up with a model whose parameters were replaced or changed form."""
        if self._seats.are_taken_by(self._model.parameters()):
            return
        _check_model(self._model)
        form = self._form
        self._seats.leave()
        self._take_in()
        if self._form != form:  # else the workers' copy still fits
            self._ship(self._program(self._options.has_aux))

    def _take_in(self) -> None:
        """Takes the model as it is now."""
        self._form = _form(self._model)
        self._seats = Seats(list(self._model.parameters()))
        self._kinds: dict[int, int] = {}
        self._dense: tuple[bytes, list[Output]] = (b"", [])
        if self._leaver is not None:
            self._leaver.detach()
        self._leaver = weakref.finalize(self, Seats.leave, self._seats)

    def _program(self, has_aux: bool) -> TorchProgram:
        return TorchProgram(self._model, self._loss, has_aux, self._seats.strides)

    def _buffers(self) -> list[torch.Tensor]:
        found = (m._buffers[name] for m, name in buffer_places(self._model))
        return [buffer for buffer in found if buffer is not None]

    def _dense_outputs(self, modes: Array) -> list[Output]:
        """One per parameter with a dense gradient; the same list while flags stay."""
        key = modes.tobytes()
        if self._dense[0] != key:
            self._kinds = gradient_kinds(modes, len(self._seats.parameters))
            named = list(self._model.named_parameters())
            dense = [k for k, kind in self._kinds.items() if kind == DENSE]
            self._dense = key, [self._output(*named[k]) for k in dense]
        return self._dense[1]

    def _output(self, name: str, parameter: torch.Tensor) -> Output:
        dtype, rule = numpy_dtype(parameter.dtype), self._options.reduction
        return Output((parameter.numel(),), dtype, rule, name)

    def _gradients(self, outcome: Outcome) -> dict[int, torch.Tensor]:
        """By index; parameters whose gradient is None are left out."""
        dense = [k for k, kind in self._kinds.items() if kind == DENSE]
        gradients = {
            index: self._shaped(index, flat)
            for index, flat in zip(dense, outcome.outputs, strict=True)
            if flat is not None
        }
        outside = set[int]().union(*(e.gradients for e in extras_of(outcome.shards)))
        for index in outside:
            parameter, rule = self._seats.parameters[index], self._options.reduction
            gradients[index] = merged_gradient(
                index, outcome.shards, gradients.get(index), parameter, rule
            )
        self._sparse |= {k for k in outside if gradients[k].is_sparse}
        return gradients

    def _shaped(self, index: int, flat: Array) -> torch.Tensor:
        parameter, strides = self._seats.parameters[index], self._seats.strides[index]
        return to_tensor(flat).as_strided(parameter.shape, strides)

    def _write_buffers(self, outcome: Outcome) -> None:
        buffers = self._buffers()
        with torch.no_grad():
            for index, value in merged_buffers(outcome.shards, buffers).items():
                buffers[index].copy_(to_tensor(value))

    def _value(self, outcome: Outcome) -> Any:
        loss = to_tensor(outcome.loss[None]).squeeze(0)
        return (loss, merged_aux(outcome.shards)) if self._options.has_aux else loss


def _form(model: torch.nn.Module) -> Any:
    """What the workers' copy has in common with the model."""
    parameters = [
        (name, p.shape, p.dtype, dense_strides(p))
        for name, p in model.named_parameters()
    ]
    buffers = [
        (name, b.shape, b.dtype)
        for module, name in buffer_places(model)
        if (b := module._buffers[name]) is not None
    ]
    return parameters, buffers


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"the model is a {type(model).__name__}; expected a torch.nn.Module"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise ArgumentError(
                f"{name} is lazy and has no shape yet; call the model once on a batch"
            )
        if tensor.device.type != "cpu":
            raise ArgumentError(
                f"{name} is on {tensor.device}; instep computes on the CPU: model.cpu()"
            )


def _batch_arrays(batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], Array]:
    """The batch with arrays for tensors, and one flag per leaf that was a tensor."""
    leaves, structure = flatten(batch, is_row_list)
    flags = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    for index, (leaf, is_tensor) in enumerate(zip(leaves, flags, strict=True)):
        if is_tensor and leaf.device.type != "cpu":
            name = leaf_names(structure, "batch")[index]
            raise BatchError(
                f"{name} is on {leaf.device}; instep computes on the CPU: tensor.cpu()"
            )
    pairs = zip(leaves, flags, strict=True)
    arrays = [to_array(leaf) if is_tensor else leaf for leaf, is_tensor in pairs]
    return unflatten(structure, arrays), np.array(flags, np.uint8)


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """What autograd does at a leaf: its hooks, then `.grad`."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    with torch.no_grad():
        if parameter.grad is None:
            parameter.grad = gradient
        elif parameter.grad.is_sparse and not gradient.is_sparse:
            parameter.grad = gradient + parameter.grad
        else:
            parameter.grad += gradient
    for hook in (
        getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    ).values():
        hook(parameter)
