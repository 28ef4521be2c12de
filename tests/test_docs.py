"""The code of the documentation runs, its links hold, and the site builds."""

from __future__ import annotations

import ast
import copy
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from helpers import import_first, leave_out

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

# Importing a framework takes seconds, so what needs the same one runs in one process,
# each script in a namespace of its own. A script is a page, or a page from a heading to
# the next heading that is named here, or a notebook, or a job file.
SCRIPTS = {
    "numpy": [
        ("numpy.md", ""),
        ("tutorial.md", "### NumPy and SciPy"),
        ("coming-from.md", "## joblib"),
        ("../README.md", ""),
        ("../examples/notebooks/numpy.ipynb", ""),
    ],
    "torch": [
        ("pytorch.md", ""),
        ("tutorial.md", "### PyTorch"),
        ("coming-from.md", "## PyTorch: DistributedDataParallel"),
        ("coming-from.md", "## Horovod"),
        ("../examples/notebooks/pytorch.ipynb", ""),
        ("../examples/characters_job.py", ""),
    ],
    "jax": [
        ("jax.md", ""),
        ("tutorial.md", "### JAX"),
        ("../examples/notebooks/jax.ipynb", ""),
    ],
    "graphs": [
        ("tutorial.md", ""),
        ("tensorflow-graphs.md", ""),
        (
            "coming-from.md",
            "## TensorFlow 1: parameter servers and SyncReplicasOptimizer",
        ),
    ],
    "tensorflow": [
        ("tensorflow.md", ""),
        ("coming-from.md", "## TensorFlow 2: MultiWorkerMirroredStrategy"),
        ("../examples/notebooks/tensorflow.ipynb", ""),
        ("../examples/notebooks/keras.ipynb", ""),
    ],
}
# Where the first script runs with worker processes, as it is. All others run on the
# engine "serial": each pool of processes would import the framework once more.
WITH_PROCESSES = {"numpy", "torch", "graphs"}
# Pages whose code other tests run.
ELSEWHERE = {
    "keras.md": "test_examples.py",
    "modes.md": "test_modes_page.py",
    "reliability.md": "test_reliability_page.py",
    "trace.md": "test_trace.py",
    "train.md": "test_train_pages.py",
}
# What others do it with is there to compare, and needs launchers and libraries.
BEFORE = 'title="before'

RUNNER = """
import sys
from pathlib import Path
from instep import _options

engine, *paths = sys.argv[1:]
for path in paths:
    _options.defaults, engine = {"engine": engine}, "serial"
    if tensorflow := sys.modules.get("tensorflow"):
        tensorflow.compat.v1.reset_default_graph()
    text = Path(path).read_text()
    exec(compile(text, path, "exec"), {"__name__": "__main__"})
"""

# Another CPU may round differently.
NUMBER = re.compile(r"\d[\d.e-]*")

