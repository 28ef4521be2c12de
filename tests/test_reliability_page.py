"""What docs/reliability.md says is shown by tests that exist, and its code runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import write_script

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text()


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE)
    assert len(named) > 30
    for file, name in named:
        module = ast.parse((TESTS / file).read_text())
        functions = {n.name for n in module.body if isinstance(n, ast.FunctionDef)}
        assert name in functions, f"{file} has no {name}"


def test_every_row_of_the_table_of_faults_names_a_test():
    table = PAGE.split("| fault | what happens | test |\n|---|---|---|\n")[1]
    rows = table.split("\n\n")[0].splitlines()
    assert len(rows) > 20
    for row in rows:
        assert re.search(r"\| `test_\w+\.py::\w+`[^|]*\|$", row), row


@pytest.mark.guard(120)
def test_the_code_of_the_page_runs(tmp_path):
    pytest.importorskip("torch")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script = write_script(tmp_path, "\n".join(blocks))
    result = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (result.returncode, result.stderr) == (0, "")
