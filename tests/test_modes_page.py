"""The examples of modes and of L-BFGS, and the code of docs/modes.md, run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from helpers import import_first, leave_out, write_script
from test_examples import EXAMPLES, run_example

PAGE = (EXAMPLES.parent / "docs" / "modes.md").read_text()


def by_mode(output, columns):
    """The numbers in each line of a table, by the mode that it begins with."""
    form = r"\s+".join([r"(.+?)", *[r"([\d.,]+)%?"] * columns]) + "$"
    rows = [re.match(form, line) for line in output.splitlines()]
    return {
        row[1].strip(): [float(number.replace(",", "")) for number in row.groups()[1:]]
        for row in rows
        if row
    }


@pytest.mark.guard(120)
def test_the_parabola_is_fitted_in_every_mode():
    rows = by_mode(run_example("modes_parabola.py"), columns=4)
    assert len(rows) == 10
    assert {name for name, row in rows.items() if row[3]} == {"Synchronous(backup=1)"}
    for name, (updates, loss, staleness, _) in rows.items():
        assert loss < 0.15, name  # 0.24 is what the untrained network has
        assert (staleness == 0) == name.startswith(("Synchronous", "Local")), name
        if "Stale" not in name:
            assert updates == (80 if name.startswith("Local") else 320), name
    assert rows["Asynchronous(max_staleness=1)"][2] <= 1


@pytest.mark.guard(120)
def test_digits_are_learned_in_the_main_modes():
    rows = by_mode(run_example("modes_digits.py"), columns=4)
    assert len(rows) == 6
    for name, (accuracy, updates, staleness, _) in rows.items():
        assert accuracy >= 90, name  # some runs differ each time; all were above 94
        assert updates >= 132, name
        assert (staleness == 0) == name.startswith(("Synchronous", "Local")), name


@pytest.mark.guard(120)
@pytest.mark.parametrize("name", ["lbfgs_torch.py", "lbfgs_scipy.py"])
def test_lbfgs_has_the_same_iterates_with_any_number_of_workers(name):
    output = run_example(name)
    pairs = re.findall(r"^ +\d+ +(\S+) +(\S+)$", output, re.MULTILINE)
    assert len(pairs) >= 12
    assert all(alone == together for alone, together in pairs)
    assert float(pairs[-1][0]) < 0.2 < 1.8 < float(pairs[0][0])
    assert "the same bits: True" in output


@pytest.mark.guard(120)
def test_the_page_on_modes_runs_from_top_to_bottom(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 8
    (left_out := tmp_path / "left out").mkdir()
    result = subprocess.run(
        [sys.executable, write_script(tmp_path, "\n".join(blocks))],
        cwd=tmp_path,
        env=import_first(leave_out(left_out, "matplotlib", "sklearn")),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    assert "Replay: the same bits on 1, 2 and 4 workers" in result.stdout
    # The simulated table depends on no clock, so the page shows it as it is printed.
    table = result.stdout[result.stdout.index("mode ") :]
    assert table.replace("\n", "\n    ").strip() in PAGE
