"""The examples run as they are and do what they say."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import import_first, leave_out

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name, left_out=""):
    """What an example prints.

    Args:
        name: of its file.
        left_out: a folder that makes packages seem missing which it does not need.
    """
    result = subprocess.run(
        [sys.executable, EXAMPLES / name],
        env=import_first(left_out) if left_out else None,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_parallel_script_is_the_plain_one_and_three_lines():
    plain, parallel = (
        (EXAMPLES / name).read_text().splitlines()
        for name in ("parabola_graph.py", "parabola_graph_parallel.py")
    )
    changes = [line for line in difflib.ndiff(plain, parallel) if line[0] in "+-"]
    assert sorted(line for line in changes if line.strip("+- ")) == [
        "+ grads_and_vars = pool.compute_gradients(optimizer)",
        "+ import instep.tensorflow.v1",
        "+ pool = instep.tensorflow.v1.GradientPool(loss, batch=[xs, ys], workers=4)",
        "- grads_and_vars = optimizer.compute_gradients(loss)",
    ]


@pytest.mark.guard(120)
def test_the_parallel_script_follows_the_plain_one(only_tensorflow):
    plain, parallel = (
        [tuple(map(float, line.split())) for line in output.splitlines()]
        for output in (
            run_example(name, only_tensorflow)
            for name in ("parabola_graph.py", "parabola_graph_parallel.py")
        )
    )
    assert [step for step, _ in plain] == list(range(200, 2001, 200))
    assert plain[-1][1] < 0.02
    # Shards round differently, and 2000 steps carry that on.
    assert [loss for _, loss in parallel] == pytest.approx(
        [loss for _, loss in plain], rel=1e-4
    )


@pytest.mark.guard(120)
@pytest.mark.parametrize(
    ("name", "percent"),
    [
        ("digits_tensorflow.py", 97),
        ("digits_torch.py", 98),
        ("digits_jax.py", 97),
        ("digits_keras.py", 97),
    ],
)
def test_digits_are_read_from_scans_never_seen(name, percent, tmp_path):
    unneeded = {"jax", "matplotlib"} - {name[7:-3]}
    output = run_example(name, leave_out(tmp_path, *unneeded))
    assert float(re.search(r"held-out accuracy (\S+)%", output)[1]) >= percent


@pytest.mark.guard(120)
def test_characters_are_learned():
    output = run_example("characters_torch.py")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert losses[0] < 2.5  # 4.6 is what knowing nothing of 104 characters costs
    assert losses[-1] < 1.6


def test_scipy_finds_the_curve():
    rows = re.findall(r"true +(\S+) +fitted +(\S+)", run_example("curve_fit_scipy.py"))
    assert len(rows) == 4
    # 200,000 rows leave standard errors below 0.01.
    for true, fitted in rows:
        assert float(fitted) == pytest.approx(float(true), abs=0.05)


@pytest.mark.guard(240)
def test_the_page_on_keras_runs_from_top_to_bottom(only_tensorflow):
    page = (EXAMPLES.parent / "docs" / "keras.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 5
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        env={**import_first(only_tensorflow), "KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert result.returncode == 0, result.stderr
    assert "gives the whole batch's loss and gradient" in result.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_no_example_needs_a_main_guard(path):
    assert "__name__" not in path.read_text()
