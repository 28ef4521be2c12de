"""`instep compare`: what it measures, what it says, and the page, in a browser."""

from __future__ import annotations

import copy
import io
import json
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from chromium import Chromium
from helpers import run_python
from instep._commands import _calls
from instep._commands._job_file import NAME, load_job
from instep._commands.compare import _print
from instep._compare import tables
from instep._compare.measure import Budget, Course, Point, fastest, measure
from instep._compare.pictures import DARK, LIGHT, PICTURES, svg
from instep._compare.report import make_report, reach
from instep._compare.settings import alone, together
from instep._compare.verdict import best, verdict
from instep._training.choice import SYNCHRONOUS
from instep._training.learner import make_learner, state_of
from instep._training.loop import PARTS
from instep._training.training import Training
from jobs import PARABOLA

MODES = "synchronous,asynchronous,local(steps=4)"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A folder with a job file, and what the command printed there."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "a <b> & c.py").write_text(PARABOLA)
    words = (
        "--modes",
        MODES,
        "--workers",
        "2,1",
        "--output",
        "out/page",
        "--json",
        "--repeats",
        "1",
    )
    words = ("compare", "a <b> & c.py", *words)
    return folder, run_python("-m", "instep", *words, cwd=folder)


@pytest.fixture(scope="module")
def report(compared):
    """The JSON of that comparison."""
    return json.loads((compared[0] / "out" / "page" / "comparison.json").read_text())


# What is measured


def test_it_writes_a_page_its_figures_and_the_pictures(compared):
    folder, result = compared
    assert (result.returncode, result.stderr) == (0, "")
    files = {path.name for path in (folder / "out" / "page").iterdir()}
    pictures = {f"{name}.png" for name in PICTURES}
    assert files == {"comparison.html", "comparison.json"} | pictures
    for name in pictures:
        assert (folder / "out" / "page" / name).read_bytes().startswith(b"\x89PNG")


def test_json_comes_alone_and_is_that_of_the_file(compared, report):
    assert json.loads(compared[1].stdout) == report


