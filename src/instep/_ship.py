"""Pickles what travels to the workers, and names what cannot."""

from __future__ import annotations

import functools
import inspect
import io
import itertools
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, ModuleType
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
        Pickler(file).dump(program)
        return file.getvalue()
    except Exception as error:
        culprits = _unshippable("", getattr(program, "fun", program), set())
        what = ", ".join(itertools.islice(culprits, 3)) or "something it refers to"
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


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's, but code keeps the name of its file."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )


def _unshippable(name: str, value: Any, seen: set[int]) -> Iterator[str]:
    """What in the value does not pickle: 'the variable `lock`, a _thread.lock'.

    Followed as deep as names lead: `model.encoder.lock`.
    """
    seen.add(id(value))
    found = False
    for key, part in _named_parts(value).items():
        if id(part) not in seen and not _ships(part):
            found = True
            yield from _unshippable(_joined(name, key, part), part, seen)
    if name and not found:
        yield f"`{name}`, a {type(value).__module__}.{type(value).__qualname__}"


def _named_parts(value: Any) -> dict[str, Any]:
    """What a function, a partial or another object refers to."""
    if isinstance(value, functools.partial):
        named = {f"argument {k}": part for k, part in enumerate(value.args)}
        return {**_named_parts(value.func), **named, **value.keywords}
    if inspect.isfunction(value):
        variables = inspect.getclosurevars(value)
        return {**variables.globals, **variables.nonlocals}
    if isinstance(value, dict):
        return {str(key): part for key, part in value.items()}
    if isinstance(value, type | ModuleType):
        return {}
    return dict(getattr(value, "__dict__", {}))


def _joined(name: str, key: str, part: Any) -> str:
    """`model.layer`: the dict `model._modules` in between says nothing."""
    is_hidden = isinstance(part, dict) and key.startswith("_")
    return ".".join(filter(None, [name, "" if is_hidden else key]))


def _ships(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
