"""The cores: how many there are, who runs on which, and who comes first.

Where the workers take exactly all cores, each has its own: the scheduler then cannot
wake two of them on one core, where they share it for milliseconds until it notices.
Where cores are free, or there are too few, the scheduler does better.
"""

from __future__ import annotations

import contextlib
import os


def usable_cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def own_cores(worker: int, workers: int, threads: int, usable: set[int]) -> set[int]:
    """The cores that a worker with so many threads should run on."""
    if workers * threads != len(usable):
        return usable
    return set(sorted(usable)[worker * threads : (worker + 1) * threads])


def move_to_own_cores(pid: int, worker: int, workers: int, threads: int) -> None:
    """Moves a worker's process to its cores, where the system can."""
    if hasattr(os, "sched_getaffinity"):
        move_to(pid, own_cores(worker, workers, threads, os.sched_getaffinity(0)))


def move_to(pid: int, cores: set[int]) -> None:
    """Moves a process to these cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # it has ended, or a sandbox forbids it
            os.sched_setaffinity(pid, cores)


def yield_to_others() -> None:
    """Has this process wait for its turn when it wakes up, where the system can.

    Else a worker that is given its shard takes the core from the master, which has
    the other workers' shards still to give.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
