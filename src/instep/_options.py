"""The keywords that every pool takes, checked before anything starts."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields, replace
from typing import Any

from instep._cores import usable_cores
from instep._errors import ArgumentError
from instep._program import Rule

# What `instep run` gives to options that a script leaves open.
defaults: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The common keywords of all pools.

    Args:
        workers: processes that compute shards. None: as many as this process may
            use (its CPU affinity).
        shards: parts every batch is split into. The bits of a result depend on it,
            so give it a number where they have to be the same on another machine.
            None: equal to `workers`.
        threads: threads each worker may use inside one operation. None: the
            environment's OMP_NUM_THREADS, else 1.
        engine: "processes" (worker processes on this machine), "serial" (this
            process, one shard after the other: for debugging), "mpi" (other ranks of
            an MPI job) or "ray" (actors of a Ray cluster; `instep.engines.Ray(...)`
            with an address); the same bits.
        seed: every random generator a framework uses is seeded from
            (seed, step, shard) before each shard.
        timeout: seconds one shard may take before its worker is replaced and the
            shard computed again; None: no limit.
        retries: how often a shard is computed again after its worker died or
            timed out.
        reduction: "mean" (shards are averaged by weight) or "sum" (added up).
        has_aux: the loss also returns auxiliary data.

    Raises:
        ArgumentError: a value that makes no sense, named with what was expected.
    """

    workers: int | None = None
    shards: int | None = None
    threads: int | None = None
    engine: Any = "processes"
    seed: int = 0
    timeout: float | None = None
    retries: int = 2
    reduction: Rule = "mean"
    has_aux: bool = False

    def with_workers(self, workers: int) -> Options:
        """The same options, for another number of workers; `shards` stays."""
        checked = _at_least(1, "workers", workers, default=usable_cores())
        return replace(self, workers=checked)

    @classmethod
    def of(cls, **keywords: Any) -> Options:
        """The options with every default filled in and every value checked."""
        _check_names(keywords, [field.name for field in fields(cls)])
        open_ones = {k: v for k, v in defaults.items() if keywords.get(k) is None}
        given = cls(**{**keywords, **open_ones})
        default = getattr(given.engine, "workers", None) or usable_cores()
        workers = _at_least(1, "workers", given.workers, default=default)
        options = cls(
            workers=workers,
            shards=_at_least(1, "shards", given.shards, default=workers),
            threads=_at_least(1, "threads", given.threads, default=_omp_threads()),
            engine=given.engine,
            seed=_integer("seed", given.seed),
            timeout=_seconds("timeout", given.timeout),
            retries=_at_least(0, "retries", given.retries, default=2),
            reduction=given.reduction,
            has_aux=bool(given.has_aux),
        )
        if options.reduction not in ("mean", "sum"):
            raise ArgumentError(
                f"reduction={options.reduction!r}; expected 'mean' (shards averaged "
                "by weight) or 'sum' (shards added)"
            )
        return options


def _check_names(given: dict[str, Any], known: list[str]) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {known}"
            raise TypeError(f"unknown keyword {name!r} for an instep pool; {hint}")


def _omp_threads() -> int:
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(text) if text.isdigit() and int(text) > 0 else 1


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{name}={value!r}; expected a whole number")
    return int(value.__index__())


def _at_least(minimum: int, name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if _integer(name, value) < minimum:
        raise ArgumentError(
            f"{name}={value!r}; expected a whole number, at least {minimum}"
            + (f" (leave it out for {default})" if minimum else "")
        )
    return _integer(name, value)


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ArgumentError(f"{name}={value!r}; expected seconds > 0, or None")
    return float(value)
