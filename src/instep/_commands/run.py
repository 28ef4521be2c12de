"""run a script, and fill in what its pools leave open

The script runs as it is, as by `python script.py`. Where a pool in it is made without
workers, shards, threads or engine, these options say what they are. Words that are none
of these options are the script's own; so is everything after `--`.

Started by a launcher of MPI, such as mpirun or srun, one of the processes runs the
script, and the others are its workers: --engine mpi is understood.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep._commands._interrupt import interrupt_as_python_does
from instep._commands._ranks import engine_here, on_ranks
from instep._commands._types import count
from instep._errors import ArgumentError, InstepError

ENGINES = ("processes", "serial", "mpi", "ray")
_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of pools and the script with its words."""
    _add_options(parser)
    parser.add_argument("script", type=Path, metavar="script.py")
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="...", help="the script's own"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the script; 1 where it ended with an error of instep's."""
    from instep._options import defaults

    if not options.script.is_file():
        raise ArgumentError(f"{options.script} is no file; expected a Python script")
    words = _take_options(options)
    options.engine = engine_here(options.engine)
    names = ("engine", "workers", "shards", "threads")
    given = {name: getattr(options, name) for name in names}
    defaults.update({name: value for name, value in given.items() if value is not None})
    sys.argv = [str(options.script), *words]
    sys.path[0] = str(options.script.resolve().parent)
    interrupt_as_python_does()
    if options.engine == "mpi":
        return on_ranks(options.given, lambda: _run(options.script))
    return _run(options.script)


def _run(script: Path) -> int:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except InstepError:  # of the script, not of this command's words
        traceback.print_exc()
        return _FAILED
    return 0


def _add_options(parser: argparse.ArgumentParser, default: Any = None) -> None:
    parser.add_argument("--engine", choices=ENGINES, default=default)
    for name, text in (
        ("workers", "worker processes"),
        ("shards", "parts of every batch; decides the bits"),
        ("threads", "threads per worker; decides the bits"),
    ):
        kind: Any = {"type": count, "metavar": "N", "default": default}
        parser.add_argument(f"--{name}", help=text, **kind)


def _take_options(options: argparse.Namespace) -> Sequence[str]:
    """Takes the options that stand behind the script; the words that are left."""
    # argparse takes some of the dashes away, so they are looked for in all words.
    given = options.given
    rest = given[given.index("--") + 1 :] if "--" in given else []
    words = options.words[: len(options.words) - len(rest)]
    parser = argparse.ArgumentParser("instep run", add_help=False, allow_abbrev=False)
    _add_options(parser, default=argparse.SUPPRESS)
    _, left = parser.parse_known_args([w for w in words if w != "--"], options)
    return [*left, *rest]
