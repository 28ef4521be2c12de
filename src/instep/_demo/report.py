"""Says what the demo found out: two tables and a sentence."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from instep._demo.measure import Results
from instep._demo.words import counted, name


def print_report(results: Results, console: Console) -> None:
    """Prints losses, speeds, the gradients' difference and the bits."""
    for part in (_runs(results), _bits(results), verdict(results)):
        console.print()
        console.print(part, highlight=False)


def verdict(results: Results) -> str:
    """Which was faster, and why."""
    ratio = results.one.steps_per_second / results.pooled.steps_per_second
    if ratio < 1:
        return f"{name(results.size)}: {1 / ratio:.1f} times faster than one process."
    step_us = 1e6 / results.one.steps_per_second
    return (
        f"One process is {ratio:.0f} times faster: a step of this tiny network takes "
        f"{step_us:.0f} us, less than handing it to workers."
    )


def _runs(results: Results) -> Table:
    one, pooled = results.one, results.pooled
    table = _table("", "one process", name(results.size))
    table.add_row("final loss", f"{one.losses[-1]:.8f}", f"{pooled.losses[-1]:.8f}")
    table.add_row(
        "steps per second",
        f"{one.steps_per_second:,.0f}",
        f"{pooled.steps_per_second:,.0f}",
    )
    table.add_row("largest gradient", f"{results.gradient:.6f}", "")
    table.add_row("gradients differ by", "", f"{results.difference:.1e}")
    return table


def _bits(results: Results) -> Table:
    steps = counted(results.checked_steps, "step")
    table = _table(f"parameters after {steps}", "SHA-256 begins")
    for group in results.digests:
        for run, digest in group.items():
            table.add_row(run, digest[:16])
        table.add_section()
    table.add_row("equal bits", "yes" if results.has_equal_bits else "NO")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
