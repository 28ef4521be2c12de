"""docs/train.md and docs/compare.md: their commands exist, their job file is a job."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from instep.__main__ import make_parser

ROOT = Path(__file__).parent.parent
TRAIN, COMPARE = ((ROOT / "docs" / f"{n}.md").read_text() for n in ("train", "compare"))


@pytest.fixture(autouse=True)
def _in_a_fresh_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [TRAIN, COMPARE], ids=["train", "compare"])
def test_every_command_is_understood(page):
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).splitlines()
    assert len(lines) >= 2
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "instep"
        make_parser().parse_args(words)


@pytest.mark.parametrize(
    ("page", "command"),
    [(TRAIN, "train"), (COMPARE, "compare")],
    ids=["train", "compare"],
)
def test_every_option_is_on_the_page(page, command):
    (commands,) = (a for a in make_parser()._actions if a.choices)
    names = {
        name for a in commands.choices[command]._actions for name in a.option_strings
    }
    for name in names - {"-h", "--help"}:
        assert f"`{name}" in page, name


def test_the_job_file_on_the_page_is_the_example():
    (block,) = re.findall(r"^```python\n(.*?)^```$", TRAIN, re.DOTALL | re.MULTILINE)
    assert block == (ROOT / "examples" / "parabola_job.py").read_text()
