"""The numbers behind the pictures, as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from instep._compare.report import Report
from instep._training.loop import PARTS

Lines = list[list[str]]


def summary(report: Report) -> Lines:
    """One line for each setting; the head comes first."""
    head = ["setting", "s to target", "loss at the end", "seconds", "updates"]
    head += ["examples/s", "idle", "staleness"]
    return [head, *map(_summarised, report["runs"])]


def _summarised(run: Report) -> list[str]:
    reached = run["to_target"]
    return [
        run["name"],
        _number(reached["seconds"]) if reached else "not reached",
        _number(run["loss"]),
        _number(run["seconds"]),
        f"{run['updates']:,}",
        f"{run['examples_per_second']:,.0f}",
        f"{sum(run['idle']) / len(run['idle']):.0%}",
        f"{run['mean_staleness']:.2f}",
    ]


def curves(report: Report) -> Lines:
    """Every point of every curve."""
    head = ["setting", "seconds", "examples", "updates", "loss"]
    lines = [
        [
            run["name"],
            _number(point["seconds"]),
            f"{point['examples']:,.0f}",
            f"{point['updates']:,}",
            _number(point["loss"]),
        ]
        for run in report["runs"]
        for point in run["curve"]
    ]
    return [head, *lines]


def idle(report: Report) -> Lines:
    """The share of each worker."""
    lines = [
        [run["name"], str(worker), f"{share:.1%}"]
        for run in report["runs"]
        for worker, share in enumerate(run["idle"])
    ]
    return [["setting", "worker", "idle"], *lines]


def staleness(report: Report) -> Lines:
    """How many updates were so stale."""
    lines = [
        [run["name"], stale, f"{number:,}", f"{number / run['updates']:.1%}"]
        for run in report["runs"]
        for stale, number in run["staleness"].items()
    ]
    return [["setting", "staleness", "updates", "share"], *lines]


def time_per_step(report: Report) -> Lines:
    """Milliseconds of each part."""
    lines = []
    for run in report["runs"]:
        parts = run["seconds_per_update"]
        all_parts = [*(parts[part] for part in PARTS), sum(parts.values())]
        lines.append([run["name"], *(f"{1e3 * part:.3f}" for part in all_parts)])
    return [["setting (ms)", *PARTS, "sum"], *lines]


TABLES: dict[str, Callable[[Report], Lines]] = {
    "loss_by_time": curves,
    "loss_by_examples": curves,
    "loss_by_updates": curves,
    "time_per_step": time_per_step,
    "idle": idle,
    "staleness": staleness,
}


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"
