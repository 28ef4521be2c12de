"""Says how far a command is, if it takes long; needs rich.

A bar in a terminal, drawn by the thread that measures: another one would disturb
what is timed. Elsewhere a line now and then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

# Seconds before the first word, and between two lines.
PATIENCE_S = 2.0

# Called now and then with the part that is done, 0.0 to 1.0.
Show = Callable[[float], None]


@contextlib.contextmanager
def shown_progress(label: str, console: Console) -> Iterator[Show]:
    """Inside, the function that it gives shows the part that is done."""
    is_terminal = console.is_terminal and console.file.isatty()
    if not is_terminal or console.is_dumb_terminal:
        yield _lines(label, console)
        return
    columns = TextColumn(label), BarColumn(), TextColumn("{task.percentage:3.0f}%")
    bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
    try:
        yield _redrawn(bar)
    finally:
        bar.stop()


def _redrawn(bar: Progress) -> Show:
    begin, task = time.monotonic(), bar.add_task("", total=1.0)

    def show(done: float) -> None:
        if time.monotonic() - begin > PATIENCE_S:
            bar.start()
            bar.update(task, completed=done, refresh=True)

    return show


def _lines(label: str, console: Console) -> Show:
    last = time.monotonic()

    def show(done: float) -> None:
        nonlocal last
        if time.monotonic() - last > PATIENCE_S:
            last = time.monotonic()
            console.print(f"{label} {done:4.0%}", markup=False, highlight=False)

    return show
