"""Every error instep raises: what happened, what was expected, what to try.

An exception raised by the user's loss is not in this list: it reaches the master
with its own type, and the worker's traceback as its cause.
"""

from __future__ import annotations

from collections.abc import Sequence


class InstepError(Exception):
    """Base of all errors raised by instep itself."""


class ArgumentError(InstepError, ValueError):
    """A keyword of a pool has a value that makes no sense."""


class BatchError(InstepError, ValueError):
    """The batch cannot be split into shards."""


class LossError(InstepError, TypeError):
    """The loss returned something that is not a number to average."""


class GradientError(InstepError, ValueError):
    """A gradient does not have the structure, shape or dtype of its parameter."""


class ShipError(InstepError, TypeError):
    """The loss, or something it uses, cannot be sent to another process."""


class WorkerError(InstepError, RuntimeError):
    """A worker raised an exception that could not travel; its text is quoted."""


class WorkerLostError(InstepError, RuntimeError):
    """A shard ended `retries + 1` workers, or workers no longer start."""


class OutputsLostError(WorkerLostError):
    """A machine is gone, and with it outputs that were to be averaged.

    The pool has their shards computed again; it is raised only if that fails, too.

    Attributes:
        keys: of the outputs, as of kept frames.
    """

    def __init__(self, message: str, keys: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.keys = keys


class ShardTimeoutError(WorkerLostError, TimeoutError):
    """A shard took longer than `timeout` seconds in `retries + 1` workers."""


class StartError(WorkerLostError):
    """Workers do not start at all; the pool is broken."""


class PoolClosedError(InstepError, RuntimeError):
    """The pool was used after `close`."""


class PoolBrokenError(InstepError, RuntimeError):
    """The pool's processes are gone and could not be started again."""


class EngineUnavailableError(InstepError, ValueError):
    """There is no such engine, or it does not run on this system."""


class MissingFrameworkError(InstepError, ImportError):
    """An optional framework is not installed."""


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker, as text; used as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def import_error(framework: str, extra: str) -> MissingFrameworkError:
    """The error for a framework that is not installed, with the way to get it."""
    return MissingFrameworkError(
        f"instep.{extra} needs {framework}, which is not installed here; "
        f"install it with: pip install 'instep[{extra}]'"
    )
