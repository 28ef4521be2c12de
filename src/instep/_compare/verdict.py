"""Words that follow from a report's figures, and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instep._compare.report import GAIN, Report

# How much slower one process may be and still be chosen: it has fewer moving parts.
MARGIN = 0.03


def verdict(report: Report) -> list[str]:
    """Sentences, the most important first."""
    return [
        _fastest(report),
        *_prices(report),
        *_waiting(report),
        *_bits(report),
        *_limits(report),
    ]


def best(report: Report) -> Report | None:
    """The run to choose: the first at the target, or one process if it is close."""
    there = [run for run in report["runs"] if run["to_target"]]
    if not there:
        return None
    first: Report = min(there, key=_seconds)
    alone: Report = report["runs"][0]
    is_close = alone["to_target"] and _seconds(alone) <= (1 + MARGIN) * _seconds(first)
    return alone if is_close else first


def _fastest(report: Report) -> str:
    target, alone = report["target"], report["runs"][0]
    if target is None:
        return "No run has lowered the loss: try another learning rate, or more steps."
    chosen = best(report)
    if chosen is None:
        return f"No run has reached the loss {target:.4g} within the budget."
    what = _goal(report)
    if chosen is alone:
        others = [r for r in report["runs"][1:] if r["to_target"]]
        second = min(others, key=_seconds, default=None)
        first = second is None or _seconds(alone) <= _seconds(second)
        how = "the fastest" if first else f"within {MARGIN:.0%} of the fastest"
        beside = f" ({second['name']}: {_seconds(second):.3g} s)" if second else ""
        return (
            f"One process is {how} to {what}, after {_seconds(alone):.3g} s{beside}: "
            "several processes do not pay for this job on this machine."
        )
    text = f"{chosen['name']}: the fastest to {what}, after "
    text += f"{_seconds(chosen):.3g} s"
    if alone["to_target"]:
        ratio = _seconds(alone) / _seconds(chosen)
        return f"{text}: {ratio:.2f} times as fast as one process."
    return f"{text}; one process has not reached it."


def _goal(report: Report) -> str:
    if report["target_is_given"]:
        return f"the loss {report['target']:.4g}"
    return f"the loss {report['target']:.4g} ({GAIN:.0%} of what one process gains)"


def _prices(report: Report) -> Iterator[str]:
    """What each other mode costs and gains, beside the synchronous one."""
    runs = report["runs"]
    for run in _largest_of_each_mode(runs):
        beside = next((r for r in runs if _is_rival(r, run)), None)
        if run["is_synchronous"]:
            continue
        text = f"{run['name']}: "
        if run["mean_staleness"]:
            text += (
                f"gradients are {run['mean_staleness']:.2f} updates stale on average; "
            )
        if not run["to_target"]:
            yield f"{text}the target is never reached ({_lowest(run)})."
        elif beside is None:
            yield f"{text}the target is reached after {_seconds(run):.3g} s."
        elif not beside["to_target"]:
            yield f"{text}the target is reached, by {beside['name']} it is not."
        else:
            yield text + _price(run, beside)


def _price(run: Report, beside: Report) -> str:
    more = run["to_target"]["examples"] / beside["to_target"]["examples"]
    speed = run["examples_per_second"] / beside["examples_per_second"]
    ratio = _seconds(beside) / _seconds(run)
    return (
        f"it needs {more:.2f} times the examples of {beside['name']} to the target and "
        f"computes {speed:.2f} times as many per second, so it is {ratio:.2f} times as "
        "fast."
    )


def _waiting(report: Report) -> Iterator[str]:
    """How idle workers are, where several of them wait for each other."""
    for run in _largest_of_each_mode(report["runs"]):
        if run["is_synchronous"] and run["workers"] > 1:
            idle = sum(run["idle"]) / len(run["idle"])
            yield f"{run['name']}: workers are idle {idle:.0%} of the time."


def _bits(report: Report) -> Iterator[str]:
    """Whether synchronous runs had the same losses."""
    same = [
        run
        for run in report["runs"]
        if run["is_synchronous"] and not run["is_one_process"]
    ]
    if len(same) < 2:
        return
    shortest = min(run["updates"] for run in same)
    losses = [run["losses"][:shortest] for run in same]
    *most, last = [str(run["workers"]) for run in same]
    number = f"{', '.join(most)} and {last}"
    if all(other == losses[0] for other in losses):
        yield (
            f"The synchronous runs with {number} workers have the same losses to the "
            "last bit."
        )
    else:
        yield f"The synchronous runs with {number} workers have different losses."


def _limits(report: Report) -> Iterator[str]:
    """Whose budget of time was too small for all steps."""
    steps = report["budget"]["steps"]
    short = [run["name"] for run in report["runs"] if run["batches"] < steps]
    if short:
        seconds = report["budget"]["seconds"]
        names = "; ".join(short)
        yield f"Ended by the limit of {seconds:.3g} s, before {steps} steps: {names}."


def _largest_of_each_mode(runs: list[Report]) -> list[Report]:
    """Of each mode the run with most workers."""
    found: dict[str, Report] = {}
    for run in runs:
        if not run["is_one_process"]:
            known = found.get(run["mode"])
            if known is None or run["workers"] > known["workers"]:
                found[run["mode"]] = run
    return list(found.values())


def _is_rival(run: Report, stale: Report) -> bool:
    """Whether a run is the synchronous one to compare another with."""
    is_plain = run["is_synchronous"] and not run["is_one_process"]
    return bool(is_plain and run["workers"] == stale["workers"])


def _lowest(run: Report) -> str:
    lowest: Any = run["lowest_loss"]
    return "no loss is finite" if lowest is None else f"lowest loss {lowest:.4g}"


def _seconds(run: Report) -> float:
    return float(run["to_target"]["seconds"])
