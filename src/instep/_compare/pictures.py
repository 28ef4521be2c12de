"""Draws a report's figures, for light and for dark pages."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from instep._compare.report import Report
from instep._training.loop import PARTS

# Inches; narrow, so that its letters can be read on a phone, too.
WIDTH, HEIGHT, BAR = 4.4, 3.3, 0.27
DPI = 160
# Okabe and Ito's colours, which colour-blind people can tell apart; lighter by night.
HUES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
NIGHT_HUES = ("#4aa8e0", "#ff8a3d", "#2fc79a", "#e59ac6", "#f0b840", "#8fd3f5")
PART_HUES = ("#56b4e9", "#009e73", "#d55e00", "#e69f00", "#cc79a7")
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Theme:
    """Colours of paper, ink, lines and modes."""

    paper: str
    ink: str
    faint: str
    hues: Sequence[str]


LIGHT = Theme("#ffffff", "#1c2430", "#d6dbe1", HUES)
DARK = Theme("#161b22", "#e3e8ee", "#3a434e", NIGHT_HUES)

Draw = Callable[[Report, Theme], Figure]


def svg(draw: Draw, report: Report, theme: Theme) -> bytes:
    """A picture as it stands in the page."""
    return _saved(draw, report, theme, "svg", metadata={"Date": None})


def png(draw: Draw, report: Report) -> bytes:
    """A picture as a file of its own."""
    return _saved(draw, report, LIGHT, "png", dpi=DPI)


def _saved(
    draw: Draw, report: Report, theme: Theme, kind: str, **options: Any
) -> bytes:
    style = {
        "font.size": 10,
        "svg.hashsalt": "instep",  # the same picture has the same bytes
        "text.color": theme.ink,
        "axes.facecolor": theme.paper,
        "axes.edgecolor": theme.faint,
        "axes.labelcolor": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "grid.color": theme.faint,
        "legend.frameon": False,
    }
    content = io.BytesIO()
    with mpl.rc_context(style):
        figure = draw(report, theme)
        figure.set_facecolor(theme.paper)
        figure.savefig(content, format=kind, **options)
    return content.getvalue()


def loss_by(quantity: str, label: str) -> Draw:
    """Draws the loss against seconds, examples or updates."""

    def draw(report: Report, theme: Theme) -> Figure:
        runs = report["runs"]
        figure, axes = _paper(HEIGHT + 0.22 * math.ceil(len(runs) / 2))
        for run, look in zip(runs, _looks(runs, theme), strict=True):
            points = [point for point in run["curve"] if point["loss"] is not None]
            x = [point[quantity] for point in points]
            y = [point["loss"] for point in points]
            axes.plot(x, y, label=run["name"], **look)
        _limit_losses(axes, runs)
        _mark_target(axes, report["target"], theme)
        axes.set(xlabel=label, ylabel="loss")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
        return figure

    return draw


def idle(report: Report, theme: Theme) -> Figure:
    """Draws the share of the time in which each worker did not compute."""
    runs = report["runs"]
    bars = [
        (f"{run['name']}: {k}" if len(run["idle"]) > 1 else run["name"], share, look)
        for run, look in zip(runs, _looks(runs, theme), strict=True)
        for k, share in enumerate(run["idle"])
    ]
    figure, axes = _paper(0.9 + BAR * len(bars), "x")
    names = [name for name, _, _ in bars]
    colours = [look["color"] for _, _, look in bars]
    drawn = axes.barh(range(len(bars)), [b[1] for b in bars], 0.7, color=colours)
    axes.bar_label(drawn, [f"{b[1]:.0%}" for b in bars], padding=3, fontsize=8)
    axes.set_yticks(range(len(bars)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("idle share of the time")
    return figure


def staleness(report: Report, theme: Theme) -> Figure:
    """Draws how many of a run's updates were so stale, where any was at all."""
    runs = [r for r in report["runs"] if r["mean_staleness"]] or report["runs"]
    figure, axes = _paper(HEIGHT + 0.22 * math.ceil(len(runs) / 2))
    every = zip(report["runs"], _looks(report["runs"], theme), strict=True)
    looks = [look for run, look in every if run in runs]
    width = 0.8 / len(runs)
    for number, (run, look) in enumerate(zip(runs, looks, strict=True)):
        pairs = sorted((int(k), n) for k, n in run["staleness"].items())
        x = [k + (number - (len(runs) - 1) / 2) * width for k, _ in pairs]
        shares = [n / run["updates"] for _, n in pairs]
        hatch = {"--": "////", ":": "....", "-.": "xxxx"}.get(look["linestyle"])
        axes.bar(
            x,
            shares,
            width,
            label=run["name"],
            color=look["color"],
            hatch=hatch,
            edgecolor=theme.paper,
            linewidth=0,
        )
    axes.set(xlabel="updates since the parameters were read")
    axes.set_ylabel("share of the updates")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def time_per_step(report: Report, theme: Theme) -> Figure:
    """Draws where the seconds of an update go."""
    runs = report["runs"]
    figure, axes = _paper(1.3 + BAR * len(runs), "x")
    scale, unit = _unit(max(sum(r["seconds_per_update"].values()) for r in runs))
    left = [0.0] * len(runs)
    for part, hue in zip(PARTS, PART_HUES, strict=True):
        values = [run["seconds_per_update"][part] * scale for run in runs]
        axes.barh(range(len(runs)), values, 0.7, left=left, color=hue, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(runs)), [run["name"] for run in runs], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} per update")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, columnspacing=1.0)
    return figure


