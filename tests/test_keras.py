"""Keras with a pool, on each of its backends.

A process has one backend, chosen before Keras is imported, hence a run of pytest each.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import OPTIONAL
from helpers import import_first, leave_out

pytest.importorskip("keras")

HERE = Path(__file__).parent


@pytest.mark.guard(900)
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_the_facts_hold_on(backend, tmp_path):
    pytest.importorskip(backend)
    left_out = leave_out(tmp_path, *({*OPTIONAL} - {backend}))
    options = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, HERE / "keras_facts.py"],
        cwd=HERE.parent,
        env={
            **import_first(left_out),
            "KERAS_BACKEND": backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(result.stdout)  # pytest shows it where this fails
    assert result.returncode == 0
    assert " passed" in result.stdout
