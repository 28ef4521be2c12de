"""Trains a job in one setting and measures it.

The loss of an update is that of its rows, with parameters which a worker may have read
long ago. So the curves show another one: parameters are copied now and then, and after
the run the loss of all copies is computed over the same rows. Neither the copies nor
the start of the workers are in the measured time.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from instep._compare.settings import Setting, alone
from instep._errors import StartError
from instep._job import Job
from instep._lanes import Lanes
from instep._training.batches import batches_between
from instep._training.learner import Learner, load_state
from instep._training.loop import PARTS, Step, take_steps
from instep.modes import Local, Mode

# Copies of the parameters in a run, and bytes of all of them together.
POINTS, MAX_BYTES = 24, 10**9
# Steps, and seconds of slow ones, that are enough to see whether threads help.
TRIAL_STEPS, TRIAL_S = 5, 2.0
# Seconds that all workers of a setting may take to start.
START_S = 180.0

Show = Callable[[float], object]  # is told the part that is done


@dataclass(frozen=True)
class Budget:
    """What every run may use; it ends with what is used up first.

    Attributes:
        steps: batches.
        seconds: of training, or None.
    """

    steps: int
    seconds: float | None = None

    def used(self, batches: int, seconds: float) -> float:
        """The part of it, 0.0 to 1.0."""
        by_time = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(batches / self.steps, by_time))


class Point(NamedTuple):
    """The loss over the sample after so many updates, examples and seconds."""

    updates: int
    examples: float
    seconds: float
    loss: float


@dataclass
class Run:
    """What was measured in one setting.

    Attributes:
        points: of the curve; the first is the start.
        losses: of every update, over its own rows.
        staleness: how many updates were so stale.
        parts: seconds for each of the loop's `PARTS`, of all updates together.
        dropped: rows.
        busy: seconds that each worker has computed.
        batches: that were trained on.
        tries: seconds per update of all runs of this setting.
    """

    setting: Setting
    points: list[Point] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    parts: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    examples: float = 0.0
    seconds: float = 0.0
    dropped: int = 0
    busy: list[float] = field(default_factory=list)
    batches: int = 0
    tries: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.busy = self.busy or [0.0] * self.setting.workers

    def note(self, step: Step) -> None:
        """One more update."""
        self.losses.append(step.loss)
        self.staleness[step.staleness] += 1
        self.parts = [a + b for a, b in zip(self.parts, step.parts, strict=True)]
        self.examples += step.weight
        self.seconds += step.seconds
        self.dropped += step.dropped
        self.busy = list(map(sum, zip(self.busy, step.busy, strict=True)))


@dataclass(frozen=True)
class Course:
    """What all runs have in common.

    Attributes:
        job: what is trained.
        learner: of the job; where a run leaves it does not matter.
        start: its state at the beginning of every run.
        sample: rows that the curves' loss is over.
        budget: when a run ends.
    """

    job: Job
    learner: Learner
    start: dict[str, Any]
    sample: tuple[Any, ...]
    budget: Budget

    @contextmanager
    def pool(self, setting: Setting) -> Iterator[tuple[Any, Mode]]:
        """(pool, mode) of a setting, at the start, when everything is compiled."""
        load_state(self.learner, self.start)
        mode = setting.choice.mode(self.learner)
        with self.job.pool(**setting.options) as pool:
            threads = setting.options["threads"] if setting.is_alone else 1
            self.learner.limit_threads(threads)
            _warm_up(self, pool, mode)
            load_state(self.learner, self.start)
            yield pool, mode

    def loss(self, pool: Any) -> float:
        """The loss of the sample with the learner's present parameters."""
        return float(pool.evaluate(*self.learner.arguments(self.sample)))


def measure(course: Course, setting: Setting, show: Show) -> Run:
    """A run in this setting; `show` is told the part of it that is done."""
    with course.pool(setting) as (pool, mode):
        run = Run(setting)
        copies = _trained(course, pool, mode, run, show)
        with course.learner.evaluating():
            for copy in copies:
                course.learner.load_model_state(copy.state)
                run.points.append(Point(*copy[:-1], course.loss(pool)))
    return run


