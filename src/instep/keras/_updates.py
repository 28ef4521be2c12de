"""Metrics that a model updates while it computes its loss.

In the workers they only note what they were given; the master gives them the same of
the whole batch: scalars as the mean over the shards, rows in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from instep._values import Sum

Update = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one call of `update_state`."""


@contextmanager
def noted(metrics: Sequence[Any]) -> Iterator[list[list[Update]]]:
    """Inside, metrics list what they are given, one list each, and do no more."""
    updates: list[list[Update]] = [[] for _ in metrics]

    def note(given: list[Update]) -> Any:
        def update_state(*args: Any, **kwargs: Any) -> None:
            given.append(_added(args, kwargs))

        return update_state

    for metric, given in zip(metrics, updates, strict=True):
        metric.update_state = note(given)
    try:
        yield updates
    finally:
        for metric in metrics:
            del metric.update_state


def replay(metrics: Sequence[Any], updates: Sequence[Sequence[Update]]) -> None:
    """Updates the metrics with what was noted."""
    for metric, given in zip(metrics, updates, strict=True):
        for args, kwargs in given:
            metric.update_state(*args, **kwargs)


def _added(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Update:
    """The arguments; a scalar `sample_weight` counts rows, which add up."""
    *first, weight = args
    if len(args) > 1:
        args = (*first, _sum_of_scalar(weight))
    if "sample_weight" in kwargs:
        weight = kwargs["sample_weight"]
        kwargs = {**kwargs, "sample_weight": _sum_of_scalar(weight)}
    return args, kwargs


def _sum_of_scalar(weight: Any) -> Any:
    is_scalar = weight is not None and len(getattr(weight, "shape", ())) == 0
    return Sum(weight) if is_scalar else weight
