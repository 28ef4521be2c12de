"""train a job in several modes with several workers, and say which to choose

Takes a job file: a Python file with a function `job()` that returns an `instep.Job`
with model, loss, data, batch size and optimizer. Trains it in one process, then in each
mode with each number of workers, from the same start and for the same budget. Writes a
page to look at (comparison.html, one file, no network needed), the same figures as
comparison.json, and the pictures as PNG.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep._commands import _calls
from instep._commands._extras import require
from instep._commands._pool_options import add_job
from instep._commands._types import count, new_folder, number, seconds
from instep._errors import InstepError

if TYPE_CHECKING:
    from rich.console import Console

    from instep._compare.measure import Budget, Course, Run
    from instep._compare.report import Report
    from instep._compare.settings import Setting
    from instep._job import Job

MODES = "synchronous,asynchronous"
# Seconds of training that all runs share, where no budget is given.
ALL_SECONDS = 90.0
# Rows that the curves' loss is over.
SAMPLE_ROWS = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the job file, what to compare, the budget and where the page goes."""
    add_job(parser)
    parser.add_argument(
        "--modes",
        type=_calls.modes,
        default=MODES,
        metavar="MODE,...",
        help="to compare (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=_calls.counts,
        metavar="N,...",
        help="numbers of workers (default: 1, 2, 4, ... up to the cores)",
    )
    for name, text in (
        ("shards", "parts of every batch (default: as many as the most workers)"),
        ("threads", "threads per worker (default: 1)"),
        ("steps", "batches in each setting (default: the job's)"),
    ):
        parser.add_argument(f"--{name}", type=count, metavar="N", help=text)
    parser.add_argument(
        "--seconds",
        type=seconds,
        metavar="S",
        help="of training in each run at most "
        f"(default: {ALL_SECONDS:g} s, shared by all runs)",
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=2,
        metavar="N",
        help="runs of each setting, in turns; the fastest counts (default: 2)",
    )
    parser.add_argument(
        "--target",
        type=number,
        metavar="LOSS",
        help="the loss to reach (default: 95%% of what one process gains)",
    )
    parser.add_argument(
        "--output",
        type=new_folder,
        default=Path("comparison"),
        metavar="DIR",
        help="where page, JSON and pictures go (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the JSON alone")


def run(options: argparse.Namespace) -> int:
    """Trains in every setting, writes the page and says what follows."""
    from instep._commands._output import stdout_to_stderr

    for library in ("rich", "matplotlib"):
        require(library, "report", "compare")
    from rich.console import Console

    if options.json:
        with stdout_to_stderr():
            report = _compared(options, Console(stderr=True, quiet=True))
        print(_as_json(report))
    else:
        console = Console()
        report = _compared(options, console)
        _print(report, options.output, console)
    return 0


def _compared(options: argparse.Namespace, console: Console) -> Report:
    """Measures, and writes page, JSON and pictures."""
    from instep._commands._job_file import load_job
    from instep._commands._progress import shown_progress
    from instep._compare.report import make_report
    from instep._compare.verdict import best, verdict
    from instep._quiet import held_back_stderr

    with held_back_stderr():
        with console.status(f"loading {options.job.name}"):
            job = load_job(options.job)
        settings = _settings(options)
        budget = _budget(options, job, (1 + len(settings)) * options.repeats)
        course = _course(job, budget)
        runs = _runs(course, settings, options.repeats, console)
    about = _about(options.job, job)
    report = make_report(runs, budget, about, options.target)
    chosen = best(report)
    report["best"] = None if chosen is None else chosen["name"]
    report["verdict"] = verdict(report)
    with shown_progress("drawing", console) as show:
        _write_all(report, options.output, show)
    return report


def _settings(options: argparse.Namespace) -> list[Setting]:
    from instep._compare.settings import together
    from instep._cores import usable_cores

    numbers = [2**k for k in range(usable_cores().bit_length())]
    given = {"shards": options.shards, "threads": options.threads}
    given = {name: value for name, value in given.items() if value is not None}
    return together(options.modes, options.workers or numbers, given)


