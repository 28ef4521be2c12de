"""A training, described: what the `job()` of a job file returns."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from instep._errors import ArgumentError
from instep._shuffled import shuffled
from instep._tree import flatten, leaf_names


@dataclass(frozen=True)
class Job:
    """A training: model, loss, data and how to go through them.

    A job file is a Python file with a function `job()` that returns one; commands such
    as `instep tune job.py` take it.

    Args:
        model: PyTorch: a `torch.nn.Module`. TensorFlow: a Keras model, a `tf.Module`
            or a list of variables. JAX and NumPy: a tree of parameters, JAX's if one
            of them is a `jax.Array`.
        loss: as the framework's pool takes it: `loss(model, *batch)` -> the mean over
            the rows; for NumPy `loss(params, *batch) -> (loss, gradient)`.
        data: a tuple of arrays, tensors or lists (or trees of them) with the same
            number of rows; numbers are part of every batch.
        batch_size: rows per step.
        optimizer: PyTorch: of the model's parameters. TensorFlow: Keras's. JAX:
            optax's. NumPy: a function (params, grads) -> params, or a learning rate.
        steps: of the training.
        seed: of the order of the rows and of the pool.

    Raises:
        ArgumentError: a value that makes no sense, named with what was expected.

    Example:
        >>> import numpy as np, instep
        >>> def loss(w, x):
        ...     return np.mean(w * x), np.mean(x)
        >>> job = instep.Job(np.float64(2.0), loss, (np.arange(50.0),), batch_size=20)
        >>> job.framework, [len(x) for (x,) in job.batches()]
        ('numpy', [20, 20, 10])
        >>> with job.pool(engine="serial") as pool:
        ...     value, grad = pool(*job.arguments(job.data))
        >>> float(value), float(grad)
        (49.0, 24.5)
    """

    model: Any
    loss: Callable[..., Any]
    data: tuple[Any, ...]
    batch_size: int
    optimizer: Any = None
    steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise ArgumentError(
                f"loss is a {type(self.loss).__name__}; expected a function"
            )
        _check_whole("batch_size", self.batch_size, 1, self.rows, " (rows of the data)")
        _check_whole("steps", self.steps, 1)
        _check_whole("seed", self.seed)
        _ = self.framework

    @property
    def rows(self) -> int:
        """Of the data."""
        return _common_rows(self.data)

    @property
    def framework(self) -> str:
        """ "torch", "tensorflow", "jax" or "numpy": what the model is of."""
        return _framework(self.model)

    def pool(self, **options: Any) -> Any:
        """The framework's pool for model and loss.

        Args:
            **options: see `instep.Options`.
        """
        options = {"seed": self.seed, **options}
        module = importlib.import_module(f"instep.{self.framework}")
        if self._is_function:
            return module.value_and_grad(self.loss, **options)
        return module.GradientPool(self.model, self.loss, **options)

    def batches(self, epoch: int = 0) -> Iterator[tuple[Any, ...]]:
        """The batches of an epoch, in the order of `instep.shuffled`.

        Args:
            epoch: counts from 0; each has another order.
        """
        from instep._sharding import take_rows  # needs NumPy; `import instep` does not

        for rows in shuffled(self.rows, self.batch_size, self.seed, epoch):
            yield take_rows(tuple(self.data), rows)

    def arguments(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the pool's gradient, `check` and `tune` take for this batch.

        In JAX and NumPy the parameters come first.
        """
        return (self.model, *batch) if self._is_function else tuple(batch)

    @property
    def _is_function(self) -> bool:
        """Whether the loss is a function of parameters, not of a model."""
        return self.framework in ("jax", "numpy")


def _framework(model: Any) -> str:
    torch, tf, jax = map(sys.modules.get, ("torch", "tensorflow", "jax"))
    if torch and isinstance(model, torch.nn.Module):
        return "torch"
    if _is_keras(model):
        return _of_keras()
    if tf and _is_of_variables(tf, model):
        return "tensorflow"
    if jax and any(isinstance(x, jax.Array) for x in jax.tree_util.tree_leaves(model)):
        return "jax"
    return _expect_numpy(model)


def _is_keras(model: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.layers.Layer)


def _of_keras() -> str:
    """The framework that Keras runs on, if it is one for which a job can be made."""
    backend: str = sys.modules["keras"].backend.backend()
    if backend != "tensorflow":
        raise ArgumentError(
            f"model is one of Keras on its {backend} backend; expected TensorFlow's, "
            "KERAS_BACKEND=tensorflow. Elsewhere there is instep.keras.parallel"
        )
    return backend


def _is_of_variables(tf: Any, model: Any) -> bool:
    if isinstance(model, list | tuple):
        return bool(model) and all(isinstance(v, tf.Variable) for v in model)
    return isinstance(model, tf.Module)


def _expect_numpy(model: Any) -> str:
    leaves, structure = flatten(model)
    for name, leaf in zip(leaf_names(structure, "model"), leaves, strict=True):
        if not isinstance(leaf, float) and not hasattr(leaf, "__array__"):
            raise ArgumentError(
                f"{name} is a {type(leaf).__name__}; expected a torch.nn.Module, a "
                "Keras model, a tf.Module, or a tree of NumPy or JAX arrays"
            )
    if not leaves:
        raise ArgumentError("model has no parameters; expected at least one array")
    return "numpy"


def _common_rows(data: Any) -> int:
    if not isinstance(data, tuple | list):
        raise ArgumentError(
            f"data is a {type(data).__name__}; expected a tuple of arrays, as (x, y)"
        )
    from instep._sharding import is_row_list  # needs NumPy; `import instep` does not

    leaves, structure = flatten(tuple(data), is_row_list)
    names = leaf_names(structure, "data")
    pairs = zip(names, map(_num_rows, leaves), strict=True)
    counts = {name: count for name, count in pairs if count is not None}
    if not counts:
        raise ArgumentError("data has no rows; expected at least one array in a tuple")
    (first, rows), *others = counts.items()
    for name, count in others:
        if count != rows:
            raise ArgumentError(
                f"{name} has {count} rows but {first} has {rows}; expected as many"
            )
    return rows


def _num_rows(leaf: Any) -> int | None:
    """None for a number or a text, which is the same for every row."""
    if isinstance(leaf, list):
        return len(leaf)
    shape: Any = getattr(leaf, "shape", ())
    return int(shape[0]) if len(shape) else None


def _check_whole(
    name: str,
    value: Any,
    least: int | None = None,
    most: int | None = None,
    of: str = "",
) -> None:
    is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
    limits = "" if least is None else f", at least {least}"
    limits += "" if most is None else f" and at most {most}{of}"
    if not (
        is_whole
        and (least is None or value >= least)
        and (most is None or value <= most)
    ):
        raise ArgumentError(f"{name}={value!r}; expected a whole number{limits}")