@pytest.mark.parametrize(("columns", "has_all"), [(50, False), (120, True)])
def test_a_terminal_shows_the_table_and_what_follows(report, columns, has_all):
    console = Console(file=io.StringIO(), width=columns)
    _print(report, Path("out"), console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= columns
    words = " ".join(text.split())
    for sentence in report["verdict"]:
        assert sentence in words
    assert "The page is out/comparison.html." in words
    assert ("staleness" in text.split("──")[0]) == has_all


def test_all_settings_had_the_same_start_and_budget(report):
    names = [run["name"] for run in report["runs"]]
    assert names == [
        "one process",
        "synchronous, 1 worker",
        "synchronous, 2 workers",
        "asynchronous, 1 worker",
        "asynchronous, 2 workers",
        "local(steps=4), 1 worker",
        "local(steps=4), 2 workers",
    ]
    for run in report["runs"]:
        assert (run["batches"], run["examples"]) == (40, 1150)
        assert run["updates"] == (10 if run["mode"].startswith("local") else 40)
        first, last = run["curve"][0], run["curve"][-1]
        assert (first["updates"], first["seconds"]) == (0, 0.0)
        assert (last["updates"], last["examples"]) == (run["updates"], 1150)
        assert last["seconds"] == run["seconds"]
    starts = [run["curve"][0]["loss"] for run in report["runs"]]
    assert starts == pytest.approx([starts[0]] * 7, rel=1e-12)  # shards round


def test_the_figures_of_a_run_agree_with_each_other(report):
    for run in report["runs"]:
        assert sum(run["staleness"].values()) == run["updates"] == len(run["losses"])
        assert len(run["idle"]) == run["workers"]
        assert all(0 <= share <= 1 for share in run["idle"])
        assert list(run["seconds_per_update"]) == list(PARTS)
        parts = sum(run["seconds_per_update"].values())
        assert parts * run["updates"] == pytest.approx(run["seconds"])
        stale = run["mode"] == "asynchronous" and run["workers"] > 1
        assert bool(run["mean_staleness"]) == stale


@pytest.fixture
def parabola(compared, monkeypatch):
    """The job of the job file."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    job = load_job(compared[0] / "a <b> & c.py")
    monkeypatch.delitem(sys.modules, NAME)
    return job


def test_synchronous_runs_have_the_losses_of_a_training_with_the_same_seed(
    parabola, report
):
    with Training(parabola, SYNCHRONOUS, {"engine": "serial", "shards": 2}) as training:
        expected = [step.loss for step in training.steps(40)]
    found = [run for run in report["runs"] if run["mode"] == "synchronous"]
    assert [run["losses"] for run in found] == [expected, expected]
    assert len({run["losses_sha256"] for run in found}) == 1
    text = "The synchronous runs with 1 and 2 workers have the same losses to the last"
    assert any(sentence.startswith(text) for sentence in report["verdict"])


def test_a_budget_is_used_up_by_steps_or_seconds():
    assert Budget(10).used(4, 1e9) == 0.4
    assert Budget(10, seconds=2.0).used(4, 1.0) == 0.5
    assert Budget(10, seconds=2.0).used(11, 3.0) == 1.0


def test_time_may_end_a_run(parabola):
    learner = make_learner(parabola)
    budget = Budget(10**6, seconds=0.05)
    course = Course(parabola, learner, state_of(learner), parabola.data, budget)
    shown = []
    run = measure(course, alone(1), shown.append)
    assert 0.05 <= run.seconds < 1
    assert 0 < run.batches == len(run.losses) < 10**6
    assert shown[-1] == 1.0
    assert len(run.points) >= 3
    slower = replace(run, seconds=2 * run.seconds)
    run = fastest([slower, run])
    assert (
        run.tries[0] == 2 * run.tries[1] == pytest.approx(2 * run.seconds / run.batches)
    )
    report = make_report([run], budget, {}, 0.0)
    assert report["repeats"] == 2
    assert report["runs"][0]["to_target"] is None
    assert verdict(report) == [
        "No run has reached the loss 0 within the budget.",
        "Ended by the limit of 0.05 s, before 1000000 steps: one process.",
    ]


def test_the_settings_have_as_many_shards_as_the_most_workers():
    found = together(_calls.modes("synchronous,local(2)"), [1, 4], {"threads": 2})
    assert [setting.name for setting in found] == [
        "synchronous, 1 worker",
        "synchronous, 4 workers",
        "local(2), 1 worker",
        "local(2), 4 workers",
    ]
    assert {s.options["shards"] for s in found} == {4}
    assert {s.options["threads"] for s in found} == {2}
    assert (alone(2).name, alone(2).options["shards"]) == ("one process", 1)


def test_the_target_is_met_between_two_points():
    curve = [
        Point(0, 0.0, 0.0, 3.0),
        Point(4, 40.0, 2.0, 1.0),
        Point(8, 80.0, 4.0, 2.0),
    ]
    assert reach(curve, 1.5) == Point(3, 30.0, 1.5, 1.5)
    assert reach(curve, 3.0) == Point(0, 0.0, 0.0, 3.0)
    assert reach(curve, 0.5) is None
    assert reach([Point(0, 0.0, 0.0, float("inf")), curve[1]], 1.5) == curve[1]
    assert reach(curve, float("nan")) is None


# Words that follow from figures


def run_with(name, seconds, *, examples=100.0, rate=50.0, stale=0.0, **changes):
    mode, _, number = name.partition(", ")
    reached = {"updates": 1, "examples": examples, "seconds": seconds}
    return {
        "name": name,
        "mode": mode,
        "workers": int(number.split()[0]) if number else 1,
        "is_one_process": not number,
        "is_synchronous": mode in ("synchronous", "one process"),
        "to_target": reached if seconds else None,
        "examples_per_second": rate,
        "mean_staleness": stale,
        "lowest_loss": 0.7,
        "idle": [0.25, 0.15],
        "updates": 2,
        "losses": [2.0, 1.0],
        "batches": 9,
        **changes,
    }


def words_of(*runs, **changes):
    report = {
        "target": 0.5,
        "target_is_given": True,
        "budget": {"steps": 9, "seconds": 4.0},
        "runs": list(runs),
        **changes,
    }
    return verdict(report)


ALONE = run_with("one process", 2.0)
SYNC = run_with("synchronous, 2 workers", 1.0)


def test_the_fastest_is_named_beside_one_process():
    assert words_of(ALONE, SYNC) == [
        "synchronous, 2 workers: the fastest to the loss 0.5, after 1 s: 2.00 times as "
        "fast as one process.",
        "synchronous, 2 workers: workers are idle 20% of the time.",
    ]
    assert words_of(run_with("one process", None), SYNC)[0] == (
        "synchronous, 2 workers: the fastest to the loss 0.5, after 1 s; one process "
        "has not reached it."
    )


@pytest.mark.parametrize(
    ("seconds", "wins"), [(0.9, True), (1.03, True), (1.04, False)]
)
def test_one_process_wins_within_three_percent(seconds, wins):
    alone = run_with("one process", seconds)
    assert best({"runs": [alone, SYNC]}) is (alone if wins else SYNC)
    assert ("several processes do not pay" in words_of(alone, SYNC)[0]) == wins


def test_staleness_has_its_price():
    stale = run_with("async, 2 workers", 0.8, examples=150.0, rate=93.75, stale=1.5)
    assert words_of(ALONE, SYNC, stale)[1] == (
        "async, 2 workers: gradients are 1.50 updates stale on average; it needs 1.50 "
        "times the examples of synchronous, 2 workers to the target and computes 1.88 "
        "times as many per second, so it is 1.25 times as fast."
    )
    never = run_with("async, 2 workers", None, stale=1.5)
    assert words_of(ALONE, SYNC, never)[1] == (
        "async, 2 workers: gradients are 1.50 updates stale on average; the target is "
        "never reached (lowest loss 0.7)."
    )


def test_equal_and_different_losses_and_limits_are_said():
    other = run_with("synchronous, 4 workers", 1.0)
    assert words_of(ALONE, SYNC, other)[-1].endswith("same losses to the last bit.")
    other = {**other, "losses": [2.0, 1.5], "batches": 8}
    *_, bits, limits = words_of(ALONE, SYNC, other)
    assert bits == "The synchronous runs with 2 and 4 workers have different losses."
    assert limits == (
        "Ended by the limit of 4 s, before 9 steps: synchronous, 4 workers."
    )


def test_nobody_may_win():
    never = run_with("one process", None)
    assert words_of(never)[0] == "No run has reached the loss 0.5 within the budget."
    assert "No run has lowered the loss" in words_of(never, target=None)[0]


# The page


class Texts(HTMLParser):
    """What is written in a page's tables and paragraphs."""

    def __init__(self, html):
        super().__init__()
        self.cells, self.addresses, self._tag = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self._tag = tag
        names = ("src", "srcset", "href")
        self.addresses += [value for name, value in attrs if name in names]

    def handle_endtag(self, tag):
        self._tag = ""

    def handle_data(self, data):
        if self._tag == "td":
            self.cells.append(data)


@pytest.fixture(scope="module")
def html(compared):
    return (compared[0] / "out" / "page" / "comparison.html").read_text()


def test_the_page_is_one_file_with_a_table_behind_every_picture(html):
    assert html.count("<figure>") == html.count("<details>") == len(PICTURES) == 6
    assert all(a.startswith("data:") for a in Texts(html).addresses)
    assert "http://" not in html
    assert "<script" not in html
    assert "Comparison: a &lt;b&gt; &amp; c.py" in html


def test_every_number_in_the_tables_is_in_the_json(html, report):
    written = [
        cell
        for table in (tables.summary, *tables.TABLES.values())
        for line in table(report)[1:]
        for cell in line
    ]
    assert sorted(Texts(html).cells) == sorted(written)


def test_pictures_follow_from_the_report_alone(report):
    draw = PICTURES["loss_by_time"][1]
    assert svg(draw, report, LIGHT) == svg(draw, report, LIGHT)
    assert svg(draw, report, LIGHT) != svg(draw, report, DARK)


def test_runs_that_diverge_are_drawn(report):
    broken = copy.deepcopy(report)
    for run, loss in zip(broken["runs"][1:], (None, 1e200), strict=False):
        run["loss"] = run["curve"][-1]["loss"] = loss
    broken["target"] = None
    for name in ("loss_by_time", "staleness"):
        assert svg(PICTURES[name][1], broken, LIGHT)
    assert tables.summary(broken)[2][2] == "-"


def test_a_browser_shows_it_on_phone_and_desktop_by_day_and_by_night(compared):
    page = compared[0] / "out" / "page" / "comparison.html"
    with Chromium() as browser:
        for width, scheme in [(390, "dark"), (390, "light"), (1200, "dark")]:
            browser.open(page, width, scheme)
            browser.evaluate(
                "for (const d of document.querySelectorAll('details')) d.open = true"
            )
            assert browser.evaluate("document.documentElement.scrollWidth") == width
            assert browser.evaluate(OUTSIDE) == []
            assert browser.evaluate(BROKEN) == 0
            assert browser.requests() == [page.as_uri()]
            assert browser.complaints() == []
            light = browser.evaluate(PAPER)
            assert light == ("rgb(255, 255, 255)" if scheme == "light" else DARK_PAPER)
            source = browser.evaluate("document.images[0].currentSrc")
            assert source.startswith("data:image/svg+xml;base64,")
            assert source in page.read_text()
            columns = len(browser.evaluate(COLUMNS).split())
            assert columns == (1 if width == 390 else 2)


DARK_PAPER = "rgb(22, 27, 34)"
PAPER = "getComputedStyle(document.documentElement).backgroundColor"
COLUMNS = "getComputedStyle(document.querySelector('.pictures')).gridTemplateColumns"
BROKEN = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
# Elements that reach beyond the screen, but for those in boxes that scroll.
OUTSIDE = """
[...document.body.querySelectorAll('*')].filter(e =>
  !e.closest('.scroll table') && e.getBoundingClientRect().right > innerWidth + 1
).map(e => e.outerHTML.slice(0, 80))
"""


# What goes wrong


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["job.py", "--workers", "1,x"], "'x'; expected a whole number, at least 1"),
        (["job.py", "--target", "low"], "'low'; expected a number"),
        (
            ["job.py", "--output", "job.py"],
            "job.py is a file; expected a folder's name",
        ),
    ],
)
def test_wrong_words_are_exit_code_2(tmp_path, words, problem):
    (tmp_path / "job.py").write_text(PARABOLA)
    result = run_python("-m", "instep", "compare", *words, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert problem in " ".join(result.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


def test_without_matplotlib_it_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['matplotlib'] = None; import runpy; runpy."
    code += "run_module('instep', run_name='__main__')"
    result = run_python("-c", code, "compare", "job.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert "pip install 'instep[report]'" in result.stderr
