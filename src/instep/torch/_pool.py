"""The pool of a PyTorch script: `pool.backward(x, y)` for `loss.backward()`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from instep._check import Trial
from instep._errors import ArgumentError
from instep._host import Prepared
from instep._options import Options
from instep._outcome import Outcome
from instep._pool import Pool
from instep._program import Array, Output, Program
from instep._sharding import take_rows
from instep.torch._anatomy import Anatomy, Place, anatomy, wiring
from instep.torch._arrays import numpy_dtype, to_array, to_tensor
from instep.torch._batch import to_arrays
from instep.torch._merge import extras_of, merged_aux, merged_buffers, merged_gradient
from instep.torch._model import check_model
from instep.torch._modes import DENSE, gradient_kinds, modes_of
from instep.torch._optimizers import expect_no_step, expect_step
from instep.torch._packing import Packing
from instep.torch._private import dense_arrays
from instep.torch._program import TorchProgram
from instep.torch._seats import Seats


class GradientPool(Pool):
    """Computes `loss.backward()` over the whole batch with worker processes.

    The model, the optimizer and the loop stay the script's own. The model's
    parameters move to memory that the workers share, so the optimizer's step is all
    it takes to hand them new values.

    `train()`, `eval()`, `requires_grad_`, `torch.no_grad()`, autocast and the default
    dtype hold in the workers at the next call, and so does a parameter, buffer or
    layer that was replaced. Other attributes of the model and what the loss refers to
    travel once, when the pool is made.

    Buffers: after a step, a floating-point buffer that the loss has changed (running
    statistics of BatchNorm) is the shards' mean by weight; a counter is counted once.
    BatchNorm normalises each shard by itself.

    PyTorch's own threads spin for a while after an operation, on cores that the
    workers need. Call `torch.set_num_threads(1)` in the script, or start it with
    `OMP_WAIT_POLICY=PASSIVE`.

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
        check_model(model)
        options = Options.of(**keywords)
        self._model, self._loss, self._has_aux = model, loss, options.has_aux
        self._seats = Seats()
        self._parts: Anatomy
        self._buffer_forms: list[Any]
        self._leaver = weakref.finalize(self, self._seats.leave)
        self._leaver.atexit = False  # at the end of the script nobody needs it
        self._take_in(anatomy(model))
        super().__init__(self._program(), options)
        self._shipped: Any = self._form()

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
            RuntimeError: nothing in the loss requires a gradient, or gradients are
                disabled; PyTorch's own.
        """
        with self._lock:
            value, gradients = self.gradients(*batch)
            self._accumulate_all(gradients)
        expect_step(self._model)
        return value

    def gradients(self, *batch: Any) -> tuple[Any, list[torch.Tensor | None]]:
        """`(value, gradients)`: as `backward`, but `.grad` is left alone.

        Args:
            *batch: as for `backward`.

        Returns:
            What `backward` returns, and a gradient (or None) for every parameter, in
            the order of `model.parameters()`. Parameter hooks are not called.
        """
        with self._lock:
            return self._handed_over(self._outcome(*to_arrays(batch, detach=False)))

    def _handed_over(self, outcome: Outcome) -> tuple[Any, list[torch.Tensor | None]]:
        """`(value, gradients)`; the buffers have their new values."""
        if all(extras.is_constant for extras in extras_of(outcome.shards)):
            torch.zeros(()).backward()  # type: ignore[no-untyped-call]  # raises
        value, found = self._value(outcome), self._gradients(outcome)
        with torch.no_grad():
            self._write_buffers(outcome)
        return value, [found.get(k) for k in range(len(self._parts.parameters))]

    def _accumulate_all(self, gradients: list[torch.Tensor | None]) -> None:
        with torch.no_grad():
            pairs = zip(self._parts.parameters, gradients, strict=True)
            for parameter, gradient in pairs:
                if gradient is not None:
                    _accumulate(parameter, gradient)

    def evaluate(self, *batch: Any) -> Any:
        """The loss (or `(loss, aux)`) over the whole batch, under `torch.no_grad()`.

        Buffers are left alone. Dropout and BatchNorm follow `model.training`.
        """
        arrays, formats = to_arrays(batch, detach=True)
        return self._value(self._outcome(arrays, formats, gradient=False))

    def close(self) -> None:
        """Ends the workers; the parameters move back to memory of their own."""
        expect_no_step(self._model)
        self._leaver()
        super().close()

    # Streams

    def _stream_batch(self, batch: tuple[Any, ...]) -> Prepared:
        arrays, formats = to_arrays(batch, detach=False)
        self._follow()
        self._seats.seat(self._seats.values())  # in one vector: quickly copied
        outputs = self._expect(modes_of(self._parts, self._sparse))
        splits = [True] * len(arrays) + [False]
        return Prepared((*arrays, formats), splits, outputs)

    def _stream_params(self, prepared: Prepared) -> Any:
        self._follow()
        return self._state(modes_of(self._parts, self._sparse))

    def _stream_arrays(self, leaves: list[Array], prepared: Prepared) -> list[Array]:
        return dense_arrays(self._seats.packing, leaves[0], self._expected.indices)

    def _stream_result(self, outcome: Outcome, prepared: Prepared) -> tuple[Any, Any]:
        """The gradients are put into `.grad`, in place of those of the last update."""
        value, gradients = self._handed_over(outcome)
        for parameter in self._parts.parameters:
            parameter.grad = None
        self._accumulate_all(gradients)
        expect_step(self._model)
        return value, [parameter.grad for parameter in self._parts.parameters]

    def _try(self, arguments: tuple[Any, ...], index: Array | None) -> Trial:
        arrays, formats = to_arrays(arguments, detach=False)
        if index is not None:
            arrays = take_rows(arrays, index)
        outcome = self._outcome(arrays, formats)
        gradients = self._gradients(outcome)
        named = enumerate(self._model.named_parameters())
        return Trial(
            float(outcome.loss),
            {name: _dense_array(gradients.get(k)) for k, (name, _) in named},
        )

    @contextmanager
    def _lent(self, threads: int) -> Iterator[None]:
        seats, before = self._seats.values(), torch.get_num_threads()
        torch.set_num_threads(threads)  # more would spin beside the workers
        try:
            yield
        finally:
            torch.set_num_threads(before)
            self._seats.seat(seats)

    def _outcome(
        self, arrays: tuple[Any, ...], formats: Array, *, gradient: bool = True
    ) -> Outcome:
        with self._lock:
            self._check_usable()
            self._follow()
            modes = modes_of(self._parts, self._sparse)
            outcome = self._step(
                self._state(modes),
                (*arrays, formats),
                self._expect(modes),
                gradient=gradient,
                split_arguments=[True] * len(arrays) + [False],
            )
            self._seats.seat(self._resident()[0])
        return outcome

    # The model as it is now

    def _state(self, modes: Array) -> tuple[Array, Array, Array]:
        """All that a worker needs of the model, besides what has travelled."""
        return self._seats.values(), self._shelf.packed(self._buffers()), modes

    def _follow(self) -> None:
        """Catches up with a model whose parts were replaced or changed form."""
        parts = anatomy(self._model)
        if (
            parts.modules == self._parts.modules
            and self._seats.are_taken_by(parts.parameters)
            and _forms(parts.buffers) == self._buffer_forms
        ):
            self._parts = parts
            return
        check_model(self._model)
        shipped, self._shipped = self._shipped, None  # until it is certain
        self._seats.leave()
        self._take_in(parts)
        if self._form() != shipped:  # else the workers' copy still fits
            self._ship(self._program())
        self._shipped = self._form()

    def _take_in(self, parts: Anatomy) -> None:
        """These are the model's parts now."""
        self._parts = parts
        self._seats.assign(parts.parameters)
        self._shelf = Packing(self._buffers())
        self._buffer_forms = _forms(parts.buffers)
        self._sparse = set[int]()  # parameters that have had a sparse gradient
        self._expected = _Expected(None, [], [])

    def _form(self) -> Any:
        """What the workers' copy of the model has in common with it."""
        forms = self._seats.packing.forms, self._buffer_forms
        return self._parts.modules, wiring(self._parts), *forms

    def _program(self) -> TorchProgram:
        packings = self._seats.packing, self._shelf
        return TorchProgram(self._model, self._loss, self._has_aux, *packings)

    def _ship(self, program: Program) -> None:
        with torch.inference_mode(False):  # for the serial engine's copy of the model
            super()._ship(program)

    def _buffers(self) -> list[torch.Tensor]:
        tensors = (place.tensor for place in self._parts.buffers)
        return [tensor for tensor in tensors if tensor is not None]

    # Results

    def _expect(self, modes: Array) -> list[Output]:
        """One per parameter with a dense gradient; the same list while flags stay."""
        kinds = gradient_kinds(modes, len(self._parts.parameters))
        key = kinds, self._options.reduction
        if self._expected.key != key:
            named = list(self._model.named_parameters())
            dense = [index for index, kind in enumerate(kinds) if kind == DENSE]
            outputs = [self._output(index, *named[index]) for index in dense]
            self._expected = _Expected(key, dense, outputs)
        return self._expected.outputs

    def _output(self, index: int, name: str, parameter: torch.Tensor) -> Output:
        form = self._seats.packing.forms[index]
        shape = form.shape if form.is_contiguous else (parameter.numel(),)
        try:
            dtype = numpy_dtype(form.dtype)
        except TypeError as error:
            raise ArgumentError(
                f"{name} has dtype {form.dtype}, for which instep has no gradient"
            ) from error
        return Output(tuple(shape), dtype, self._options.reduction, name)

    def _gradients(self, outcome: Outcome) -> dict[int, torch.Tensor]:
        """By index; parameters whose gradient is None are left out."""
        dense = zip(self._expected.indices, outcome.outputs, strict=True)
        gradients = {
            k: self._shaped(k, array) for k, array in dense if array is not None
        }
        outside = set[int]().union(*(e.gradients for e in extras_of(outcome.shards)))
        for index in outside:
            parameter, rule = self._parts.parameters[index], self._options.reduction
            gradients[index] = merged_gradient(
                index, outcome.shards, gradients.get(index), parameter, rule
            )
        self._sparse |= {index for index in outside if gradients[index].is_sparse}
        return gradients

    def _shaped(self, index: int, array: Array) -> torch.Tensor:
        tensor, form = to_tensor(array), self._seats.packing.forms[index]
        if tensor.shape == form.shape:
            return tensor
        return tensor.as_strided(form.shape, form.strides)

    def _write_buffers(self, outcome: Outcome) -> None:
        places = self._parts.buffers
        for index, array in merged_buffers(outcome.shards, places).items():
            place, value = places[index], to_tensor(array)
            old = place.tensor
            if old is not None and _form_of(old) == _form_of(value):
                old.copy_(value)
            else:
                place.module._buffers[place.name] = value

    def _value(self, outcome: Outcome) -> Any:
        loss = to_tensor(np.asarray(outcome.loss))
        return (loss, merged_aux(outcome.shards)) if self._has_aux else loss


class _Expected(NamedTuple):
    """The outputs of a step, and which parameters they are the gradients of."""

    key: Any
    indices: list[int]
    outputs: list[Output]


def _forms(buffers: list[Place]) -> list[Any]:
    """Name and form of the buffer in each place."""
    return [
        (place.name, None if (tensor := place.tensor) is None else _form_of(tensor))
        for place in buffers
    ]


def _form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.is_cpu


def _dense_array(gradient: torch.Tensor | None) -> Array | None:
    if gradient is None:
        return None
    return to_array(gradient.to_dense() if gradient.is_sparse else gradient)


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """What autograd does at a leaf: its hooks, then `.grad`, then more hooks."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if parameter.grad is None:
        parameter.grad = gradient
    elif parameter.grad.is_sparse and not gradient.is_sparse:
        parameter.grad = gradient + parameter.grad
    else:
        parameter.grad += gradient
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for hook in hooks.values():
        hook(parameter)
