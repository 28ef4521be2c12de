"""What was measured, as a dictionary for JSON; the page shows nothing else."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any

from instep._compare.measure import Budget, Point, Run
from instep._training.loop import PARTS
from instep._training.numbers import finite

# The part of one process's gain that a run has to make to be at the target.
GAIN = 0.95

Report = dict[str, Any]


def make_report(
    runs: Sequence[Run], budget: Budget, about: Report, target: float | None
) -> Report:
    """Everything; the first run is that of one process.

    Args:
        runs: as measured.
        budget: of each.
        about: job, machine and versions.
        target: the loss that counts as done; None: 95 % of the way from the first
            loss to the lowest of one process.
    """
    is_given = target is not None
    if target is None:
        target = _target(runs)
    return {
        "about": about,
        "budget": {"steps": budget.steps, "seconds": budget.seconds},
        "repeats": len(runs[0].tries),
        "target": finite(target),
        "target_is_given": is_given,
        "runs": [_of_run(run, target) for run in runs],
    }


def _target(runs: Sequence[Run]) -> float:
    """NaN if no run has gained anything."""
    for candidates in (runs[:1], runs):
        start = runs[0].points[0].loss
        losses = [point.loss for run in candidates for point in run.points]
        lowest = min((x for x in losses if math.isfinite(x)), default=math.nan)
        if lowest < start:
            return start - GAIN * (start - lowest)
    return math.nan


def _of_run(run: Run, target: float) -> Report:
    updates, seconds = len(run.losses), run.seconds
    reached = reach(run.points, target)
    lowest = min((p.loss for p in run.points if math.isfinite(p.loss)), default=None)
    each = [part / updates for part in run.parts]
    return {
        "name": run.setting.name,
        "mode": run.setting.mode,
        "workers": run.setting.workers,
        "is_one_process": run.setting.is_alone,
        "is_synchronous": run.setting.choice.is_synchronous,
        "shards": run.setting.options["shards"],
        "threads": run.setting.options["threads"],
        "batches": run.batches,
        "updates": updates,
        "examples": run.examples,
        "seconds": seconds,
        "updates_per_second": updates / seconds,
        "seconds_per_update_of_all_tries": list(run.tries),
        "examples_per_second": run.examples / seconds,
        "loss": finite(run.points[-1].loss),
        "lowest_loss": lowest,
        "to_target": None if reached is None else _of_reached(reached),
        "idle": [min(1.0, max(0.0, 1 - busy / seconds)) for busy in run.busy],
        "staleness": {str(k): n for k, n in sorted(run.staleness.items())},
        "mean_staleness": sum(k * n for k, n in run.staleness.items()) / updates,
        "dropped_rows": run.dropped,
        "seconds_per_update": dict(zip(PARTS, each, strict=True)),
        "curve": [_of_point(point) for point in run.points],
        "losses": [finite(loss) for loss in run.losses],
        "losses_sha256": _digest(run.losses),
    }


def reach(points: Sequence[Point], target: float) -> Point | None:
    """Where the curve first meets the target, on a straight line between points.

    Example:
        >>> curve = [Point(0, 0.0, 0.0, 3.0), Point(4, 40.0, 2.0, 1.0)]
        >>> reach(curve, 1.5)
        Point(updates=3, examples=30.0, seconds=1.5, loss=1.5)
    """
    before = points[0]
    for point in points:
        if point.loss <= target:
            fall = before.loss - point.loss
            part = (before.loss - target) / fall if fall > 0 else 0.0
            if not math.isfinite(part):  # it comes from an infinite loss
                return point
            between = [a + part * (b - a) for a, b in zip(before, point, strict=True)]
            return Point(math.ceil(between[0]), between[1], between[2], target)
        before = point
    return None


def _of_reached(point: Point) -> Report:
    return {name: getattr(point, name) for name in ("updates", "examples", "seconds")}


def _of_point(point: Point) -> Report:
    return {**point._asdict(), "loss": finite(point.loss)}


def _digest(losses: Sequence[float]) -> str:
    """Equal where every bit of every loss is."""
    content = struct.pack(f"<{len(losses)}d", *losses)
    return hashlib.sha256(content).hexdigest()
