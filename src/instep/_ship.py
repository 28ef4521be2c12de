"""Pickles what travels to the workers, and names what cannot."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import cloudpickle

from instep._errors import ShipError


def ship(program: Any) -> bytes:
    """The program, pickled; functions of `__main__` go by value.

    Raises:
        ShipError: names the variable of the loss that cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(program))
    except Exception as error:
        culprits = list(_unshippable(getattr(program, "fun", program)))
        what = ", ".join(culprits) or "something the loss refers to"
        raise ShipError(
            f"the loss cannot be sent to the workers, because of {what} ({error}). "
            "Create it inside the loss, or pass its arrays as part of the batch."
        ) from error


def _unshippable(fun: Any) -> Iterator[str]:
    """What the function uses that does not pickle: 'the variable `lock`, a _thread…'"""
    if isinstance(fun, functools.partial):
        yield from _unshippable(fun.func)
        named = {**{f"argument {k}": v for k, v in enumerate(fun.args)}, **fun.keywords}
    elif inspect.isfunction(fun):
        variables = inspect.getclosurevars(fun)
        named = {**variables.globals, **variables.nonlocals}
    else:
        named = getattr(fun, "__dict__", {})
    for name, value in named.items():
        if not _ships(value):
            yield f"`{name}`, a {type(value).__module__}.{type(value).__name__}"


def _ships(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
