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
    quoted = WorkerError(f"{type(error).__name__}: {error}")
    for parts in (error, (type(error), error.args, vars(error)), quoted):
        try:
            packed: bytes = cloudpickle.dumps((parts, text))
            copy, _ = unpack_error(packed)
        except Exception:
            continue
        if parts is not error or str(copy) == str(error):
            return packed
    raise AssertionError("a WorkerError always travels")


def unpack_error(packed: bytes) -> tuple[BaseException, str]:
    """The exception and the text of its traceback."""
    parts, text = pickle.loads(packed)
    return parts if isinstance(parts, BaseException) else _rebuild(*parts), text


def with_origin(error: BaseException, text: str, where: str) -> BaseException:
    """The exception as the master raises it: where it happened, and why, attached."""
    error.__cause__ = WorkerTraceback(f"{text.rstrip()}\n\nThis happened in {where}.")
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"This happened in {where}.")
    return error


def _rebuild(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
