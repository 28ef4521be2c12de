"""measure which split of the cores into workers and threads is the fastest

Takes a job file: a Python file with a function `job()` that returns an `instep.Job`
with model, loss, data and batch size. Measures a batch of it with several splits of
the cores that this process may use, and in one process, in turns, and says which is
the fastest. Nothing is trained.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from typing import TYPE_CHECKING, Any

from instep._commands._pool_options import add_job
from instep._commands._types import seconds

if TYPE_CHECKING:
    from instep._tuning import Progress, Row, Tuning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the job file, --seconds and --json."""
    add_job(parser)
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=10.0,
        metavar="S",
        help="to measure, after the workers have started (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone")


def run(options: argparse.Namespace) -> int:
    """Loads, measures and prints."""
    if options.json:
        _print_json(options)
    elif importlib.util.find_spec("rich") is None:
        print(_measured(options, lambda done: None))
    else:
        _print_table(options)
    return 0


def _measured(options: argparse.Namespace, progress: Progress) -> Tuning:
    from instep._commands._job_file import load_job
    from instep._quiet import held_back_stderr

    with held_back_stderr():
        job = load_job(options.job)
        batch = next(job.batches())
        # How the pool itself would compute does not matter; so it costs no process.
        with job.pool(engine="serial", shards=1) as pool:
            tuning: Tuning = pool.tune(
                *job.arguments(batch), seconds=options.seconds, progress=progress
            )
            return tuning


def _print_json(options: argparse.Namespace) -> None:
    from instep._commands._output import stdout_to_stderr

    with stdout_to_stderr():
        tuning = _measured(options, lambda done: None)
    rows = list(map(_as_dict, tuning.rows))
    best = rows[tuning.rows.index(tuning.best)]
    print(json.dumps({"rows": rows, "best": best, "verdict": tuning.verdict}, indent=2))


def _as_dict(row: Row) -> dict[str, Any]:
    measured = {"seconds": row.seconds, "ratio": row.ratio}
    return {**row.setting._asdict(), **measured, "options": row.options}


def _print_table(options: argparse.Namespace) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from instep._commands._progress import shown_progress
    from instep._tuning import NOTE

    console = Console()
    with shown_progress("measuring", console) as show:
        tuning = _measured(options, show)
    head, *lines = tuning.table()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, title in enumerate(head):
        table.add_column(title, justify="right" if number else "left")
    for line in lines:
        table.add_row(*line)
    for part in (table, "", tuning.verdict, f"note: {NOTE}"):
        console.print(part, highlight=False)
