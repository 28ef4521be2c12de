"""Pickles what travels to the workers, and names what cannot."""

from __future__ import annotations

import functools
import inspect
import io
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

from instep._errors import ShipError


def ship(program: Any) -> bytes:
    """The program, pickled; functions of `__main__` go by value.

    Raises:
        ShipError: names the variable of the loss that cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(program)
        return file.getvalue()
    except Exception as error:
        culprits = list(_unshippable(getattr(program, "fun", program)))
        what = ", ".join(culprits) or "something the loss refers to"
        raise ShipError(
            f"the loss cannot be sent to the workers, because of {what} ({error}). "
            "Create it inside the loss, or pass its arrays as part of the batch."
        ) from error


def ship_values(values: list[Any], names: Callable[[], Iterable[str]]) -> bytes:
    """Values of the batch that are not arrays, pickled; `names` is for the error.

    Raises:
        ShipError: names the field that cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(values))
    except Exception as error:
        pairs = zip(names(), values, strict=True)
        culprits = [name for name, value in pairs if not _ships(value)]
        raise ShipError(
            f"{', '.join(culprits)} cannot be sent to the workers ({error}); expected "
            "arrays, or values that pickle"
        ) from error


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """As cloudpickle does, but the file's name stays: tracebacks need it."""
    build, arguments, *rest = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _build_code, (build, arguments, code.co_filename), *rest


def _build_code(build: Any, arguments: tuple[Any, ...], filename: str) -> CodeType:
    code: CodeType = build(*arguments)
    return code.replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )


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
