"""The loop of a training: updates come, the optimizer steps, and time is accounted for.

    batch       the script's part: rows are taken out of the data
    compute     the master waits while the busiest worker computes
    wait        the rest of its waiting: messages, late workers
    average     everything else before the update is there
    optimizer   its step, and the new parameters' publication

In an asynchronous mode workers compute while the master does other things, so "compute"
is what of their computing the master had to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from instep._training.learner import Learner
from instep.modes import Local, Mode

PARTS = ("batch", "compute", "wait", "average", "optimizer")


@dataclass(frozen=True, slots=True)
class Step:
    """One update, and the seconds that it took the master.

    Attributes:
        loss: over the update's rows, with the parameters that were read for it.
        weight: what it counts for: rows, unless the loss returns its own.
        staleness: updates since its parameters were read.
        worker: who computed it; None where several did.
        dropped: rows that did not count.
        batches: taken from the data since the last update.
        parts: seconds for each of `PARTS`.
        busy: seconds for which each worker has computed since the last update.
    """

    loss: float
    weight: float
    staleness: int
    worker: int | None
    dropped: int
    batches: int
    parts: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """From the last update to this one, without what the caller does between."""
        return sum(self.parts)


def take_steps(
    pool: Any,
    learner: Learner,
    batches: Iterable[Any],
    mode: Mode,
    prepare: Callable[[Any], object] = lambda stream: None,
) -> Iterator[Step]:
    """Trains on the batches; yields after every update.

    Where workers take steps of their own (`Local`), the update is the way they went,
    and the parameters go it; else it is a gradient for the job's optimizer.

    Args:
        pool: of the job.
        learner: of the job.
        batches: of the job.
        mode: how gradients become updates.
        prepare: called with the stream before the first step, which is not timed.
    """
    timed = _Timed(batches)
    apply = learner.follow if isinstance(mode, Local) else learner.step
    with pool.stream(timed, mode, params=learner.params) as stream:
        prepare(stream)
        timed.take()
        counted = pool.statistics().seconds
        while True:
            begin = time.perf_counter()
            update = next(stream, None)
            if update is None:
                return
            handed = time.perf_counter()
            apply(update.grads)
            if learner.params is not None:
                stream.publish(learner.params)
            done = time.perf_counter()
            last, counted = counted, pool.statistics().seconds
            busy = tuple(b - a for a, b in zip(last, counted, strict=True))
            taken, batch = timed.take()
            waiting = _waiting(update.wait_seconds, max(busy), batch, handed - begin)
            yield Step(
                loss=float(update.loss),
                weight=update.weight,
                staleness=update.staleness,
                worker=update.worker,
                dropped=len(update.dropped),
                batches=taken,
                parts=(batch, *waiting, done - handed),
                busy=busy,
            )


def _waiting(
    waited: float, computed: float, batch: float, until_handed: float
) -> tuple[float, float, float]:
    """The seconds of "compute", "wait" and "average"."""
    waited = min(waited, until_handed)
    compute = min(computed, waited)
    return compute, waited - compute, max(0.0, until_handed - waited - batch)


class _Timed:
    """Passes batches on, counts them, and adds up how long they take to come."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = iter(batches)
        self._number, self._seconds = 0, 0.0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        begin = time.perf_counter()
        batch = next(self._batches)
        self._seconds += time.perf_counter() - begin
        self._number += 1
        return batch

    def take(self) -> tuple[int, float]:
        """How many since it was last asked, and their seconds."""
        taken = self._number, self._seconds
        self._number, self._seconds = 0, 0.0
        return taken
