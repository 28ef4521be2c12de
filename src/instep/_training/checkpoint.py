"""Checkpoints: a training's state in one file, which is never half a one."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from instep._errors import ArgumentError, InstepError

_MAGIC = b"instep checkpoint 1\n"


def save(state: dict[str, Any], path: Path) -> None:
    """Writes the file as a whole, also if the process or the machine ends meanwhile.

    Raises:
        InstepError: it cannot be written.
    """
    content = _MAGIC + pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else the name may be on the disk before the bytes
        os.replace(new, path)
    except OSError as error:
        raise InstepError(f"cannot write {path}: {error.strerror}") from error


def load(path: Path) -> dict[str, Any]:
    """The state in a file. It is unpickled, so it has to be a file of one's own.

    Raises:
        ArgumentError: there is no such file, or it is none that `save` wrote.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArgumentError(
            f"{path} cannot be read ({error.strerror}); expected a checkpoint, as "
            "instep train --checkpoint writes it"
        ) from error
    if not content.startswith(_MAGIC):
        raise ArgumentError(
            f"{path} is no checkpoint; expected a file that instep train --checkpoint "
            "has written"
        )
    state: dict[str, Any] = pickle.loads(content[len(_MAGIC) :])
    return state
