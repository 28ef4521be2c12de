"""`instep.keras.parallel`: replaces a model's train and test functions."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import keras

from instep._check import Report
from instep._closing import Closing
from instep._errors import BatchError, EngineUnavailableError
from instep._statistics import Statistics
from instep.keras._model import (
    check_keywords,
    check_model,
    check_steps,
    tests_its_own_way,
)

if TYPE_CHECKING:
    from instep._dashboard import Dashboard
    from instep._trace import Trace

_BACKENDS = ("tensorflow", "jax", "torch")
_ATTRIBUTE = "_instep"


def parallel(model: keras.Model, **keywords: Any) -> Parallel:
    """Lets `model.fit`, `evaluate` and `train_on_batch` compute with several processes.

    One line after `compile`; all else stays: callbacks, metrics, progress bar,
    validation, data sets, class weights, `model.save`.

    Every batch is split into shards by rows. Losses combine by what they are a mean
    over: rows, unmasked entries or sample weights; `reduction="sum"` adds up.
    Regularisers count once. Terms of `add_loss` combine by rows, as means. Metrics see
    the predictions for the whole batch. The model's optimizer applies the gradient in
    this process: clipping, accumulation, averages, schedules and loss scaling are its
    own.

    Moving statistics of `BatchNormalization` (and other floating-point state that the
    model writes) are averaged over the shards, each of which normalises its own rows.
    Dropout draws in shard 0 what it would draw without instep, in the other shards
    numbers of their own, the same for any number of workers.

    Args:
        model: built and compiled, on Keras's TensorFlow, JAX or PyTorch backend.
        **keywords: see `instep.Options`: workers, shards, threads, engine, seed,
            timeout, retries.

    Returns:
        A `Parallel`, to be closed; the model is a plain one again then. Without a
        variable that holds it, it stays with the model until that is gone.

    Raises:
        ArgumentError: the model is not built, not compiled, or has a `train_step` of
            its own.
        ShipError: the model uses something that lives in this process.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.arange(50.0)[:, None]
        >>> with instep.keras.parallel(model, shards=3, engine="serial"):
        ...     history = model.fit(x, 2 * x, epochs=2, verbose=0)
        >>> len(history.history["loss"])
        2
    """
    check_model(model)
    check_keywords(keywords)
    if (former := getattr(model, _ATTRIBUTE, None)) is not None:
        former.remove()
    backend = keras.backend.backend()
    if backend not in _BACKENDS:
        raise EngineUnavailableError(
            f"Keras runs on its {backend} backend, which cannot train; instep.keras "
            f"runs on {', '.join(_BACKENDS)}. Set KERAS_BACKEND before importing Keras"
        )
    steps = importlib.import_module(f"instep.keras._{backend}").Steps(model, **keywords)
    return Parallel(Replacement(model, steps))


class Replacement:
    """Stands in a model for its own functions, and keeps the pool.

    Attributes:
        replaced: the names of the model's attributes that it has set.
        is_used: the model has been fitted or evaluated since.
    """

    def __init__(self, model: keras.Model, steps: Any) -> None:
        self.model, self.steps = model, steps
        self.is_used = self._has_run = False
        self._compiled: Any = None
        replaced = {
            "make_train_function": self._make_train_function,
            "make_test_function": self._make_test_function,
            "_symbolic_build": self._symbolic_build,
            _ATTRIBUTE: self,
        }
        if tests_its_own_way(model):
            del replaced["make_test_function"]
        for name, value in replaced.items():
            setattr(model, name, value)
        self.replaced = tuple(replaced)
        model.train_function = model.test_function = None

    def remove(self) -> None:
        """Closes the pool; the model makes its own functions again."""
        self.steps.pool.close()
        if getattr(self.model, _ATTRIBUTE, None) is self:
            for name in self.replaced:
                delattr(self.model, name)
            self.model.train_function = self.model.test_function = None

    def checked(self, *batch: Any) -> Report:
        """What the pool's `check` says of a batch."""
        self.model._symbolic_build(data_batch=batch)
        report: Report = self._follow().check(*batch)
        return report

    # Keras calls these at the start of every `fit` and `evaluate`.

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        with _at_least_one_batch():
            try:
                type(self.model)._symbolic_build(self.model, iterator, data_batch)
            except Exception:
                if iterator is not None:
                    next(iter(iterator))  # the model may have been shown nothing
                raise

    def _make_train_function(self, force: bool = False) -> None:
        self._has_run = False
        if self.model.train_function is None or force:
            check_steps(self.model)
            self.model.train_function = self._run(self._follow().train_function())

    def _make_test_function(self, force: bool = False) -> None:
        self._has_run = False
        if self.model.test_function is None or force:
            self.model.test_function = self._run(self._follow().test_function())

    def _run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with errors that a user of Keras understands."""

        def run(*arguments: Any) -> Any:
            guard = nullcontext() if self._has_run else _at_least_one_batch()
            try:
                with guard:
                    logs = function(*arguments)
            except Exception as error:
                # Keras drops the cause, which is the worker's traceback.
                if error.__cause__ is not None and hasattr(error, "add_note"):
                    error.add_note(str(error.__cause__))
                raise
            self._has_run = True
            return logs

        return run

    def _follow(self) -> Any:
        """The steps, for the model as it is compiled now."""
        self.is_used = True
        if self.model._loss_tracker is not self._compiled:  # of this `compile`
            self._compiled = self.model._loss_tracker
            self.steps.compiled()
        return self.steps


class Parallel(Closing):
    """What `parallel` returns: closes the pool and tells of it."""

    def __init__(self, replacement: Replacement) -> None:
        self._replacement = replacement

    def close(self) -> None:
        """Ends the workers; the model is a plain one again. Twice is fine."""
        self._replacement.remove()

    def statistics(self) -> Statistics:
        """What the pool has done so far."""
        statistics: Statistics = self._replacement.steps.pool.statistics()
        return statistics

    def trace(self, path: str | os.PathLike[str] | None) -> Trace | None:
        """Writes what happens from now on to a file; see `Pool.trace`."""
        trace: Trace | None = self._replacement.steps.pool.trace(path)
        return trace

    def dashboard(
        self, port: int | None = None, open_browser: bool = False
    ) -> Dashboard:
        """A page that shows what the pool does; see `Pool.dashboard`."""
        page: Dashboard = self._replacement.steps.pool.dashboard(port, open_browser)
        return page

    def resize(self, workers: int) -> None:
        """Changes the number of workers; the bits stay the same."""
        self._replacement.steps.pool.resize(workers)

    def state_dict(self) -> dict[str, Any]:
        """What results depend on besides the model and the data; see `Pool`."""
        state: dict[str, Any] = self._replacement.steps.pool.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the pool that gave this state was, with the same bits."""
        self._replacement.steps.pool.load_state_dict(state)

    def check(self, x: Any, y: Any = None, sample_weight: Any = None) -> Report:
        """Whether shards give the loss and gradient of the whole batch.

        Takes what `model.train_on_batch` takes, and changes nothing.
        """
        report: Report = self._replacement.checked(x, y, sample_weight)
        return report

    def __del__(self) -> None:
        # Dropped at once, in a script that just calls `parallel(model)`, it leaves the
        # pool to the model.
        if self._replacement.is_used and not sys.is_finalizing():
            self.close()


@contextmanager
def _at_least_one_batch() -> Iterator[None]:
    try:
        yield
    except StopIteration:
        raise BatchError(
            "the data gave no batch at all; expected at least one. A tf.data.Dataset "
            "may be used up, filtered empty, or shorter than a batch whose remainder "
            "is dropped"
        ) from None
