"""Modes and distributions as words of a command: `stale_synchronous(bound=2)`.

A word is a name, perhaps with arguments as in Python: numbers, text, None, True, False,
`inf`, and corrections. Nothing in it is executed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import re
from typing import TYPE_CHECKING, Any, TypeVar

from instep._errors import ArgumentError

if TYPE_CHECKING:
    from instep._times import Compute
    from instep._training.choice import Choice

Found = TypeVar("Found")
_CALL = re.compile(r"\s*([A-Za-z][\w-]*)\s*(\(.*\))?\s*", re.DOTALL)


def mode(text: str) -> Choice:
    """A mode; `synchronous`, `asynchronous(max_staleness=4)`, `local(steps=8)`."""
    from instep import modes
    from instep._training.choice import Choice

    names = ("Synchronous", "Asynchronous", "StaleSynchronous", "Local")
    kinds = {name: getattr(modes, name) for name in names}
    kind, arguments = _read(text, kinds, "mode")
    known = {"optimizer": 1.0} if kind is modes.Local else {}
    _made(text, kind, {**known, **arguments})  # now, not after the workers' start
    return Choice(text.strip(), kind, arguments)


def modes(text: str) -> list[Choice]:
    """Modes with commas between them."""
    found = [mode(word) for word in _split(text)]
    names = [choice.text for choice in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise argparse.ArgumentTypeError(f"{text!r} names {twice.pop()!r} twice")
    return found


def compute(text: str) -> Compute:
    """Seconds of a shard: a number, or `gamma(1.0, shape=100)` and the like."""
    try:
        number = float(text)
    except ValueError:
        from instep import _times

        names = ("Constant", "Gamma", "HeavyTail")
        kinds = {name: getattr(_times, name) for name in names}
        kind, arguments = _read(text, kinds, "distribution")
        found: Compute = _made(text, kind, arguments)
        return found
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected seconds, at least 0")
    return number


def counts(text: str) -> list[int]:
    """Whole numbers of at least 1 with commas between them; each once, in order."""
    from instep._commands._types import count

    return sorted(set(map(count, text.split(","))))


def _read(
    text: str, kinds: dict[str, type[Found]], what: str
) -> tuple[type[Found], dict[str, Any]]:
    """What the name stands for, and its arguments by name."""
    match = _CALL.fullmatch(text)
    known = {_plain(name): kind for name, kind in kinds.items()}
    if not match or _plain(match[1]) not in known:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no {what}; expected one of {', '.join(map(_spelled, kinds))}"
        )
    kind = known[_plain(match[1])]
    try:
        call = ast.parse(f"f{match[2] or '()'}", mode="eval").body
        assert isinstance(call, ast.Call)
        positional = [_value(argument) for argument in call.args]
        keywords = {str(word.arg): _value(word.value) for word in call.keywords}
        bound = inspect.signature(kind).bind_partial(*positional, **keywords)
    except (SyntaxError, ValueError, TypeError, AssertionError) as error:
        names = ", ".join(inspect.signature(kind).parameters) or "no arguments"
        reason = f" ({error})" if isinstance(error, TypeError) else ""
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be read{reason}; expected arguments as in Python, of: "
            f"{names}"
        ) from error
    return kind, dict(bound.arguments)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id == "inf":
        return math.inf
    if isinstance(node, ast.Name | ast.Call):
        from instep.modes import corrections

        names = ("StalenessAware", "DelayCompensated")
        kinds = {name: getattr(corrections, name) for name in names}
        text = ast.unparse(node)
        kind, arguments = _read(text, kinds, "correction")
        return _made(text, kind, arguments)
    return ast.literal_eval(node)


def _made(text: str, kind: type[Found], arguments: dict[str, Any]) -> Found:
    try:
        return kind(**arguments)
    except (ArgumentError, TypeError) as error:
        # Of a class, Python names the method that misses an argument.
        reason = re.sub(r"^\w+\.__init__\(\)", "it is", str(error))
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}") from error


def _split(text: str) -> list[str]:
    """At the commas outside of parentheses."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _spelled(name: str) -> str:
    """StaleSynchronous -> stale_synchronous."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
