"""A table for the terminal: the first column is text, the others are numbers."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

# Letters that the first column needs, and the room between two columns.
MIN_TEXT, GAP = 14, 3


def plain_table(lines: Sequence[Sequence[str]], width: int) -> Table:
    """A table without a frame, no wider than a terminal.

    Long text in the first column is folded. Where there is no room for all numbers,
    the last columns are left out.

    Args:
        lines: the head, then the rows; the most important columns first.
        width: of the terminal, in letters.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    head, *rows = [line[: _num_fitting(lines, width)] for line in lines]
    table.add_column(head[0], overflow="fold")
    for title in head[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _num_fitting(lines: Sequence[Sequence[str]], width: int) -> int:
    """How many columns there is room for."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = width - min(widths[0], MIN_TEXT)
    for number, needed in enumerate(widths[1:], start=1):
        left -= needed + GAP
        if left < 0:
            return number
    return len(widths)
