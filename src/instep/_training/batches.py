"""Which batches of a job come when, through all epochs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from instep._job import Job


def batches_between(job: Job, start: int, stop: int) -> Iterator[tuple[Any, ...]]:
    """The batches `start` up to `stop` of a training; epoch after epoch.

    Example:
        >>> import numpy as np, instep
        >>> job = instep.Job(np.zeros(1), max, (np.arange(5.0),), batch_size=2)
        >>> [len(x) for (x,) in batches_between(job, 1, 5)]
        [2, 1, 2, 2]
    """
    per_epoch = -(-job.rows // job.batch_size)
    for epoch in range(start // per_epoch, -(-stop // per_epoch)):
        first = epoch * per_epoch
        yield from islice(job.batches(epoch), max(0, start - first), stop - first)