FENCE = re.compile(r"^```(\w*)(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


def code_of(page, start):
    """(info string, code) of the Python blocks of a script, or of a notebook."""
    text = (DOCS / page).read_text()
    if page.endswith(".py"):
        return [("", text + "\njob()\n")]
    if page.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        return [("", "".join(c["source"])) for c in cells if c["cell_type"] == "code"]
    starts = sorted(
        text.index(f"\n{heading}\n") if heading else 0
        for scripts in SCRIPTS.values()
        for name, heading in scripts
        if name == page
    )
    begin = text.index(f"\n{start}\n") if start else 0
    end = min((other for other in starts if other > begin), default=len(text))
    return [(m[2], m[3]) for m in FENCE.finditer(text, begin, end) if m[1] == "python"]


@pytest.mark.guard(120)
@pytest.mark.parametrize("framework", SCRIPTS)
def test_the_code_of_the_pages_runs(framework, tmp_path):
    (left_out := tmp_path / "left out").mkdir()
    unneeded = {"matplotlib", "sklearn", "jax"} - {framework}
    arguments = ["processes" if framework in WITH_PROCESSES else "serial"]
    for number, (page, start) in enumerate(SCRIPTS[framework]):
        blocks = [code for info, code in code_of(page, start) if BEFORE not in info]
        assert blocks, page
        path = tmp_path / f"{number} {Path(page).stem}.py"
        path.write_text("\n".join(blocks))
        arguments.append(path)
    result = subprocess.run(
        [sys.executable, "-c", RUNNER, *arguments],
        cwd=tmp_path,
        env=import_first(leave_out(left_out, *unneeded)),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_page_with_code_is_run_by_some_test():
    run_here = Counter[str]()
    for scripts in SCRIPTS.values():
        for page, start in scripts:
            run_here[page] += len(code_of(page, start))
    for path in sorted(DOCS.glob("*.md")):
        blocks = [m for m in FENCE.finditer(path.read_text()) if m[1] == "python"]
        if test := ELSEWHERE.get(path.name):
            assert path.name in Path(__file__).with_name(test).read_text(), path.name
        else:
            assert run_here[path.name] == len(blocks), path.name


def test_what_is_not_run_is_python_all_the_same():
    found = 0
    for scripts in SCRIPTS.values():
        for page, start in scripts:
            for info, code in code_of(page, start):
                ast.parse(code)
                found += BEFORE in info
    assert found == 5


def test_the_readme_and_the_tutorial_show_the_line_of_the_example():
    line = "pool = instep.tensorflow.v1.GradientPool(loss, batch=[xs, ys], workers=4)"
    for path in (
        "README.md",
        "docs/tutorial.md",
        "examples/parabola_graph_parallel.py",
    ):
        assert line in (ROOT / path).read_text(), path


# Two of the notebooks run in a kernel; above, all of them run as scripts.


@pytest.mark.guard(120)
@pytest.mark.filterwarnings("default")  # of the kernel's own packages
@pytest.mark.parametrize("name", ["numpy", "pytorch"])
def test_a_notebook_runs_and_prints_what_it_shows(name):
    path = ROOT / "examples" / "notebooks" / f"{name}.ipynb"
    shown = nbformat.read(path, as_version=4)
    run = NotebookClient(copy.deepcopy(shown), timeout=60).execute()
    pairs = zip(outputs_of(shown), outputs_of(run), strict=True)
    for before, after in pairs:
        assert NUMBER.sub("", after) == NUMBER.sub("", before)


def outputs_of(notebook):
    """What the cells printed."""
    return [
        "".join(
            o.get("text", "") for o in c.get("outputs", []) if o.get("name") == "stdout"
        )
        for c in notebook.cells
    ]


# Figures


def test_the_measured_figures_are_those_of_the_files():
    page = (DOCS / "measured.md").read_text()
    lines = {line.replace("**", "") for line in page.splitlines()}
    for name in ("digits", "parabola"):
        for run in runs_of(name):
            assert row_of(run) in lines, name
    for names in (
        [f"digits-stale-{k}" for k in (1, 2, 3)],
        [f"digits-quarter-{k}" for k in (1, 2, 3)],
        ["characters"],
    ):
        for runs in zip(*map(runs_of, names), strict=True):
            assert row_of_all(runs) in lines, names


def runs_of(name):
    """What the command has written."""
    return json.loads((DOCS / "measured" / f"{name}.json").read_text())["runs"]


def row_of(run):
    """A setting in the tables of one comparison."""
    seconds = to_target(run, "seconds", ".2f")
    examples = to_target(run, "examples", ",.0f")
    idle, rate = sum(run["idle"]) / len(run["idle"]), run["examples_per_second"]
    return (
        f"| {run['name']} | {seconds} | {examples} | {rate:,.0f} | {idle:.0%} | "
        f"{run['mean_staleness']:.2f} | {run['loss']:.4f} |"
    )


def row_of_all(runs):
    """A setting in the tables of staleness, with the same of other comparisons."""
    examples = ", ".join(to_target(run, "examples", ",.0f") for run in runs)
    losses = ", ".join(f"{run['loss']:.3f}" for run in runs)
    staleness = ", ".join(f"{run['mean_staleness']:.2f}" for run in runs)
    return f"| {runs[0]['name']} | {staleness} | {examples} | {losses} |"


def to_target(run, what, form):
    """When the run was at the target."""
    reached = run["to_target"]
    return format(reached[what], form) if reached else "not reached"


# The site


@pytest.mark.guard(120)
def test_the_site_builds_without_a_warning(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    api = (tmp_path / "site" / "api.html").read_text()
    for name in ("instep.torch.GradientPool", "instep.Asynchronous", "instep.Update"):
        assert f'id="{name}"' in api, name
    tutorial = (tmp_path / "site" / "tutorial.html").read_text()
    assert 'href="reliability.html' in tutorial
