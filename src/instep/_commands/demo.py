"""train a parabola in one process and with a pool, and compare

Fits 50 points of y = x^2 with a network of five hidden units by gradient descent,
first in this process alone, then with workers that compute the gradient together.
Prints losses, speeds and how far the gradients differ, compares the bits for 1, 2
and 4 workers, and draws data, fit and loss curve.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from instep._commands._extras import require
from instep._commands._types import count, new_file
from instep._demo.frameworks import FRAMEWORKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --framework, --workers, --shards, --steps and --output."""
    parser.add_argument(
        "--framework",
        choices=FRAMEWORKS,
        default="tensorflow",
        help="what computes the gradients (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=count,
        default=4,
        metavar="N",
        help="processes that compute them (default: %(default)s)",
    )
    parser.add_argument(
        "--shards",
        type=count,
        metavar="N",
        help="parts the batch is split into (default: as many as workers)",
    )
    parser.add_argument(
        "--steps",
        type=count,
        default=2000,
        metavar="N",
        help="steps of gradient descent (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=new_file,
        default=Path("parabola.png"),
        metavar="FILE",
        help="where the picture goes (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Trains, compares, prints and draws; 1 if the bits differ."""
    framework = FRAMEWORKS[options.framework]
    for library in ("rich", "matplotlib"):
        require(library, "report", "demo")
    from rich.console import Console

    from instep._demo import picture, report
    from instep._demo.display import make_display
    from instep._demo.measure import measure
    from instep._demo.trainer import PoolSize, load_maker
    from instep._quiet import held_back_stderr

    picture.check_format(options.output)
    console = Console()
    display = make_display(console)
    size = PoolSize(options.workers, options.shards or options.workers)
    with held_back_stderr():
        with display.waiting(f"importing {framework.package}"):
            require(framework.package, framework.extra, "demo")
            make = load_maker(options.framework)
        results = measure(make, size, options.steps, display)
    report.print_report(results, console)
    picture.draw(results, options.output)
    console.print(f"The picture is in {options.output}.", highlight=False)
    return 0 if results.has_equal_bits else 1
