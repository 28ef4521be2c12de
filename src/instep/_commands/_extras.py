"""Libraries that only some commands need: the extras of the package."""

from __future__ import annotations

import importlib
from types import ModuleType

from instep._errors import MissingFrameworkError


def require(module: str, extra: str, command: str) -> ModuleType:
    """Imports a module, or says how to install it.

    Raises:
        MissingFrameworkError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # it is there, but broken: its own message says more
        raise MissingFrameworkError(
            f"instep {command} needs {module}, which is not installed here; "
            f"install it with: pip install 'instep[{extra}]'"
        ) from error
