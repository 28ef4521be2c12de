"""The options of a job's pool, for commands that train or check one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from instep._commands._ranks import engine_here
from instep._commands._types import count
from instep._cores import usable_cores

ENGINES = ("processes", "serial", "mpi", "ray")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Adds the job file."""
    parser.add_argument(
        "job", type=Path, metavar="job.py", help="a Python file with a function job()"
    )


def add_pool_options(parser: argparse.ArgumentParser) -> None:
    """Adds --workers, --shards, --threads and --engine."""
    words = (
        ("workers", "worker processes (default: one per core)"),
        ("shards", "parts of every batch; decides the bits (default: as workers)"),
        ("threads", "threads per worker; decides the bits (default: 1)"),
    )
    for name, text in words:
        parser.add_argument(f"--{name}", type=count, metavar="N", help=text)
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        help="what runs the workers (default: processes, or mpi under its launcher)",
    )


def pool_options(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of a pool."""
    names = ("workers", "shards", "threads", "engine")
    given = {name: getattr(options, name) for name in names}
    given["engine"] = engine_here(options.engine)
    known = {name: value for name, value in given.items() if value is not None}
    if options.engine == "serial":  # one process, with the bits of so many workers
        known.setdefault("shards", known.pop("workers", usable_cores()))
        known["workers"] = 1
    return known
