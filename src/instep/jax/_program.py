"""Computes shards of a JAX loss in a worker, by one compiled function per form."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from instep._program import Array, ShardResult, Task
from instep._seeding import seed_python
from instep.jax._device import private_device, start_backend
from instep.jax._flags import Flags, current_flags, set_flags
from instep.jax._form import Form
from instep.jax._loss import AuxForm, LossCall, Parts
from instep.jax._nodes import Registration
from instep.jax._private import Method, Private

_MAX_FORMS = 64  # compiled functions that a worker keeps

# What JAX says of a loss that wants to see values while it is traced.
_UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)


class Extras(NamedTuple):
    """What a shard sends beside its loss and gradients.

    Attributes:
        weak: the Python type that the loss follows, where it is weakly typed.
        aux: of the loss, without its arrays.
        arrays: those.
    """

    weak: type | None
    aux: AuxForm | None
    arrays: list[Array]


@dataclass
class JaxProgram:
    """The loss, as it was when it was shipped.

    Attributes:
        loss: pickled, because to unpickle it may make arrays, and the backend
            must have been told its threads before.
        has_aux: whether it returns (loss, aux).
        types: pytree nodes of `__main__`.
    """

    loss: bytes
    has_aux: bool
    types: tuple[Registration, ...]
    modules: tuple[str, ...] = field(default=("instep.jax",))
    _is_guest: bool = False  # in the master's own process

    def start(self, threads: int) -> None:
        if not self._is_guest:
            start_backend(threads)
        self._threads = threads
        self._loss: Callable[..., Any] = pickle.loads(self.loss)
        self._shown: dict[bytes, tuple[Flags, _Function]] = {}

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Puts JAX's flags back, and computes on a device of the pool's own."""
        self._is_guest = True
        flags = current_flags()
        try:
            yield
        finally:
            set_flags(flags)

    def compute(self, params: Any, batch: tuple[Any, ...], task: Task) -> ShardResult:
        spec, *whole = params
        flags, function = self._function(spec.tobytes())
        set_flags(flags)
        with self._on_device():
            value, extra, grads = function.run(whole, batch, task)
            array, arrays, static = extra
            weight: Any = static.weight if array is None else np.asarray(array)
            outputs = [np.asarray(grad) for grad in grads]
            extras = None
            if static.weak or static.aux:
                aux_arrays = [np.asarray(array) for array in arrays]
                extras = Extras(static.weak, static.aux, aux_arrays)
            return ShardResult(np.asarray(value), weight, outputs, extras)

    def private(self, params: Any, arguments: tuple[Any, ...]) -> Private:
        """A copy of the parameters, for steps of the worker's own."""
        flags, function = self._function(params[0].tobytes())
        set_flags(flags)
        return Private(params, function.form)

    def optimizer(self, optimizer: Any, private: Private) -> Method:
        """The optax optimizer, for the copy."""
        return Method(optimizer, private)

    def _function(self, spec: bytes) -> tuple[Flags, _Function]:
        """The flags and the function that a spec describes."""
        found = self._shown.get(spec)
        if found is None:
            flags, form = pickle.loads(spec)[0]
            if len(self._shown) >= _MAX_FORMS:
                self._shown.clear()
            found = flags, _Function(LossCall(self._loss, self.has_aux, form))
            self._shown[spec] = found
        return found

    def _on_device(self) -> AbstractContextManager[Any]:
        if not self._is_guest:
            return nullcontext()
        device: AbstractContextManager[Any]
        device = jax.default_device(private_device(self._threads))
        return device


class _Function:
    """Value and gradient for calls of one form.

    Compiled by `jax.jit`, once per shard size. A loss that cannot be traced, or that
    draws from Python's or NumPy's generators (which a trace would do once and for
    all), is computed operation by operation, as `jax.value_and_grad` alone does; one
    that draws, with no `jax.jit` of its own either.
    """

    def __init__(self, call: LossCall) -> None:
        self._call = call
        self.form: Form = call.form
        self._folds_keys = call.form.folds_keys
        self._untraceable = set[Any]()  # the shapes of which this is known
        self._has_failed = False  # the trace just made
        self._draws = False  # from the generators that a trace would freeze
        gradient = jax.value_and_grad(self._traced, has_aux=True)
        self._compiled = {True: jax.jit(gradient), False: jax.jit(self._traced)}

    def run(
        self, whole: list[Any], batch: tuple[Any, ...], task: Task
    ) -> tuple[Any, Any, list[Any]]:
        """Value, extras and gradients of one shard."""
        params, rest = self.form.parted(self.form.in_place(whole, batch))
        # One shard is the whole batch: its keys are the caller's own.
        shard = np.uint32(task.shard) if self._folds_keys and task.shards > 1 else None
        result = self._run_compiled(params, rest, shard, task.gradient)
        if result is None:
            result = self._run_plain(params, rest, shard, task)
        if not task.gradient:
            return *result, []
        (value, extras), grads = result
        return value, extras, grads

    def _run_compiled(
        self, params: list[Any], rest: list[Any], shard: Any, gradient: bool
    ) -> Any:
        """None where it has to be done without."""
        if self.form.has_text or self._is_known(params, rest):
            return None
        self._has_failed = False
        try:
            result = self._compiled[gradient](params, rest, shard)
        except _UNTRACEABLE:
            self._has_failed = True
        if not self._has_failed:
            return result
        self._untraceable.add(_shapes(params, rest))
        return None

    def _is_known(self, params: list[Any], rest: list[Any]) -> bool:
        """Whether a trace for these shapes has failed before."""
        return bool(self._untraceable) and _shapes(params, rest) in self._untraceable

    def _traced(self, params: list[Any], rest: list[Any], shard: Any) -> Parts:
        """The loss, while `jax.jit` traces it."""
        before = _generators()
        parts = self._call(params, rest, shard)
        if _generators() != before:
            self._has_failed = self._draws = True
        return parts

    def _run_plain(
        self, params: list[Any], rest: list[Any], shard: Any, task: Task
    ) -> Any:
        seed_python(task.seed)  # the attempt to trace may have drawn
        # Copies: what the loss keeps must not change with the next shard.
        own = list(map(_own, params)), list(map(_own, rest))
        function: Callable[..., Any] = self._call
        if task.gradient:
            function = jax.value_and_grad(function, has_aux=True)
        with jax.disable_jit() if self._draws else nullcontext():
            return function(*own, shard)


def _shapes(params: list[Any], rest: list[Any]) -> Any:
    return *map(np.shape, params), *map(np.shape, rest)


def _own(value: Any) -> Any:
    """A copy, as a JAX array; numbers and texts as they are."""
    return jnp.array(value) if isinstance(value, np.ndarray) else value


def _generators() -> Any:
    """The state of all generators that a trace would freeze."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, bytes(np.asarray(keys)), rest
