"""NumPy and SciPy: a function that returns loss and gradient, computed by a pool."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from instep._check import Trial
from instep._errors import ArgumentError, GradientError, LossError
from instep._host import Prepared
from instep._options import Options
from instep._outcome import Outcome
from instep._pool import Pool
from instep._program import Array, Output, ShardResult, Task
from instep._sharding import take_rows
from instep._tree import (
    Structure,
    flatten,
    leaf_names,
    leaves_like,
    unflatten,
)
from instep._values import Weighted


def value_and_grad(fun: Callable[..., Any], **options: Any) -> GradientPool:
    """A function like `fun` that computes loss and gradient with several processes.

    The batch is split into shards by rows, each worker calls `fun` on its shards,
    and the results are averaged, weighted by rows. For a `fun` that returns the mean
    over the rows it is given, that is `fun` of the whole batch.

    Args:
        fun: `fun(params, *batch) -> (loss, grad)`. `params` is an array, a float or
            a tree of them, `grad` has its structure, shapes and dtypes. `loss` is a
            number, the mean over the rows, or `instep.Weighted(mean, weight)`. With
            `has_aux=True`, `fun` returns `((loss, aux), grad)`. The arrays that
            `fun` is given are read-only.
        **options: see `instep.Options`: workers, shards, threads, engine, seed,
            timeout, retries, reduction, has_aux.

    Returns:
        A `GradientPool`, called as `fun` is.

    Raises:
        ArgumentError: an option has a value that makes no sense.
        ShipError: `fun` cannot be sent to another process.

    Example:
        >>> import numpy as np
        >>> import instep
        >>> def fun(w, x):
        ...     return np.mean(w * x), np.mean(x)
        >>> with instep.numpy.value_and_grad(fun, workers=2, shards=3) as pool:
        ...     loss, grad = pool(np.float64(2.0), np.arange(1.0, 51.0))
        >>> float(loss), float(grad)
        (51.0, 25.5)
    """
    settings = Options.of(**options)
    return GradientPool(NumpyProgram(fun, settings.has_aux), settings)


class GradientPool(Pool):
    """Loss and gradient of a whole batch; made by `value_and_grad`."""

    def __init__(self, program: NumpyProgram, options: Options) -> None:
        super().__init__(program, options)
        self._published = _Published()
        self._form: Any = None
        self._expected: list[Output] = []

    def __call__(self, params: Any, *batch: Any) -> Any:
        """`(loss, grad)`, or `((loss, aux), grad)`, over the whole batch.

        Args:
            params: array, float or tree of them.
            batch: arrays (or trees of them) with the same number of rows, and
                numbers, which every shard gets as they are.

        Raises:
            BatchError: the batch cannot be split; names the field.
            GradientError: a parameter is of a kind that has no gradient, or `fun`
                gave a gradient of another shape or dtype.
        """
        leaves, structure = flatten(params)
        outcome = self._step(params, batch, self._gradients(leaves, structure))
        grads = map(_like, outcome.outputs, leaves)
        return self._value(outcome), unflatten(structure, grads)

    def evaluate(self, params: Any, *batch: Any) -> Any:
        """The loss (or `(loss, aux)`) over the whole batch, without the gradient."""
        leaves, structure = flatten(params)
        outputs = self._gradients(leaves, structure)
        return self._value(self._step(params, batch, outputs, gradient=False))

    def _stream_publish(self, params: Any) -> None:
        leaves, structure = flatten(params)
        self._published = _Published(params, self._gradients(leaves, structure))

    def _stream_batch(self, batch: tuple[Any, ...]) -> Prepared:
        return Prepared(batch, None, self._published.expected())

    def _stream_params(self, prepared: Prepared) -> Any:
        self._published.expected()
        return self._published.params

    def _stream_arrays(self, leaves: list[Array], prepared: Prepared) -> list[Array]:
        return leaves

    def _stream_result(self, outcome: Outcome, prepared: Prepared) -> tuple[Any, Any]:
        leaves, structure = flatten(self._published.params)
        self._published.is_new = False
        grads = unflatten(structure, map(_like, outcome.outputs, leaves))
        return self._value(outcome), grads

    def _try(self, arguments: tuple[Any, ...], index: Array | None) -> Trial:
        params, *rest = arguments
        batch = tuple(rest) if index is None else take_rows(tuple(rest), index)
        leaves, structure = flatten(params)
        outcome = self._step(params, batch, self._gradients(leaves, structure))
        names = leaf_names(structure, "params")
        gradients = dict(zip(names, outcome.outputs, strict=True))
        return Trial(float(outcome.loss), gradients)

    def _value(self, outcome: Outcome) -> Any:
        return (outcome.loss, outcome.aux) if self._options.has_aux else outcome.loss

    def _gradients(self, leaves: list[Any], structure: Structure) -> Sequence[Output]:
        kinds = [(type(x), np.shape(x), getattr(x, "dtype", None)) for x in leaves]
        rule, form = self._options.reduction, (structure, kinds)
        if (rule, form) != self._form:
            names = leaf_names(structure, "params")
            pairs = zip(names, leaves, strict=True)
            self._expected = [_output(name, leaf, rule) for name, leaf in pairs]
            self._form = rule, form
        return self._expected


@dataclass
class _Published:
    """The parameters of a stream."""

    params: Any = None
    outputs: Sequence[Output] | None = None
    is_new: bool = True  # since the last update

    def expected(self) -> Sequence[Output]:
        """One output per parameter.

        Raises:
            ArgumentError: there are no parameters, or only numbers that nobody can
                have updated in place.
        """
        if self.outputs is None:
            raise ArgumentError(
                "a stream needs parameters before its first update: "
                "pool.stream(batches, mode, params=w)"
            )
        leaves = flatten(self.params)[0]
        if not (self.is_new or any(isinstance(x, np.ndarray) for x in leaves)):
            raise ArgumentError(
                "the parameters are numbers, which cannot have been updated in place; "
                "call stream.publish(params) after each update"
            )
        return self.outputs


@dataclass
class NumpyProgram:
    """Calls `fun` in the worker and takes its gradient apart."""

    fun: Callable[..., Any]
    has_aux: bool
    modules: tuple[str, ...] = field(default=("numpy",))

    def start(self, threads: int) -> None:
        """NumPy needs nothing; its thread pools are limited by the worker."""

    def preserved(self) -> AbstractContextManager[None]:
        return nullcontext()

    def private(self, params: Any, arguments: tuple[Any, ...]) -> _Private:
        """A copy of the parameters."""
        return _Private(params)

    def optimizer(self, optimizer: Any, private: _Private) -> _Method:
        """`optimizer(params, grads) -> params`, working on the copy."""
        return _Method(optimizer, private)

    def compute(self, params: Any, batch: tuple[Any, ...], task: Task) -> ShardResult:
        value, grad = _pair(self.fun(params, *batch), "(loss, grad)")
        loss, aux = (
            _pair(value, "((loss, aux), grad)") if self.has_aux else (value, None)
        )
        weight = None
        if isinstance(loss, Weighted):
            loss, weight = loss.value, loss.weight
        return ShardResult(loss, weight, _gradients(grad, params), aux)


class _Private:
    """Parameters of a worker's own."""

    def __init__(self, params: Any) -> None:
        self._leaves, self.structure = flatten(params)
        self.arrays = [np.array(leaf) for leaf in self._leaves]

    def params(self) -> Any:
        return unflatten(self.structure, map(_like, self.arrays, self._leaves))

    def keep(self, result: ShardResult) -> None:
        pass  # a function of NumPy changes nothing else


