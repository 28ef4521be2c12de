"""Engines start workers and move bytes: serial, processes, mpi and ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

from instep._errors import EngineUnavailableError
from instep.engines._base import Engine

_MODULES = {
    "serial": ("instep.engines.serial", "Serial"),
    "processes": ("instep.engines.processes", "Processes"),
    "mpi": ("instep.engines.mpi", "Mpi"),
    "ray": ("instep.engines.ray", "Ray"),
}


if TYPE_CHECKING:
    from instep.engines.ray import Ray as Ray


def __getattr__(name: str) -> Any:
    if name == "Ray":  # the one with arguments of its own
        return importlib.import_module("instep.engines.ray").Ray
    raise AttributeError(f"module 'instep.engines' has no attribute {name!r}")


def make_engine(engine: str | Engine) -> Engine:
    """The engine of this name; an engine object is returned as it is.

    Raises:
        EngineUnavailableError: no engine has this name, or it cannot run here.
    """
    if not isinstance(engine, str) and hasattr(engine, "submit"):
        return engine
    if engine not in _MODULES:
        raise EngineUnavailableError(
            f"engine={engine!r}; known engines: {', '.join(map(repr, _MODULES))}"
        )
    module, name = _MODULES[engine]
    return cast(Engine, getattr(importlib.import_module(module), name)())
