"""Loads a job file: a Python file whose function `job()` returns an `instep.Job`."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from instep._errors import ArgumentError

# Not the file's own name: a file called torch.py must not hide the real one.
NAME = "instep_job"


def load_job(path: Path) -> Any:
    """The `instep.Job` that a job file describes.

    Its folder is put on the import path, so that modules beside it are found.

    Raises:
        ArgumentError: there is no such file, it or its `job()` fails, or `job()` is
            missing or returns something else; names file and line.
    """
    import instep

    module = _load(path)
    function = getattr(module, "job", None)
    if not callable(function):
        found = "no function" if function is None else f"a {type(function).__name__}"
        raise ArgumentError(
            f"{path} has {found} job(); expected `def job():` that returns an "
            "instep.Job"
        )
    job = _guarded(path, function)
    if not isinstance(job, instep.Job):
        raise ArgumentError(
            f"{path}, line {_first_line(function)}: job() returned a "
            f"{type(job).__name__}; expected an instep.Job"
        )
    return job


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise ArgumentError(f"{path} is no file; expected a Python file with a job()")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(NAME, path.resolve())
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{path} is no Python file; expected a name that ends .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    _guarded(path, lambda: _execute(spec.loader, module))
    return module


def _execute(loader: Any, module: ModuleType) -> None:
    import cloudpickle

    loader.exec_module(module)
    # The workers cannot import it; they get what they need of it by value.
    cloudpickle.register_pickle_by_value(module)


def _guarded(path: Path, call: Callable[[], Any]) -> Any:
    """What the call returns; its errors say where in the file they come from."""
    try:
        return call()
    except Exception as error:
        raise ArgumentError(
            f"{path}, line {_line(path, error)}: {_told(error)}"
        ) from error


def _line(path: Path, error: BaseException) -> int | str:
    """The last line of the file that the error came by."""
    if isinstance(error, SyntaxError) and error.filename == str(path.resolve()):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == str(path.resolve())]
    return next((line for line in reversed(lines) if line is not None), "?")


def _told(error: Exception) -> str:
    if isinstance(error, ArgumentError):
        return str(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}"


def _first_line(function: Any) -> int | str:
    code = getattr(function, "__code__", None)
    return "?" if code is None else int(code.co_firstlineno)
