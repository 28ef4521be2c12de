"""Brings parcels to workers and answers back, one by one; nobody waits for all.

A parcel is a shard with frames of its own. That of a worker that dies or hangs goes to
another one, with the same frames, hence to the same bits.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from instep._blame import deadly, failure, overdue
from instep._dispatch import Counters
from instep._events import Events
from instep._options import Options
from instep._program import Task
from instep.engines._base import Done, Engine, Event, Failed, Kept, Lost

_ADVICE = "smaller batches"


class Parcel(NamedTuple):
    """A shard to be computed, and how errors call it."""

    task: Task
    kept: Kept
    what: str


class Courier:
    """What is under way of one stream."""

    def __init__(
        self, engine: Engine, options: Options, counters: Counters, events: Events
    ) -> None:
        self._engine = engine
        self._timeout, self._retries = options.timeout, options.retries
        self._counters, self._events = counters, events
        self._running: dict[int, Parcel] = {}
        self._due: dict[int, float] = {}
        self._again: deque[Parcel] = deque()
        self._losses: Counter[int] = Counter()

    @property
    def is_waiting(self) -> bool:
        """Whether there are parcels without an answer."""
        return bool(self._running or self._again)

    def idle(self) -> list[int]:
        """Workers that have nothing to do, after those have work whose had died."""
        for worker in self._engine.idle():
            if self._again:
                self.submit(worker, self._again.popleft())
        return self._engine.idle()

    def submit(self, worker: int, parcel: Parcel) -> None:
        """Gives an idle worker a parcel."""
        if self._events.is_on:
            self._events.hand_out(worker, parcel.task)
        self._engine.submit(worker, parcel.task, parcel.kept)
        self._running[worker] = parcel
        if self._timeout is not None:
            self._due[worker] = time.monotonic() + self._timeout

    def again(self, parcel: Parcel, reason: str) -> None:
        """Has a parcel computed once more, by whoever is idle."""
        self._again.append(parcel)
        self._counters.shards_recomputed += 1
        if self._events.is_on:
            self._events.again(parcel.task, reason)

    def wait(self) -> list[tuple[Parcel, Done]]:
        """Answers, after something has happened.

        Raises:
            WorkerLostError: a parcel ended `retries + 1` workers.
            ShardTimeoutError: one took longer than `timeout` as often.
            Exception: what the loss raised.
        """
        answers: list[tuple[Parcel, Done]] = []
        events = self._engine.wait(self._time_left())
        self._handle_all(events, answers)
        self._replace_overdue()
        return answers

    def _handle_all(
        self, events: Sequence[Event], answers: list[tuple[Parcel, Done]]
    ) -> None:
        """Handles events; those after an error are deaths to remember, or nothing."""
        rest = iter(events)
        try:
            for event in rest:
                self._handle(event, answers)
        finally:
            for event in rest:
                if isinstance(event, Lost):
                    self._take_back(event.worker, event.reason)

    def _handle(self, event: Event, answers: list[tuple[Parcel, Done]]) -> None:
        self._due.pop(event.worker, None)
        if self._events.is_on:
            self._events.hear(event)
        if isinstance(event, Lost):
            parcel = self._take_back(event.worker, event.reason)
            if parcel is not None:
                reason = event.worker, parcel.what, event.reason
                raise deadly(*reason, self._retries, _ADVICE)
            return
        parcel = self._running.pop(event.worker, None)
        if isinstance(event, Failed) and (event.at_start or parcel is not None):
            raise failure(event, "" if parcel is None else parcel.what)
        if isinstance(event, Done) and parcel is not None:
            self._counters.count(event)
            answers.append((parcel, event))

    def _take_back(self, worker: int, reason: str) -> Parcel | None:
        """Replaces the worker; its parcel goes to another or, if it may not, here."""
        self._counters.workers_lost += 1
        self._engine.replace(worker)
        if self._events.is_on:
            self._events.lose(worker, reason)
        parcel = self._running.pop(worker, None)
        if parcel is None:
            return None
        self._losses[parcel.kept.key] += 1
        if self._losses[parcel.kept.key] > self._retries:
            return parcel
        self.again(parcel, f"worker {worker} lost")
        return None

    def _time_left(self) -> float | None:
        if not self._due:
            return None
        return max(0.0, min(self._due.values()) - time.monotonic())

    def _replace_overdue(self) -> None:
        now = time.monotonic()
        for worker in [w for w, due in self._due.items() if due <= now]:
            del self._due[worker]
            parcel = self._take_back(worker, f"no answer in {self._timeout} s")
            if parcel is not None:
                limits = self._timeout, self._retries
                raise overdue(worker, parcel.what, *limits, _ADVICE)