def _paper(height: float, grid: Literal["both", "x"] = "both") -> tuple[Figure, Any]:
    # No pyplot: it would want a screen, or set one up for the whole process.
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _looks(runs: Sequence[Report], theme: Theme) -> list[dict[str, Any]]:
    """One colour for each mode, one kind of line for each number of workers."""
    return list(_each_look(runs, theme))


def _each_look(runs: Sequence[Report], theme: Theme) -> Iterator[dict[str, Any]]:
    modes = list(dict.fromkeys(r["mode"] for r in runs if not r["is_one_process"]))
    numbers = sorted({r["workers"] for r in runs if not r["is_one_process"]})
    for run in runs:
        if run["is_one_process"]:
            yield {"color": theme.ink, "linewidth": 1.4, "linestyle": "-"}
            continue
        # The largest number of workers has the full line.
        place = len(numbers) - 1 - numbers.index(run["workers"])
        yield {
            "color": theme.hues[modes.index(run["mode"]) % len(theme.hues)],
            "linewidth": 1.8,
            "linestyle": DASHES[place % len(DASHES)],
        }


def _mark_target(axes: Any, target: float | None, theme: Theme) -> None:
    least, most = axes.get_ylim()
    if target is None or not least < target < most:
        return
    axes.axhline(target, color=theme.ink, linewidth=0.8, alpha=0.6)
    axes.annotate(
        "target",
        (1.0, target),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 2),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )


def _limit_losses(axes: Any, runs: Sequence[Report]) -> None:
    """Keeps a run that diverges from making all others a flat line."""
    losses = [p["loss"] for run in runs for p in run["curve"] if p["loss"] is not None]
    start = runs[0]["curve"][0]["loss"]
    if losses and min(losses) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(_few_numbers(min(losses), max(losses)))
    if start is not None and losses and max(losses) > 2 * start > 0:
        axes.set_ylim(0.9 * min(losses), 2 * start)


def _few_numbers(least: float, most: float) -> Any:
    """Labels between the powers of ten, where there are hardly any of those."""
    is_narrow = most / least < 30
    return lambda x, _: f"{x:g}" if is_narrow and f"{x:e}"[0] in "235" else ""


def _unit(seconds: float) -> tuple[float, str]:
    """What to multiply seconds by, and what they are then."""
    return (1.0, "seconds") if seconds >= 1 else (1e3, "milliseconds")


PICTURES: dict[str, tuple[str, Draw]] = {
    "loss_by_time": ("Loss against time", loss_by("seconds", "seconds")),
    "loss_by_examples": ("Loss against examples", loss_by("examples", "examples")),
    "loss_by_updates": ("Loss against updates", loss_by("updates", "updates")),
    "time_per_step": ("Where the time of an update goes", time_per_step),
    "idle": ("Idle share of each worker", idle),
    "staleness": ("Staleness, where gradients are stale", staleness),
}
