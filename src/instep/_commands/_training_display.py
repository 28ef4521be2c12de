"""Shows a training while it runs: a table in a terminal, a line now and then elsewhere.

Drawn by the thread that trains: another one would disturb what is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Seconds between two lines.
PATIENCE_S = 2.0
# Workers that have a row of their own.
MAX_ROWS = 8


@dataclass(frozen=True, slots=True)
class View:
    """What there is to be seen.

    Attributes:
        updates: made, those before a checkpoint too.
        done: batches taken.
        steps: batches there are.
        loss: mean of the last few.
        speed: updates per second.
        staleness: mean of the last few.
        load: the share of the time that each worker computes.
    """

    updates: int
    done: int
    steps: int
    loss: float
    speed: float
    staleness: float
    load: Sequence[float]


class Display(Protocol):
    """Where a training is shown."""

    def open(self) -> None:
        """It begins."""

    def show(self, view: View) -> None:
        """This is how it is now."""

    def close(self) -> None:
        """No more views come; calling it twice is fine."""

    def finish(self, summary: dict[str, Any]) -> None:
        """This is how it went."""


def make_display(options: argparse.Namespace) -> Display:
    """A table if there is a terminal, else lines, or nothing."""
    if options.quiet or options.json:
        return Nothing()
    if importlib.util.find_spec("rich") is None or options.verbose:
        return Lines()
    from rich.console import Console

    console = Console()
    # Rich also takes FORCE_COLOR for a terminal; lines can be coloured, not moved.
    is_terminal = console.is_terminal and sys.stdout.isatty()
    is_movable = is_terminal and not console.is_dumb_terminal
    return Table(console) if is_movable else Lines()


class Nothing:
    """Shows nothing."""

    def open(self) -> None:
        pass

    def show(self, view: View) -> None:
        pass

    def close(self) -> None:
        pass

    def finish(self, summary: dict[str, Any]) -> None:
        pass


class Lines:
    """A line now and then."""

    def open(self) -> None:
        self._last = time.monotonic()

    def show(self, view: View) -> None:
        if time.monotonic() - self._last > PATIENCE_S:
            self._last = time.monotonic()
            print(
                f"step {view.done:{len(str(view.steps))}} of {view.steps}  "
                f"loss {view.loss:<9.4g} {view.speed:,.4g} updates/s  "
                f"load {_range(view.load)}",
                flush=True,
            )

    def close(self) -> None:
        pass

    def finish(self, summary: dict[str, Any]) -> None:
        print("\n".join(told(summary)))


class Table:
    """A table that is drawn anew in its place."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._live = Live(console=console, auto_refresh=False)
        self._width = max(4, min(24, console.width - 30))  # of a bar
        self._begin: float | None = None

    def open(self) -> None:
        self._live.start()
        self._live.update("starting", refresh=True)

    def show(self, view: View) -> None:
        self._begin = self._begin or time.monotonic()
        self._live.update(self._drawn(view), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def finish(self, summary: dict[str, Any]) -> None:
        print("\n".join(told(summary)))

    def _drawn(self, view: View) -> RenderableType:
        from rich.table import Table as Grid

        grid = Grid.grid(padding=(0, 2))
        part = view.done / view.steps
        grid.add_row("step", f"{view.done} of {view.steps}", self._bar(part))
        grid.add_row("loss", f"{view.loss:.4g}")
        grid.add_row("updates/s", f"{view.speed:,.4g}", self._time_left(part))
        if view.staleness:
            grid.add_row("staleness", f"{view.staleness:.2f}")
        for worker, share in enumerate(view.load[:MAX_ROWS]):
            busy = f"{share:4.0%} busy"
            grid.add_row(f"worker {worker}", busy, self._bar(share))
        if len(view.load) > MAX_ROWS:
            grid.add_row(f"all {len(view.load)}", _range(view.load))
        return grid

    def _bar(self, part: float) -> RenderableType:
        from rich.progress_bar import ProgressBar

        return ProgressBar(total=1.0, completed=part, width=self._width)

    def _time_left(self, part: float) -> str:
        passed = time.monotonic() - (self._begin or time.monotonic())
        if passed < PATIENCE_S or not 0 < part < 1:
            return ""
        return f"{_clock(passed / part - passed)} left"


def told(summary: dict[str, Any]) -> list[str]:
    """A summary in a few lines."""
    seconds, updates = summary["seconds"], summary["updates"]
    loss = "not finite" if summary["loss"] is None else f"{summary['loss']:.4g}"
    lines = [
        f"{updates} updates in {seconds:.3g} s ({summary['updates_per_second']:,.4g} "
        f"per second), loss {loss}",
        f"{_workers(summary)}, busy {_range(summary['load'])} of the time",
        f"parameters: SHA-256 {summary['sha256'][:16]}",
    ]
    if not updates:
        lines = [f"nothing to do: {summary['steps']} steps are done", *lines[2:]]
    if summary["workers_lost"]:
        lines.append(f"{summary['workers_lost']} workers were lost and replaced")
    if "checkpoint" in summary:
        lines.append(f"checkpoint: {summary['checkpoint']}, step {summary['steps']}")
    return lines


def _workers(summary: dict[str, Any]) -> str:
    number = summary["workers"]
    if summary["engine"] == "serial":
        return "one process"
    return f"{number} worker" if number == 1 else f"{number} workers"


def _range(load: Sequence[float]) -> str:
    if not load:
        return "-"
    least, most = min(load), max(load)
    same = f"{least:.0%}" == f"{most:.0%}"
    return f"{least:.0%}" if same else f"{least:.0%} to {most:.0%}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}"
