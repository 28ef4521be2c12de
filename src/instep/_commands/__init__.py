"""The commands of `instep`: one module each, named here.

A command's docstring is its help, `add_arguments` says what it takes and `run` does
it. To list them all, each is imported; so a module loads what it needs in `run`.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

COMMANDS = ("demo", "run", "train", "check", "tune", "compare", "simulate")


class Command(Protocol):
    """What the module of a command has."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's own arguments."""

    def run(self, options: argparse.Namespace) -> int:
        """Does the command; its exit code."""


def load(name: str) -> Command:
    """The module of a command."""
    return cast(Command, importlib.import_module(f"instep._commands.{name}"))
