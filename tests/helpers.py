"""What several test files need."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import instep
from instep._tree import flatten

both_engines = pytest.mark.parametrize("engine", ["serial", "processes"])


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every leaf: what "the same bits" compares."""
    arrays = [np.asarray(leaf) for leaf in flatten(tree)[0]]
    return [(a.dtype.name, a.shape, _content(a)) for a in arrays]


def _content(array: Any) -> bytes:
    """The array's bytes, without those that pad the 10 of a longdouble to 16."""
    content = np.frombuffer(array.tobytes(), np.uint8)
    if array.dtype == np.longdouble and array.itemsize == 16:
        content = content.reshape(-1, 16)[:, :10]
    return content.tobytes()


def make(fun: Any, **options: Any) -> Any:
    """A NumPy pool."""
    return instep.numpy.value_and_grad(fun, **options)


def started(pool: Any, *arguments: Any) -> Any:
    """The pool, once all its workers have said that they are ready."""
    workers = pool.statistics().workers
    while len(pool.statistics().pids) < workers:
        pool.evaluate(*arguments)
    return pool


def wrong_kind(pool: Any, *arguments: Any) -> BaseException:
    """The error that this call raises."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        pool(*arguments)
    return caught.value


def write_script(folder: Path, text: str) -> Path:
    """A script file without a main guard."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def leave_out(folder: Path, *names: str) -> str:
    """A folder that, first on the import path, makes these packages seem missing."""
    for name in names:
        text = f"raise ModuleNotFoundError('{name} is left out here', name='{name}')\n"
        (folder / f"{name}.py").write_text(text)
    return str(folder)


def import_first(entry: str) -> dict[str, str]:
    """The environment of a script whose imports are looked for here before all else."""
    others = [path] if (path := os.environ.get("PYTHONPATH")) else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([entry, *others])}


def run_python(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter; its exit code and output, within 50 seconds."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=50,
        **options,
    )
