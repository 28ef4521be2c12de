"""A pool called under `jax.jit`: the arguments are tracers, the call is a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from instep._program import Array
from instep._seeding import preserved_generators
from instep._values import Mean
from instep.jax._answer import Answer
from instep.jax._call import Call
from instep.jax._leaves import dtype_of
from instep.jax._loss import AuxLeaf, LossCall, Parts

_Shape: Any = jax.ShapeDtypeStruct


def is_traced(leaves: Sequence[Any]) -> bool:
    """Whether a leaf stands for a value that is not there yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def traced_answer(
    call: Call,
    loss: LossCall,
    run: Callable[[list[Any]], Answer],
    *,
    shards: int,
    gradient: bool,
) -> Answer:
    """The answer as tracers; `run` is called whenever the compiled function runs.

    By `jax.pure_callback`, because a gradient is a pure function: JAX may leave a call
    out whose result is not used, and `jax.vmap` makes one call per element.

    Args:
        call: its leaves are tracers, or some of them.
        loss: for the shapes of what it returns.
        run: from the leaves, with arrays in place of tracers, to the answer.
        shards: into how many the batch is split.
        gradient: False: loss and aux only.
    """
    sent, outputs = _Sent(call), call.plan.outputs["mean"] if gradient else []
    value, aux, static = sent.shapes_of(loss)
    forms = () if static.aux is None else static.aux.leaves
    merged = _merged_shapes(forms, aux, shards)
    shapes = [
        _Shape((), value.dtype),
        *(_Shape(output.shape, output.dtype) for output in outputs),
        *(shape for shape in merged if shape is not None),
    ]

    def compute(*values: Any) -> list[Array]:
        answer = run(sent.filled(map(np.asarray, values)))
        pairs = zip(answer.aux, merged, strict=True)
        numbers = [value for value, shape in pairs if shape is not None]
        flat = zip([answer.loss, *answer.grads, *numbers], shapes, strict=True)
        return [np.asarray(value, shape.dtype) for value, shape in flat]

    found = iter(
        jax.pure_callback(compute, shapes, *sent.arrays, vmap_method="sequential")
    )
    loss_value, grads = next(found), [next(found) for _ in outputs]
    pairs = zip(merged, forms, strict=True)
    leaves = [form.static if shape is None else next(found) for shape, form in pairs]
    return Answer(loss_value, grads, leaves, static.weak, static.aux)


@dataclass
class _Sent:
    """The leaves that a callback is sent; the others are known when it is traced."""

    call: Call

    def __post_init__(self) -> None:
        plan, leaves = self.call
        triples = zip(leaves, plan.form.leaves, plan.dtypes, strict=True)
        self.arrays = [
            jax.random.key_data(leaf) if form.key else jnp.asarray(leaf, dtype)
            for leaf, form, dtype in triples
            if dtype is not None
        ]

    def filled(self, arrays: Iterable[Any]) -> list[Any]:
        """All leaves, with these in place of those that are sent."""
        arrays = iter(arrays)
        pairs = zip(self.call.leaves, self.call.plan.dtypes, strict=True)
        return [leaf if dtype is None else next(arrays) for leaf, dtype in pairs]

    def shapes_of(self, loss: LossCall) -> tuple[Any, Sequence[Any], Any]:
        """Of the loss and of aux's arrays, and what else the loss returns."""

        def parts(*arrays: Any) -> Parts:
            params, rest = self.call.plan.form.parted(self.filled(arrays))
            return loss(params, rest, None)

        with preserved_generators():  # the caller's stay as they were
            value, (_, aux, static) = jax.eval_shape(parts, *self.arrays)
        return value, aux, static


def _merged_shapes(
    forms: Sequence[AuxLeaf], arrays: Sequence[Any], shards: int
) -> list[Any]:
    """Of every leaf of the merged aux; None where it is neither array nor number."""
    found = iter(arrays)
    shapes = []
    for form in forms:
        if form.is_array:
            array = next(found)
            shapes.append(_merged_shape(form, array.shape, array.dtype, shards))
        elif isinstance(form.static, bool | int | float | complex):
            shapes.append(_merged_shape(form, (), dtype_of(form.static), shards))
        else:
            shapes.append(None)
    return shapes


def _merged_shape(form: AuxLeaf, shape: Any, dtype: Any, shards: int) -> Any:
    is_mean = form.marker is Mean or (shape == () and form.marker is None)
    if is_mean and shards > 1 and np.dtype(dtype).kind in "biu":
        dtype = dtype_of(0.0)  # the mean of integers is none
    return _Shape(shape, dtype)