def fastest(runs: Sequence[Run]) -> Run:
    """The one with the quickest updates: what disturbs it can only make it slower."""
    tries = tuple(run.seconds / len(run.losses) for run in runs)
    return replace(runs[tries.index(min(tries))], tries=tries)


def fastest_alone(course: Course, cores: int) -> Setting:
    """One process with one thread or with one for each core, whichever is faster.

    Some models have operations too small for several threads, and on a machine that
    does other things, too, threads wait for each other.
    """
    seconds = []
    for setting in map(alone, sorted({1, cores})):
        with course.pool(setting) as (pool, mode):
            batches = batches_between(course.job, 0, TRIAL_STEPS)
            steps: list[float] = []
            for step in take_steps(pool, course.learner, batches, mode):
                steps.append(step.seconds)
                if sum(steps) > TRIAL_S:
                    break
        seconds.append((statistics.median(steps), setting))
    return min(seconds, key=itemgetter(0))[1]


def _warm_up(course: Course, pool: Any, mode: Mode) -> None:
    """Every worker computes some batch as it will have to: frameworks compile."""
    before, learner = pool.state_dict(), course.learner
    _wait_for_workers(course, pool)
    if isinstance(mode, Local):
        return  # its processes would end with this stream
    is_whole = mode.parts(pool.shards) == 1  # each batch is for one worker
    turns = pool.statistics().workers if is_whole else 2
    batches = batches_between(course.job, 0, sum(map(mode.batches, range(turns))))
    with pool.stream(batches, mode, params=learner.params) as stream:
        for _ in stream:
            if learner.params is not None:
                stream.publish(learner.params)
    pool.load_state_dict(before)


def _wait_for_workers(course: Course, pool: Any) -> None:
    """Returns when all of them take part."""
    limit = time.monotonic() + START_S
    course.loss(pool)
    while len(pids := pool.statistics().pids) < (workers := _num_processes(pool)):
        if time.monotonic() > limit:
            raise StartError(
                f"{len(pids)} of {workers} workers have started after {START_S:g} s; "
                "try fewer"
            )
        course.loss(pool)


def _num_processes(pool: Any) -> int:
    told = pool.statistics()
    return told.workers if told.engine == "processes" else 0


class _Copy(NamedTuple):
    """The model, and where in the run it was."""

    updates: int
    examples: float
    seconds: float
    state: Any


def _trained(
    course: Course, pool: Any, mode: Mode, run: Run, show: Show
) -> list[_Copy]:
    """Copies of the model from the start to the end."""
    budget, learner, num_points = course.budget, course.learner, _num_points(course)
    copies = [_Copy(0, 0.0, 0.0, learner.model_state())]
    own = batches_between(course.job, 0, mode.batches(0) * isinstance(mode, Local))
    rest = _limited(batches_between(course.job, 0, budget.steps), run, budget)
    prepare = partial(_prepare, course, pool, mode)
    show(0.0)
    for step in take_steps(pool, learner, chain(own, rest), mode, prepare):
        run.note(step)
        used = budget.used(run.batches, run.seconds)
        show(used)
        if used * num_points >= len(copies):
            copies.append(_copy(run, learner))
    if copies[-1].updates < len(run.losses):
        copies.append(_copy(run, learner))
    return copies


def _prepare(course: Course, pool: Any, mode: Mode, stream: Any) -> None:
    """Where workers take steps of their own, each stream begins with new processes."""
    _wait_for_workers(course, pool)
    if not isinstance(mode, Local):
        return
    next(stream)  # they compile
    stream._lanes = Lanes(mode)  # and forget what their optimizers remember
    load_state(course.learner, course.start)
    if course.learner.params is not None:
        stream.publish(course.learner.params)


def _limited(batches: Iterable[Any], run: Run, budget: Budget) -> Iterator[Any]:
    """The batches, counted, until the time is used up."""
    for batch in batches:
        if budget.used(0, run.seconds) >= 1.0:
            return
        run.batches += 1
        yield batch


def _copy(run: Run, learner: Learner) -> _Copy:
    return _Copy(len(run.losses), run.examples, run.seconds, learner.model_state())


def _num_points(course: Course) -> int:
    """As many copies as memory can hold with ease."""
    nbytes = sum(array.nbytes for array in course.learner.arrays())
    return max(2, min(POINTS, MAX_BYTES // max(1, nbytes)))
