"""The errors of shards that fail: what happened, where, and what to try."""

from __future__ import annotations

from instep._errors import ShardTimeoutError, StartError, WorkerLostError
from instep._exceptions import with_origin
from instep.engines._base import Failed


def failure(event: Failed, what: str) -> BaseException:
    """The loss's own error, or that a worker could not start.

    Args:
        event: what the worker said.
        what: which shard it was given.
    """
    worker = f"worker {event.worker}" + (f" ({event.where})" if event.where else "")
    if not event.at_start:
        return with_origin(event.error, event.text, f"{what}, on {worker}")
    error = StartError(
        f"{worker} could not start: {type(event.error).__name__}: {event.error}"
    )
    return with_origin(error, event.text, f"{worker}, at its start")


def deadly(worker: int, what: str, reason: str, retries: int, advice: str) -> Exception:
    """A shard has ended one worker too many."""
    return WorkerLostError(
        f"Worker {worker} stopped while computing {what} ({reason}), as did {retries} "
        "before it. The loss may end the process, or the system have run out of "
        f"memory; try {advice}."
    )


def overdue(
    worker: int, what: str, timeout: float | None, retries: int, advice: str
) -> Exception:
    """A shard has taken too long once too often."""
    return ShardTimeoutError(
        f"Worker {worker} took longer than timeout={timeout} s for {what}, as did "
        f"{retries} before it. Give more time, or {advice}."
    )
