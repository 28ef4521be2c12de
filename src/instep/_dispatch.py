"""Drives one call: hands out shards, waits, recomputes what was lost.

Every wait ends by an answer, a death or a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from instep._blame import deadly, failure, overdue
from instep._events import Events
from instep._options import Options
from instep._pace import Pace
from instep._program import Program, Task
from instep._schedule import Schedule
from instep.engines._base import Done, Engine, Event, Failed, Lost


@dataclass(slots=True)
class Counters:
    """What has happened since the pool was made."""

    workers_lost: int = 0
    shards_recomputed: int = 0
    shards_late: int = 0
    shards_computed: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def count(self, done: Done) -> None:
        """Adds a shard to its worker's account."""
        worker = done.worker
        self.shards_computed[worker] = self.shards_computed.get(worker, 0) + 1
        self.seconds[worker] = self.seconds.get(worker, 0.0) + done.seconds


class Dispatcher:
    """Hands the shards of one call after the other to an engine's workers."""

    def __init__(self, engine: Engine, options: Options) -> None:
        assert options.workers is not None
        self._engine = engine
        self._workers = list(range(options.workers))
        self._threads = options.threads or 1
        self._timeout = options.timeout
        self._retries = options.retries
        self._due: dict[int, float] = {}  # busy workers and when they are overdue
        self._since: dict[int, float] = {}  # and when they were given their shard
        self._pace = Pace()
        self.counters = Counters()
        self.events = Events()

    def start(self, program: Program) -> None:
        """Starts the workers with this program, in place of those there are."""
        self._due.clear()
        self._pace = Pace()
        self.events.abandon()
        self._engine.start(program, len(self._workers), self._threads)

    def resize(self, workers: int) -> None:
        """Starts more workers, which join when they are ready, or ends some."""
        for worker in self._workers[workers:]:
            self._due.pop(worker, None)
        self.events.abandon(self._workers[workers:])
        self._workers = list(range(workers))
        self._engine.resize(workers)

    def run(self, tasks: Sequence[Task]) -> list[Done]:
        """The answers to all tasks, in shard order.

        Raises:
            WorkerLostError: a shard ended `retries + 1` workers.
            ShardTimeoutError: a shard took longer than `timeout` as often.
            Exception: what the loss raised in a worker, with its own type.
        """
        call = _Call(tasks, Schedule(len(tasks), self._workers, self._retries))
        self._since.clear()
        self._pace.begin()
        self._handle_all(self._engine.wait(0), call)  # deaths between the calls
        self._limit_stragglers()
        while not call.schedule.is_finished:
            idle = self._assign(call)
            self._handle_all(self._engine.wait(self._time_left(idle, call)), call)
            self._replace_overdue(call)
        self.counters.shards_recomputed += call.schedule.recomputed
        return [call.answers[shard] for shard in range(len(tasks))]

    def abandon(self, *, at_once: bool) -> None:
        """Forgets what is under way; at once: by replacing those who do it."""
        self._engine.abandon(at_once=at_once)
        if at_once:
            self._due.clear()
            self.events.abandon()

    def _limit_stragglers(self) -> None:
        """Who still works on what is over has no longer for it than for a shard."""
        if self._timeout is not None:
            for worker in self._engine.busy():
                self._due.setdefault(worker, time.monotonic() + self._timeout)

    def _assign(self, call: _Call) -> list[int]:
        """Gives idle workers shards that wait, or are late; returns who has none."""
        idle = self._engine.idle()
        for worker, shard in call.schedule.assign(idle):
            idle.remove(worker)
            self._submit(worker, call.tasks[shard])
        if idle:
            for late in self._late(call)[: len(idle)]:
                worker = idle.pop(0)
                self._submit(worker, call.tasks[call.schedule.double(late, worker)])
                self.counters.shards_late += 1
        return idle

    def _submit(self, worker: int, task: Task) -> None:
        if self.events.is_on:
            self.events.hand_out(worker, task)
        self._engine.submit(worker, task)
        self._since[worker] = now = time.monotonic()
        if self._timeout is not None:
            self._due[worker] = now + self._timeout

    def _late(self, call: _Call) -> list[int]:
        """Workers who take too long for their shard, the slowest first."""
        limit = self._pace.limit
        if limit is None or (moment := time.monotonic() - limit) < call.begin:
            return []
        late = [w for w in call.schedule.alone() if self._since[w] <= moment]
        return sorted(late, key=self._since.__getitem__)

    def _handle_all(self, events: Sequence[Event], call: _Call) -> None:
        """Handles events; those after an error are deaths to remember, or nothing."""
        rest = iter(events)
        try:
            for event in rest:
                self._handle(event, call)
        finally:
            for event in rest:
                if isinstance(event, Lost):
                    self._replace(event.worker, call, event.reason)

    def _handle(self, event: Event, call: _Call) -> None:
        self._due.pop(event.worker, None)
        if self.events.is_on:
            self.events.hear(event)
        if isinstance(event, Done):
            self._pace.note(time.monotonic() - self._since[event.worker])
            self.counters.count(event)
            shard = call.schedule.finish(event.worker)
            if shard is not None:
                call.answers[shard] = event
        elif isinstance(event, Failed):
            self._fail(event, call)
        elif isinstance(event, Lost):
            self._lose(event.worker, call, event.reason)

    def _fail(self, event: Failed, call: _Call) -> None:
        shard = None if event.at_start else call.schedule.finish(event.worker)
        if event.at_start or shard is not None:  # else another has answered before
            raise failure(event, f"shard {shard} of {len(call.tasks)}")

    def _lose(self, worker: int, call: _Call, reason: str) -> None:
        shard = self._replace(worker, call, reason)
        if shard is not None:
            what = f"shard {shard} of {len(call.tasks)}"
            advice = f"more, smaller shards: shards={2 * len(call.tasks)}"
            raise deadly(worker, what, reason, self._retries, advice)

    def _replace(self, worker: int, call: _Call, reason: str) -> int | None:
        """Starts another process in a worker's place.

        Returns the shard it leaves if that has no more tries, else None.
        """
        self.counters.workers_lost += 1
        shard = call.schedule.lose(worker)
        self._engine.replace(worker)
        is_over = shard is not None and call.schedule.is_exhausted(shard)
        if self.events.is_on:
            self.events.lose(worker, reason)
            if shard is not None and not is_over:
                self.events.again(call.tasks[shard], f"worker {worker} lost")
        return shard if is_over else None

    def _time_left(self, idle: list[int], call: _Call) -> float | None:
        """Seconds until a worker is overdue, or late while another is idle."""
        now, moments = time.monotonic(), list(self._due.values())
        limit = self._pace.limit
        if idle and limit is not None:
            if now < call.begin + limit:  # before that nobody can be late
                moments.append(call.begin + limit)
            else:
                moments.extend(self._since[w] + limit for w in call.schedule.alone())
        return max(0.0, min(moments) - now) if moments else None

    def _replace_overdue(self, call: _Call) -> None:
        if not self._due:
            return
        now = time.monotonic()
        for worker in [w for w, due in self._due.items() if due <= now]:
            del self._due[worker]
            shard = self._replace(worker, call, f"no answer in {self._timeout} s")
            if shard is not None:
                what, advice = (
                    f"shard {shard} of {len(call.tasks)}",
                    "more, smaller shards",
                )
                raise overdue(worker, what, self._timeout, self._retries, advice)


@dataclass(slots=True)
class _Call:
    tasks: Sequence[Task]
    schedule: Schedule
    answers: dict[int, Done] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)