def _budget(options: argparse.Namespace, job: Job, number: int) -> Budget:
    from instep._compare.measure import Budget

    is_open = options.seconds is None and options.steps is None
    limit = ALL_SECONDS / number if is_open else options.seconds
    return Budget(options.steps or job.steps, limit)


def _course(job: Job, budget: Budget) -> Course:
    """What all runs have in common."""
    from instep._compare.measure import Course
    from instep._sharding import take_rows
    from instep._shuffled import shuffled
    from instep._training.learner import make_learner, state_of

    learner = make_learner(job)
    rows = next(shuffled(job.rows, min(job.rows, SAMPLE_ROWS), job.seed))
    sample = take_rows(tuple(job.data), rows)
    return Course(job, learner, state_of(learner), sample, budget)


def _runs(
    course: Course, settings: list[Setting], repeats: int, console: Console
) -> list[Run]:
    """The fastest run in one process, and of each setting.

    They are in turns, so that what else the machine does disturbs all alike, and one
    after the other: together they would share cores.
    """
    from instep._compare.measure import fastest, fastest_alone
    from instep._cores import usable_cores

    with console.status("one process: how many threads?"):
        alone = fastest_alone(course, usable_cores())
    rounds = [
        [_run(course, setting, console) for setting in (alone, *settings)]
        for _ in range(repeats)
    ]
    return [fastest(tries) for tries in zip(*rounds, strict=True)]


def _run(course: Course, setting: Setting, console: Console) -> Run:
    """One run; nothing turns on the screen while it is timed but its bar."""
    from instep._commands._progress import shown_progress
    from instep._compare.measure import measure

    starting = console.status(f"{setting.name}: starting")
    with starting, shown_progress(setting.name, console) as bar:

        def show(done: float) -> None:
            starting.stop()
            bar(done)

        run = measure(course, setting, show)
    text = f"{setting.name}: {len(run.losses)} updates in {run.seconds:.3g} s"
    console.print(f"{text}, loss {run.points[-1].loss:.4g}", highlight=False)
    return run


def _about(path: Path, job: Job) -> dict[str, Any]:
    """Job, machine and versions."""
    import platform
    from importlib.metadata import version

    import numpy as np

    import instep
    from instep._cores import usable_cores

    about = {
        "job": path.name,
        "rows": job.rows,
        "batch_size": job.batch_size,
        "seed": job.seed,
        "framework": job.framework,
        "cores": usable_cores(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "instep": instep.__version__,
    }
    if job.framework != "numpy":
        about["framework"] = f"{job.framework} {version(job.framework)}"
    return about


def _write_all(report: Report, folder: Path, show: Any) -> None:
    from instep._compare.page import make_page
    from instep._compare.pictures import PICTURES, png

    contents = {"comparison.json": _as_json(report).encode()}
    contents["comparison.html"] = make_page(report).encode()
    for done, (name, (_, draw)) in enumerate(PICTURES.items()):
        show((1 + done) / (1 + len(PICTURES)))
        contents[f"{name}.png"] = png(draw, report)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise InstepError(f"cannot write to {folder}: {error.strerror}") from error


def _as_json(report: Report) -> str:
    return json.dumps(report, indent=1, allow_nan=False)


def _print(report: Report, folder: Path, console: Console) -> None:
    from instep._commands._table import plain_table
    from instep._compare import tables

    # The columns that decide; the page has all of them.
    lines = [[line[k] for k in (0, 1, 2, 5, 7)] for line in tables.summary(report)]
    console.print()
    console.print(plain_table(lines, console.width), highlight=False)
    console.print()
    for sentence in report["verdict"]:
        console.print(sentence, markup=False, highlight=False)
    console.print(
        f"\nThe page is {folder / 'comparison.html'}.", markup=False, highlight=False
    )
