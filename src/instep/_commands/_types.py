"""What an argument of a command may be; argparse says which one was wrong."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path


def count(text: str) -> int:
    """A whole number, at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected a whole number, at least 1"
        )
    return number


def seconds(text: str) -> float:
    """A number above 0."""
    return _above_0(text, "seconds, above 0")


def positive(text: str) -> float:
    """A number above 0."""
    return _above_0(text, "a number above 0")


def number(text: str) -> float:
    """Any number but infinite ones."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number")
    return found


def new_folder(text: str) -> Path:
    """A folder that is there or can be made; said before hours of work, not after."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a file; expected a folder's name")
    parent = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{parent} cannot be written to")
    return path


def new_file(text: str) -> Path:
    """A path where a file can be written; said before hours of work, not after."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {path.parent} does not exist")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; expected a file name")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written here")
    return path


def _above_0(text: str, expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected {expected}")
    return number
