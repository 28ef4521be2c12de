"""say whether a job's loss may be split into shards

Takes a job file: a Python file with a function `job()` that returns an `instep.Job`.
Computes loss and gradient of one batch whole and in shards. Where they differ, it says
which parameters do, and the likely reason; the exit code is then 1. Nothing is trained.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

from instep._commands._pool_options import add_job
from instep._commands._types import count

if TYPE_CHECKING:
    from instep._check import Report

_UNFIT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the job file, --shards and --json."""
    add_job(parser)
    parser.add_argument(
        "--shards",
        type=count,
        default=2,
        metavar="N",
        help="parts to compare the whole batch with (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone")


def run(options: argparse.Namespace) -> int:
    """Checks and prints; 1 if the loss is not fit."""
    from instep._commands._output import stdout_to_stderr

    if options.json:
        with stdout_to_stderr():
            report = _checked(options)
        print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2))
    else:
        with _waiting():
            report = _checked(options)
        print(report)
    return 0 if report.ok else _UNFIT


def _waiting() -> AbstractContextManager[object]:
    """Says in a terminal that something takes a while."""
    if importlib.util.find_spec("rich") is None:
        return nullcontext()
    from rich.console import Console

    return Console().status("checking")


def _checked(options: argparse.Namespace) -> Report:
    from instep._commands._job_file import load_job
    from instep._quiet import held_back_stderr

    with held_back_stderr():
        job = load_job(options.job)
        batch = next(job.batches())
        # In this process: workers would take longer to start than the check takes.
        with job.pool(engine="serial", shards=options.shards) as pool:
            report: Report = pool.check(*job.arguments(batch))
            return report
