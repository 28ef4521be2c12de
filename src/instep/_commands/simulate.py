"""say what modes would do on workers that one does not have

Runs each mode's rules in simulated time, with workers whose times are drawn from a
distribution, and prints how long an update takes, how much of their time workers wait,
and how stale gradients are. Nothing is computed, so that it takes seconds.

A time is a number of seconds for every shard, or one of constant(1.0),
gamma(1.0, shape=100) and heavy_tail(1.0, alpha=2.5), with the mean first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from typing import TYPE_CHECKING, Any

from instep._commands import _calls
from instep._commands._types import count, positive, seconds

if TYPE_CHECKING:
    from instep._simulation import Simulation
    from instep._training.choice import Choice

MODES = "synchronous,asynchronous"
HEAD = ("mode", "workers", "s/update", "idle", "staleness", "dropped")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds modes, workers, their times, the network, --steps, --seed and --json."""
    parser.add_argument(
        "--modes",
        "--mode",
        type=_calls.modes,
        default=MODES,
        metavar="MODE,...",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=_calls.counts,
        default=[8],
        metavar="N,...",
        help="how many (default: 8)",
    )
    parser.add_argument(
        "--compute",
        type=_calls.compute,
        default="gamma(1.0, shape=100)",
        metavar="TIME",
        help="that a worker takes for a shard (default: %(default)s)",
    )
    parser.add_argument(
        "--slow",
        type=positive,
        default=1.0,
        metavar="FACTOR",
        help="one of the workers takes so many times as long",
    )
    network = parser.add_argument_group("network and master")
    for name, kind, unit, text in (
        ("parameters", positive, "BYTES", "that travel to a worker, and back"),
        ("latency", seconds, "S", "until the first byte arrives"),
        ("bandwidth", positive, "BYTES", "per second, in each direction"),
        ("update", seconds, "S", "that the master takes for an update"),
    ):
        network.add_argument(f"--{name}", type=kind, metavar=unit, help=text)
    parser.add_argument(
        "--shards", type=count, metavar="N", help="of a batch (default: as workers)"
    )
    parser.add_argument(
        "--steps",
        type=count,
        default=400,
        metavar="N",
        help="updates (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the times")
    parser.add_argument("--json", action="store_true", help="print JSON alone")


def run(options: argparse.Namespace) -> int:
    """Simulates and prints."""
    if options.json:
        found = _simulated(options, lambda done: None)
        print(json.dumps([_as_dict(*result) for result in found], indent=2))
    elif importlib.util.find_spec("rich") is None:
        _print_lines([_cells(*row) for row in _simulated(options, lambda done: None)])
    else:
        _print_table(options)
    return 0


def _simulated(
    options: argparse.Namespace, show: Any
) -> list[tuple[str, int, Simulation]]:
    """(mode, workers, what happened) for each pair."""
    import instep

    compute, network = options.compute, None
    if options.slow != 1:
        compute = instep.OneSlow(compute, options.slow)
    given = {"latency": options.latency, "bandwidth": options.bandwidth}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        network = instep.Network(**given)
    pairs = [(choice, n) for choice in options.modes for n in options.workers]
    found = []
    for choice, workers in pairs:
        result = instep.simulate(
            _mode(choice),
            workers,
            compute,
            steps=options.steps,
            shards=options.shards,
            parameters=options.parameters or 0,
            network=network,
            update=options.update or 0.0,
            seed=options.seed,
        )
        found.append((choice.text, workers, result))
        show(len(found) / len(pairs))
    return found


def _mode(choice: Choice) -> Any:
    """The mode; a simulated worker takes local steps without an optimizer."""
    from instep.modes import Local

    given = {"optimizer": 1.0} if choice.kind is Local else {}
    return choice.kind(**{**given, **choice.arguments})


def _as_dict(mode: str, workers: int, result: Simulation) -> dict[str, Any]:
    return {
        "mode": mode,
        "workers": workers,
        "updates": result.updates,
        "seconds": result.seconds,
        "seconds_per_update": result.step_time,
        "idle": list(result.idle),
        "mean_idle": result.mean_idle,
        "staleness": {str(k): n for k, n in sorted(result.staleness.items())},
        "mean_staleness": result.mean_staleness,
        "dropped": result.dropped,
    }


def _cells(mode: str, workers: int, result: Simulation) -> tuple[str, ...]:
    return (
        mode,
        str(workers),
        f"{result.step_time:.3g}",
        f"{result.mean_idle:.0%}",
        f"{result.mean_staleness:.2f}",
        f"{result.dropped:.1%}",
    )


def _print_lines(rows: list[tuple[str, ...]]) -> None:
    for row in [HEAD, *rows]:
        print("  ".join(row))


def _print_table(options: argparse.Namespace) -> None:
    from rich.console import Console

    from instep._commands._progress import shown_progress
    from instep._commands._table import plain_table

    console = Console()
    with shown_progress("simulating", console) as show:
        rows = [_cells(*result) for result in _simulated(options, show)]
    console.print(plain_table([HEAD, *rows], console.width), highlight=False)
