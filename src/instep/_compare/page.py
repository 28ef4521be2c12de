"""One HTML file that holds verdict, pictures and the tables behind them.

It needs no other file and no network, and follows the reader's screen and colours.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from instep._compare import pictures, tables
from instep._compare.report import Report

NOTES = (
    "Every run began with the same parameters, had the same batches and was measured "
    "after its workers had started. Times differ from run to run with what else the "
    "machine does, which can only make a run slower. So each setting had its turn "
    "$repeats, and its fastest run is shown.",
    "The loss of the curves is that of the same rows for all, computed afterwards with "
    "copies of the parameters. Examples are what the loss counts: rows, unless it "
    "returns a weight of its own.",
    "An asynchronous update is the gradient of a whole batch, which one worker has "
    "computed; a synchronous one is the average over the shards of a batch. A worker "
    "is idle while it does not compute.",
    "Time of an update, as the master sees it: batch is taking the rows out of the "
    "data; compute is waiting while the busiest worker computes, and wait all other "
    "waiting; average is the rest until the gradient is there; optimizer is its step.",
)


def make_page(report: Report) -> str:
    """The page of a report, verdict included."""
    about, budget = report["about"], report["budget"]
    limit = "" if budget["seconds"] is None else f" or {budget['seconds']:.3g} s"
    template = Template((files("instep._compare") / "page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(f"Comparison: {about['job']}"),
        subtitle=escape(f"{budget['steps']} batches{limit} for each setting"),
        verdict="\n".join(f"<p>{escape(text)}</p>" for text in report["verdict"]),
        summary=_table(tables.summary(report), report["best"]),
        pictures="\n".join(_figure(name, report) for name in pictures.PICTURES),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in _notes(report)),
        about="\n".join(_term(name, str(value)) for name, value in about.items()),
    )


def _notes(report: Report) -> list[str]:
    repeats = report["repeats"]
    told = "once" if repeats == 1 else f"{repeats} times"
    return [Template(note).substitute(repeats=told) for note in NOTES]


def _figure(name: str, report: Report) -> str:
    title, draw = pictures.PICTURES[name]
    light, dark = (
        _data(pictures.svg(draw, report, theme))
        for theme in (pictures.LIGHT, pictures.DARK)
    )
    return (
        f"<figure>\n<figcaption>{escape(title)}</figcaption>\n<picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(title)}; the table below has its numbers">'
        f"</picture>\n<details><summary>Table</summary>\n"
        f"{_table(tables.TABLES[name](report))}\n</details>\n</figure>"
    )


def _table(lines: Sequence[Sequence[str]], best: str | None = None) -> str:
    head, *rows = lines
    body = "\n".join(
        f"<tr{' class=best' if row[0] == best else ''}>{_cells(row, 'td')}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table>\n<thead><tr>{_cells(head, "th")}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _cells(cells: Iterable[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)


def _term(name: str, value: str) -> str:
    return f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(value)}</dd>"


def _data(content: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"
