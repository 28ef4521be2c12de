"""Shows training while it happens: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from instep._demo.words import counted

# Columns a bar with its numbers needs.
MIN_WIDTH = 78
# Seconds between two pictures of a bar, and between two lines.
BAR_INTERVAL_S, LINE_INTERVAL_S = 0.1, 1.0

# Called after each step with the losses and the seconds of all steps so far.
Show = Callable[[Sequence[float], Sequence[float]], None]


class Display(Protocol):
    """What the demo tells while it runs."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Shows that something takes a few seconds."""

    def training(self, label: str, steps: int) -> AbstractContextManager[Show]:
        """Shows a training run; it calls what it gets after every step."""


def make_display(console: Console) -> Display:
    """Bars if there is a terminal and room for them, else lines."""
    # Rich also takes FORCE_COLOR for a terminal; lines can be coloured, not moved.
    is_terminal = console.is_terminal and console.file.isatty()
    if is_terminal and not console.is_dumb_terminal and console.width >= MIN_WIDTH:
        return Bars(console)
    return Lines(console)


class Bars:
    """One bar per training run."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        with self._console.status(what):
            yield

    @contextlib.contextmanager
    def training(self, label: str, steps: int) -> Iterator[Show]:
        progress = Progress(
            TextColumn("{task.description:<21}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            auto_refresh=False,  # no thread beside the steps that are timed
        )
        with progress:
            bar = progress.add_task(label, total=steps, numbers="")

            def draw(losses: Sequence[float], seconds: Sequence[float]) -> None:
                numbers = _numbers(losses, seconds)
                progress.update(bar, completed=len(losses), numbers=numbers)
                progress.refresh()

            yield _at_intervals(draw, BAR_INTERVAL_S, steps)


class Lines:
    """A line now and then, narrow enough for 40 columns."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        self._print(what)
        yield

    @contextlib.contextmanager
    def training(self, label: str, steps: int) -> Iterator[Show]:
        self._print(f"{label}, {counted(steps, 'step')}")

        def write(losses: Sequence[float], seconds: Sequence[float]) -> None:
            self._print(f"{len(losses):6}  {_numbers(losses, seconds)}")

        yield _at_intervals(write, LINE_INTERVAL_S, steps)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


def _at_intervals(show: Show, interval_s: float, steps: int) -> Show:
    """Calls `show` now and then, and after the last step."""
    last = time.monotonic()

    def show_if_due(losses: Sequence[float], seconds: Sequence[float]) -> None:
        nonlocal last
        if len(losses) == steps or time.monotonic() - last >= interval_s:
            show(losses, seconds)
            last = time.monotonic()

    return show_if_due


def _numbers(losses: Sequence[float], seconds: Sequence[float]) -> str:
    speed = 1 / statistics.median(seconds[-500:])
    return f"loss {losses[-1]:<9.4g}{speed:6,.0f} steps/s"
