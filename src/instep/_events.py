"""What happens in a pool, for those who watch it: a trace, a live page.

    dispatcher, courier ──┐
    pool, stream ─────────┴──> Events ──> watchers

The hot path asks `is_on` and does no more where nobody watches. Times are those of
`time.perf_counter`, in seconds, as the master sees them: a worker's shard begins when
it is handed out and ends when the master has read the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from instep._program import Task
from instep.engines._base import Done, Failed, Lost, Ready

# What the master does; exactly one of them at any time.
SCRIPT = "script"
BATCH = "next batch"
PUBLISH = "split, publish"
WAIT = "wait"
AVERAGE = "average"

# Of a shard without an answer yet.
UNDER_WAY = "under way"


class Phase(NamedTuple):
    """What the master did for a while; the next phase begins where this one ends."""

    name: str
    begin: float
    end: float


class Computed(NamedTuple):
    """A shard was in a worker's hands.

    Attributes:
        step: of the pool; in a stream, the number of the batch.
        seconds: that the worker says it computed; 0.0 without an answer.
        outcome: "" for an answer, else what came instead.
    """

    worker: int
    step: int
    shard: int
    shards: int
    begin: float
    end: float
    seconds: float
    outcome: str


class Updated(NamedTuple):
    """A gradient was handed over.

    Attributes:
        step: how many were handed over before.
        rows: that count.
        worker: who computed it; None where several did.
        dropped: rows that do not count.
    """

    step: int
    loss: float
    rows: int
    staleness: int
    worker: int | None
    dropped: int
    end: float


class Fault(NamedTuple):
    """What went wrong, and what was done about it; worker None: the master's."""

    text: str
    worker: int | None
    reason: str
    end: float


Happening = Phase | Computed | Updated | Fault


class Watcher(Protocol):
    """Who is told; `end` is when something was over, and so told."""

    def note(self, happening: Happening, /) -> None:
        """Something has happened; returns soon, since a step waits for it."""

    def close(self) -> None:
        """The pool is closed."""


class Events:
    """What happens in one pool.

    Attributes:
        is_on: somebody watches.
        call: a context: inside, the pool is at work, and not the script.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.call = _Call(self)
        self._watchers: tuple[Watcher, ...] = ()
        self._phase, self._since = SCRIPT, 0.0
        self._hands: dict[int, tuple[Task, float]] = {}  # who computes what since when

    def watch(self, watcher: Watcher) -> None:
        """Tells this watcher, too, from now on."""
        if not self.is_on:
            self._phase, self._since = SCRIPT, perf_counter()
            self._hands.clear()
        self._watchers = (*self._watchers, watcher)
        self.is_on = True

    def unwatch(self, watcher: Watcher) -> None:
        """Tells this one no more, after what is under way."""
        if watcher not in self._watchers:
            return
        for one in self.under_way():
            watcher.note(one)
        self._watchers = tuple(w for w in self._watchers if w is not watcher)
        self.is_on = bool(self._watchers)

    def under_way(self) -> list[Phase | Computed]:
        """What has begun and is not over, as if it were; from any thread."""
        now, hands = perf_counter(), list(self._hands.items())
        shards = [_computed(w, *held, now, 0.0, UNDER_WAY) for w, held in hands]
        return [Phase(self._phase, self._since, now), *shards]

    def close(self) -> None:
        """Closes all who watch."""
        for watcher in self._watchers:
            watcher.close()

    # What the pool says; to be called while `is_on`

    def phase(self, name: str) -> str:
        """The master does this from now on; returns what it did before."""
        before = self._phase
        if name != before:
            now = perf_counter()
            self._tell(Phase(before, self._since, now))
            self._phase, self._since = name, now
        return before

    def hand_out(self, worker: int, task: Task) -> None:
        """A worker has been given a shard."""
        self._take_back(worker, "abandoned")
        self._hands[worker] = task, perf_counter()

    def hear(self, event: Done | Failed | Lost | Ready) -> None:
        """A worker has answered."""
        if isinstance(event, Done):
            self._take_back(event.worker, "", event.seconds)
        elif isinstance(event, Failed):
            self._take_back(event.worker, "failed")
        elif isinstance(event, Ready):
            self._take_back(event.worker, "not needed")

    def lose(self, worker: int, reason: str) -> None:
        """A worker is gone."""
        self._take_back(worker, "lost")
        self._tell(Fault(f"worker {worker} lost", worker, reason, perf_counter()))

    def again(self, task: Task, reason: str) -> None:
        """A shard has to be computed again."""
        text = f"shard {task.shard} of step {task.step} computed again"
        self._tell(Fault(text, None, reason, perf_counter()))

    def abandon(self, workers: Iterable[int] | None = None) -> None:
        """Nobody waits for these workers' shards, or for any."""
        for worker in list(self._hands if workers is None else workers):
            self._take_back(worker, "abandoned")

    def update(
        self,
        step: int,
        loss: float,
        rows: int,
        staleness: int = 0,
        worker: int | None = None,
        dropped: int = 0,
    ) -> None:
        """A gradient is handed over."""
        now = perf_counter()
        self._tell(Updated(step, loss, rows, staleness, worker, dropped, now))

    def _take_back(self, worker: int, outcome: str, seconds: float = 0.0) -> None:
        """What the worker had in its hands is over."""
        if (held := self._hands.pop(worker, None)) is None:
            return
        self._tell(_computed(worker, *held, perf_counter(), seconds, outcome))

    def _tell(self, happening: Happening) -> None:
        for watcher in self._watchers:
            watcher.note(happening)


def _computed(
    worker: int, task: Task, begin: float, end: float, seconds: float, outcome: str
) -> Computed:
    number = task.step, task.shard, task.shards
    return Computed(worker, *number, begin, end, seconds, outcome)


class Batches:
    """The script's batches; taking one is a phase of the master."""

    def __init__(self, events: Events, batches: Iterable[Any]) -> None:
        self._events, self._batches = events, iter(batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._events.is_on:
            return next(self._batches)
        before = self._events.phase(BATCH)
        try:
            return next(self._batches)
        finally:
            self._events.phase(before)


class _Call:
    """From the beginning of a pool's call to its end."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def __enter__(self) -> None:
        if self._events.is_on:
            self._events.phase(PUBLISH)

    def __exit__(self, *error: object) -> None:
        if self._events.is_on:
            self._events.phase(SCRIPT)
