"""A Keras model on its way to the workers: as it is, not by Keras's own format.

Keras pickles a model by `save`, which loads only what was registered with it and makes
new variables. Here the objects themselves are pickled, classes of the script by
value. What belongs to the master alone stays behind: the optimizer, the functions
that `fit` calls.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
from keras import Model, Optimizer
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils import tracking

from instep._pool import Pool
from instep._ship import Pickler
from instep.keras._parallel import Parallel, Replacement

_TRACKED = (tracking.TrackedList, tracking.TrackedDict, tracking.TrackedSet)
_STAYS = (Optimizer, Pool, Parallel, Replacement)
_OF_THE_MASTER = (
    "_jax_state",
    "_eval_epoch_iterator",
    "history",
    "predict_function",
    "test_function",
    "train_function",
)


class Traveller:
    """A model that pickles as said above."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (_deeply(lambda: _dumps(self.model)),)


def _arrived(text: bytes) -> Traveller:
    return Traveller(cloudpickle.loads(text))


def _dumps(model: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(model)
    return file.getvalue()


class _Pickler(Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _STAYS):
            return type(None), ()
        if isinstance(value, _TRACKED):
            return _new, (type(value),), _state(value), None, None, _set
        if isinstance(value, KerasSaveable):
            return _new, (type(value),), (_parts(value), ()), None, None, _set
        return super().reducer_override(value)


def _parts(value: Any) -> dict[str, Any]:
    parts = dict(value.__dict__)
    if isinstance(value, Model):
        replacement = parts.get("_instep")
        for name in (*_OF_THE_MASTER, *(replacement.replaced if replacement else ())):
            parts.pop(name, None)
    return parts


def _state(value: Any) -> tuple[dict[str, Any], Any]:
    """The attributes and the items of a container that Keras tracks."""
    return value.__dict__, dict(value) if isinstance(value, dict) else list(value)


def _new(kind: type) -> Any:
    built_in = next((c for c in (list, dict, set) if issubclass(kind, c)), object)
    return built_in.__new__(kind)


def _set(value: Any, state: tuple[dict[str, Any], Any]) -> None:
    """Past the methods by which Keras watches attributes and items."""
    attributes, items = state
    value.__dict__.update(attributes)
    if isinstance(value, list):
        list.extend(value, items)
    elif isinstance(value, dict):
        dict.update(value, items)
    elif isinstance(value, set):
        set.update(value, items)


def _deeply(function: Callable[[], bytes]) -> bytes:
    """Calls it with room for recursion: layers refer to the layers after them."""
    answer: list[Any] = []

    def run() -> None:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(1_000_000)
        try:
            answer.append(function())
        except BaseException as error:
            answer.append(error)
        finally:
            sys.setrecursionlimit(limit)

    size = threading.stack_size(1 << 29)  # 512 MB of address space, touched as needed
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(size)
    thread.join()
    if isinstance(answer[0], BaseException):
        raise answer[0]
    return bytes(answer[0])