class _Method:
    """An optimizer that is a function of parameters and gradients."""

    def __init__(self, function: Callable[..., Any], private: _Private) -> None:
        self._function, self._private = copy.deepcopy(function), private

    def step(self, gradients: Sequence[Array]) -> None:
        private = self._private
        grads = unflatten(private.structure, gradients)
        updated = leaves_like(
            self._function(private.params(), grads), private.structure
        )
        for array, new in zip(private.arrays, updated, strict=True):
            np.copyto(array, new)

    def state(self) -> Any:
        """The object itself; a plain function remembers nothing."""
        return None if inspect.isfunction(self._function) else self._function

    def load(self, state: Any) -> None:
        self._function = self._function if state is None else state


def _pair(value: Any, form: str) -> tuple[Any, Any]:
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    raise LossError(f"the function returned a {type(value).__name__}; expected {form}")


def _gradients(grad: Any, params: Any) -> list[Array]:
    """One array (or None) per parameter."""
    if isinstance(params, np.ndarray) and isinstance(grad, np.ndarray):
        return [grad]
    structure = flatten(params)[1]
    try:
        leaves = leaves_like(grad, structure)
    except ValueError as error:
        got = leaf_names(flatten(grad)[1], "grad")
        raise GradientError(
            f"the gradient has the leaves {got}; expected one for each parameter: "
            f"{leaf_names(structure, 'params')}"
        ) from error
    return [np.asarray(leaf) for leaf in leaves]


def _output(name: str, leaf: Any, rule: Any) -> Output:
    array = np.asarray(leaf)
    if array.dtype.kind not in "fcV":
        raise GradientError(
            f"{name} has dtype {array.dtype}, for which there is no gradient; expected "
            "floating-point parameters. Pass what is not to be fitted as part of the "
            "batch, or convert it: params.astype(float)"
        )
    return Output(array.shape, array.dtype, rule, name)


def _like(grad: Array | None, leaf: Any) -> Any:
    """The gradient as an array where the parameter is one, else as a number."""
    if grad is None or isinstance(leaf, np.ndarray):
        return grad
    return grad[()]
