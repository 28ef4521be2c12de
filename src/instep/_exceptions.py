"""An exception's way from a worker to the master: its type, text and traceback."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import cloudpickle

from instep._errors import WorkerError, WorkerTraceback


def pack_error(error: BaseException) -> bytes:
    """The exception and its traceback as text, pickled.

    Many exceptions do not unpickle, or with another text, because `__init__` takes
    other arguments than `args` holds. They are rebuilt without it, so that type and
    text survive; what cannot travel at all is quoted by a WorkerError.
    """
    text = "".join(traceback.format_exception(error))
    quote = f"{type(error).__name__}: {_text_of(error)}"
    return pickle.dumps((text, quote, _pickled(error)))


def unpack_error(packed: bytes) -> tuple[BaseException, str]:
    """The exception and the text of its traceback."""
    text, quote, pickled = pickle.loads(packed)
    try:
        return _unpickled(pickled), text
    except Exception:  # its class may be one that only the worker could import
        return WorkerError(quote), text


def with_origin(error: BaseException, text: str, where: str) -> BaseException:
    """The exception as the master raises it: where it happened, and why, attached."""
    error.__cause__ = WorkerTraceback(f"{text.rstrip()}\n\nThis happened in {where}.")
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"This happened in {where}.")
    return error


def _pickled(error: BaseException) -> bytes:
    """The exception in a form that unpickles; empty if there is none."""
    for parts in (error, (type(error), error.args, vars(error))):
        try:
            pickled: bytes = cloudpickle.dumps(parts)
            copy = _unpickled(pickled)
        except Exception:
            continue
        if parts is not error or _text_of(copy) == _text_of(error):
            return pickled
    return b""


def _unpickled(pickled: bytes) -> BaseException:
    parts = pickle.loads(pickled)
    return parts if isinstance(parts, BaseException) else _rebuild(*parts)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be had: {type(failure).__name__})"


def _rebuild(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
