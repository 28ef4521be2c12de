"""The pool of a JAX script: called as `jax.value_and_grad(loss)` is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jax.tree_util import tree_unflatten

from instep._check import Trial
from instep._errors import ArgumentError
from instep._host import Prepared
from instep._options import Options
from instep._outcome import Outcome
from instep._pool import Pool
from instep._program import Array, Rule
from instep._sharding import take_rows
from instep._ship import ship
from instep.jax._answer import Answer
from instep.jax._call import Call, Caller, Plan
from instep.jax._leaves import fold_keys, is_key, weakly_typed
from instep.jax._loss import LossCall
from instep.jax._nodes import registrations_of_main
from instep.jax._private import parameters
from instep.jax._program import JaxProgram
from instep.jax._traced import is_traced, traced_answer


def value_and_grad(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    in_axes: Any = None,
    **options: Any,
) -> GradientPool:
    """A drop-in for `jax.value_and_grad` that computes with several processes.

    The batch is split into shards by rows, each worker computes value and gradient
    of its shards, compiled by `jax.jit`, and the results are averaged, weighted by
    rows. For a loss that is a mean over the rows it is given, that is value and
    gradient of the whole batch.

    Args:
        loss: `loss(*args, **kwargs)` -> scalar, the mean over the rows, or
            `instep.Weighted(mean, weight)`; with `has_aux=True` a pair `(loss, aux)`.
        argnums: what is differentiated; an int, or several. Every shard gets all of
            it.
        has_aux: the loss also returns auxiliary data; see `instep.Sum`.
        in_axes: what is split, as in `jax.vmap`: per positional argument the axis of
            the rows, None (the same for every shard), or a tree of them. Left out:
            arrays are split along axis 0; numbers, arrays without axes, single PRNG
            keys and what is differentiated are not. Lists of strings are split too.
        **options: see `instep.Options`: workers, shards, threads, engine, seed,
            timeout, retries, reduction.

    Returns:
        A `GradientPool`, called as the loss is.

    A typed PRNG key (`jax.random.key`) that all shards share is folded with the
    shard's index, `jax.random.fold_in(key, shard)`, unless there is only one shard.
    Keys that are split are used as they are. A raw key (`jax.random.PRNGKey`) is an
    array like any other: give it None in `in_axes`; each shard then draws the same
    numbers.

    JAX's flags (x64, matmul precision, PRNG implementation, ...) hold in the workers.
    They compute on the CPU.

    A loss that JAX cannot trace, that is given lists of strings, or that draws from
    `random` or `numpy.random`, is computed without `jax.jit`, as `jax.value_and_grad`
    alone does: slower, and not with the bits of a compiled one.

    Under `jax.jit` the pool is called back by `jax.pure_callback`: once for each time
    the result is needed. Errors then come as JAX's own, with the text only.

    Raises:
        ArgumentError: an option has a value that makes no sense.
        ShipError: the loss cannot be sent to another process.

    Example:
        >>> import jax.numpy as jnp
        >>> import instep
        >>> def loss(params, x):
        ...     return jnp.mean(params["w"] * x)
        >>> with instep.jax.value_and_grad(loss, shards=3, engine="serial") as pool:
        ...     value, grads = pool({"w": 2.0}, jnp.arange(1.0, 51.0))
        >>> float(value), float(grads["w"])
        (51.0, 25.5)
    """
    if not callable(loss):
        raise ArgumentError(f"the loss is a {type(loss).__name__}; expected a function")
    settings = Options.of(has_aux=has_aux, **options)
    return GradientPool(loss, _argnums(argnums), in_axes, settings)


class GradientPool(Pool):
    """Value and gradient of a whole batch; made by `value_and_grad`."""

    def __init__(
        self,
        loss: Callable[..., Any],
        argnums: int | tuple[int, ...],
        in_axes: Any,
        options: Options,
    ) -> None:
        self._loss = loss
        self._argnums = argnums
        self._caller = Caller(argnums, in_axes)
        self._trial_seed = 0
        self._published: Any = None  # the parameters of a stream
        self._is_new = False  # since the last update
        super().__init__(_program(loss, options), options)

    def replace_loss(self, loss: Callable[..., Any]) -> None:
        """Gives the workers another loss, called with the same arguments."""
        with self._lock:
            self._ship(_program(loss, self._options))
            self._loss = loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`(value, grads)`, or `((value, aux), grads)`, over the whole batch.

        Args:
            *args: of the loss; any pytrees.
            **kwargs: of the loss, split by default; never differentiated.

        Returns:
            JAX arrays. `grads` has the structure, shapes and dtypes of the argument
            `argnums`; a tuple of such where `argnums` is one.

        Raises:
            BatchError: the arguments cannot be split; names the leaf.
            GradientError: a leaf that has no gradient; names it. Also a TypeError.
            LossError: the loss did not return a scalar.
        """
        call = self._caller.call(args, kwargs)
        answer = self._answer(call, gradient=True)
        return self._value(answer), self._grads(answer, call.plan)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The value (or `(value, aux)`) over the whole batch, without the gradient."""
        call = self._caller.call(args, kwargs)
        return self._value(self._answer(call, gradient=False))

    def _answer(self, call: Call, *, gradient: bool) -> Answer:
        plan, leaves = call

        def run(leaves: Sequence[Any]) -> Answer:
            whole, rows = plan.place(plan.transit(leaves))
            outputs = plan.outputs[self._options.reduction]
            return Answer.of(self._step(whole, rows, outputs, gradient=gradient))

        if not is_traced(leaves):
            return run(leaves).on_device()
        loss = LossCall(self._loss, self._options.has_aux, plan.form)
        shards = min(self.shards, plan.rows)
        return traced_answer(call, loss, run, shards=shards, gradient=gradient)

    # Streams

    def _stream_publish(self, params: Any) -> None:
        if self._argnums != 0:
            raise ArgumentError(
                f"a stream needs argnums=0, the parameters; this pool has "
                f"argnums={self._argnums!r}"
            )
        self._published, self._is_new = params, True

    def _stream_batch(self, batch: tuple[Any, ...]) -> Prepared:
        plan, leaves = self._stream_call(batch)
        whole, rows = plan.place(plan.transit(leaves))
        # Arguments that go whole to every shard travel with the parameters.
        key = plan if len(whole) == 1 + len(plan.outputs["mean"]) else id(batch)
        outputs = plan.outputs[self._options.reduction]
        return Prepared(rows, None, outputs, (plan, batch), key)

    def _stream_params(self, prepared: Prepared) -> Any:
        if not self._is_new:
            raise ArgumentError(
                "nothing was published after the last update, and JAX arrays are not "
                "updated in place; call stream.publish(params) after each"
            )
        plan, leaves = self._stream_call(prepared.form[1])
        return plan.place(plan.transit(leaves))[0]

    def _stream_arrays(self, leaves: list[Array], prepared: Prepared) -> list[Array]:
        return parameters(prepared.form[0].form, leaves[1:])

    def _stream_result(self, outcome: Outcome, prepared: Prepared) -> tuple[Any, Any]:
        self._is_new = False
        answer = Answer.of(outcome).on_device()
        return self._value(answer), self._grads(answer, prepared.form[0])

    def _stream_call(self, batch: tuple[Any, ...]) -> Call:
        if self._published is None:
            raise ArgumentError(
                "a stream needs parameters before its first update: "
                "pool.stream(batches, mode, params=params)"
            )
        return self._caller.call((self._published, *batch), {})

    def _try(self, arguments: tuple[Any, ...], index: Array | None) -> Trial:
        plan, leaves = self._caller.call(arguments, {})
        if self._trial_seed:
            leaves = [_other_key(leaf) if is_key(leaf) else leaf for leaf in leaves]
        whole, rows = plan.place(plan.transit(leaves))
        rows = rows if index is None else take_rows(rows, index)
        outputs = plan.outputs[self._options.reduction]
        outcome = self._step(whole, rows, outputs)
        names = [output.name for output in outputs]
        gradients = dict(zip(names, outcome.outputs, strict=True))
        return Trial(float(outcome.loss), gradients)

    @contextmanager
    def _trial(self, shards: int, rule: Rule, seed: int) -> Iterator[None]:
        """Another seed is another key too: JAX's randomness comes by argument."""
        self._trial_seed = seed
        try:
            with super()._trial(shards, rule, seed):
                yield
        finally:
            self._trial_seed = 0

    def _value(self, answer: Answer) -> Any:
        value = weakly_typed(answer.loss, answer.weak)
        return (value, answer.rebuilt_aux()) if self._options.has_aux else value

    def _grads(self, answer: Answer, plan: Plan) -> Any:
        grads = list(map(weakly_typed, answer.grads, plan.weak))
        trees = tuple(
            tree_unflatten(treedef, grads[where]) for treedef, where in plan.gradients
        )
        return trees if isinstance(self._argnums, tuple) else trees[0]


def _program(loss: Callable[..., Any], options: Options) -> JaxProgram:
    return JaxProgram(ship(loss), options.has_aux, registrations_of_main())


def _other_key(keys: Any) -> Any:
    """Keys (of any shape) that draw other numbers."""
    return fold_keys(keys, 0x5EED)


def _argnums(argnums: int | Sequence[int]) -> int | tuple[int, ...]:
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not numbers or not all(type(number) is int for number in numbers):
        raise ArgumentError(f"argnums={argnums!r}; expected an int, or some")
    return argnums if isinstance(argnums, int) else numbers
