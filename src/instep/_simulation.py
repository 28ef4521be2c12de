"""What a mode would do on a cluster that one does not have: a run in simulated time.

The rules are those of `instep.modes`, the very same objects that drive workers. Time is
SimPy's, so that nothing waits and nothing is random but the given distributions.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from instep._errors import ArgumentError, import_error
from instep._program import Array
from instep._times import (
    Compute,
    Network,
    Seconds,
    check_not_negative,
    check_whole,
    sampler,
)
from instep._tree import flatten, leaves_like, unflatten
from instep.modes import Asynchronous, Local, Mode, Replay
from instep.modes._rules import Group, Job, Portion
from instep.modes.corrections import Stale

if TYPE_CHECKING:
    import simpy

Events = Generator[Any, Any, None]  # what SimPy calls a process


def simulate(
    mode: Mode,
    workers: int,
    compute: Compute,
    *,
    steps: int = 100,
    shards: int | None = None,
    parameters: float = 0,
    network: Network | None = None,
    update: float = 0.0,
    seed: int = 0,
    training: Training | None = None,
) -> Simulation:
    """How long updates take, who waits and how stale gradients are, in simulated time.

    Up to some 10,000 workers. The master hands out portions in order, to the idle
    worker of the lowest number first. A worker reads the newest parameters, computes
    and sends its gradient; then it is idle. One whose portion has been dropped
    computes it to the end all the same. The master makes one update after the other;
    a worker whose gradient waits for that begins after it.

    Args:
        mode: any of `instep.modes`.
        workers: how many.
        compute: seconds that a worker computes for one batch of a portion: for a shard
            where the mode splits batches into shards, for a whole batch where it does
            not. A number; one for each worker (worker k takes number k, and begins
            again after the last); a distribution such as `instep.Gamma`; what
            `pool.statistics()` measured, as its mean for each worker; or any
            `compute(worker, generator) -> seconds`. A mode in which a worker computes
            several batches one after the other takes a multiple.
        steps: after so many updates the simulation ends.
        shards: parts of a batch; None: as many as workers.
        parameters: bytes that a worker reads before every portion, and of a gradient.
        network: None: they take no time, as on one machine.
        update: seconds that the master takes for one update.
        seed: of the distributions.
        training: a loss that is really computed.

    Returns:
        A `Simulation`, which prints as a short table.

    Raises:
        ArgumentError: a value that makes no sense.
        MissingFrameworkError: SimPy is not installed.

    Example:
        With one slow worker: whoever waits for all has the pace of the slowest.

        >>> import instep
        >>> slow = instep.OneSlow(1.0, factor=10)
        >>> print(instep.simulate(instep.Synchronous(), 4, slow))
        updates    100 in 1000 s
        step time  10 s
        idle       67.5 % of the workers' time (0.0 % to 90.0 %)
        staleness  0.00 (0 to 0)
        dropped    0.0 % of the portions
        >>> instep.simulate(instep.Asynchronous(), 4, slow).step_time
        0.33

    References:
        Odena, "Faster Asynchronous SGD", 2016, simulates asynchronous training on one
        machine, in order to repeat it. Chen, Pan, Monga, Bengio and Jozefowicz,
        "Revisiting Distributed Synchronous SGD", 2016, choose the number of backup
        workers from measured times. Here one simulator drives all modes, and a late
        worker is not interrupted.
    """
    check_whole(workers=workers, steps=steps)
    if shards is not None:
        check_whole(shards=shards)
    check_not_negative(parameters=parameters, update=update)
    simpy = _simpy()
    env = simpy.Environment()
    links = None if network is None else _Links(simpy, env, network, parameters)
    descent = None if training is None else _Descent(training, mode)
    crew = _Crew(env, workers, sampler(compute), np.random.default_rng(seed), links)
    run = _Run(env, mode, crew, mode.parts(shards or workers), update, steps, descent)
    return run.result()


@dataclass(frozen=True)
class Simulation:
    """What `instep.simulate` found.

    Attributes:
        updates: made; fewer than `steps` only where a record ends.
        seconds: simulated, until the last of them.
        idle: share of that time in which a worker did not compute, but waited for
            others, for the master or for the network; one per worker.
        staleness: how many updates were so stale. An update of several gradients is
            as stale as its stalest.
        dropped: share of the portions that did not count in their update.
        losses: (seconds, loss) of every update, where `training` was given.
    """

    updates: int
    seconds: float
    idle: tuple[float, ...]
    staleness: Mapping[int, int]
    dropped: float
    losses: tuple[tuple[float, float], ...] = ()

    @property
    def step_time(self) -> float:
        """Mean seconds from one update to the next."""
        return self.seconds / self.updates if self.updates else math.nan

    @property
    def mean_idle(self) -> float:
        """Mean of `idle` over the workers."""
        return math.fsum(self.idle) / len(self.idle)

    @property
    def mean_staleness(self) -> float:
        """Mean of an update's staleness."""
        total = sum(stale * number for stale, number in self.staleness.items())
        return total / self.updates if self.updates else math.nan

    def __str__(self) -> str:
        stale = sorted(self.staleness) or [0]
        least, most = min(self.idle), max(self.idle)
        lines = [
            f"updates    {self.updates} in {self.seconds:.4g} s",
            f"step time  {self.step_time:.4g} s",
            f"idle       {self.mean_idle:.1%} of the workers' time "
            f"({least:.1%} to {most:.1%})",
            f"staleness  {self.mean_staleness:.2f} ({stale[0]} to {stale[-1]})",
            f"dropped    {self.dropped:.1%} of the portions",
        ]
        if self.losses:
            lines.append(
                f"loss       {self.losses[0][1]:.4g} to {self.losses[-1][1]:.4g}"
            )
        return "\n".join(lines).replace("%", " %")


@dataclass(frozen=True)
class Training:
    """A loss, its gradient and plain SGD, of which only the time is simulated.

    Each gradient is computed with the parameters that its worker has read, and the
    mode's correction is applied. For modes whose workers take no steps of their own.

    Args:
        gradient: `gradient(params, turn, shard, shards) -> (loss, grad, weight)` of
            part `shard` of `shards` of batch number `turn`: means over its rows, and
            their number. It must not change `params`.
        start: the parameters; an array or a tree of arrays.
        rate: of plain SGD, `w - rate * grad`.

    Example:
        >>> import numpy as np
        >>> import instep
        >>> def gradient(w, turn, shard, shards):
        ...     return float(w * w / 2), w, 1.0
        >>> parabola = instep.Training(gradient, start=np.float64(8), rate=0.5)
        >>> instep.simulate(
        ...     instep.Synchronous(), 2, compute=3.0, steps=3, training=parabola
        ... ).losses
        ((3.0, 32.0), (6.0, 8.0), (9.0, 2.0))
    """

    gradient: Callable[[Any, int, int, int], tuple[float, Any, float]]
    start: Any
    rate: float


class _Run:
    """A master that keeps to a mode's rules."""

    def __init__(
        self,
        env: simpy.Environment,
        mode: Mode,
        crew: _Crew,
        parts: int,
        update: float,
        steps: int,
        descent: _Descent | None,
    ) -> None:
        self._env, self._mode, self._crew, self._descent = env, mode, crew, descent
        self._update, self._steps = update, steps
        self._rules = mode.rules(crew.size)
        self._idle = list(range(crew.size))  # a heap
        self._engaged: Counter[int] = Counter()  # worker -> gradients that wait
        self._asleep: set[int] = set()  # idle, but for those
        self._worker_of: dict[Portion, int] = {}
        self._portion = Portion(0, 0, parts)  # the next
        self._waiting: deque[Group] = deque()
        self._is_updating = False
        self._version = 0
        self._staleness: Counter[int] = Counter()
        self._num_counted = self._num_dropped = 0

    def result(self) -> Simulation:
        """Runs until all updates are made, or nothing more can happen."""
        self._offer()
        while not self._is_done and self._env.peek() < math.inf:
            self._env.step()
        for group in self._rules.finish():
            self._apply(group)
        decided = self._num_counted + self._num_dropped
        return Simulation(
            updates=self._version,
            seconds=self._env.now,
            idle=self._crew.idle(),
            staleness=dict(sorted(self._staleness.items())),
            dropped=self._num_dropped / max(1, decided),
            losses=tuple(self._descent.losses) if self._descent else (),
        )

    @property
    def _is_done(self) -> bool:
        return self._version >= self._steps

    def _offer(self) -> None:
        """Has idle workers begin, until one may not: the rules look at no names."""
        while self._idle:
            while self._rules.skips(self._portion):
                self._portion = _after(self._portion)
            worker = self._idle[0]
            if worker in self._engaged:  # it reads its own update next
                self._asleep.add(heapq.heappop(self._idle))
            elif self._rules.may_start(worker, self._portion, self._version):
                self._start(heapq.heappop(self._idle))
            else:
                return

    def _start(self, worker: int) -> None:
        portion, self._portion = self._portion, _after(self._portion)
        job = Job(portion, self._version, self._rules.lane(worker, portion))
        self._worker_of[portion] = worker
        self._rules.start(job)
        if self._descent:
            self._descent.read(portion)
        self._env.process(self._work(worker, job))

    def _work(self, worker: int, job: Job) -> Events:
        yield from self._crew.work(worker, self._mode.batches(job.portion.turn))
        heapq.heappush(self._idle, worker)
        for group in self._rules.arrive(job):
            self._waiting.append(group)
            self._engaged.update(self._worker_of[job.portion] for job in group.jobs)
        self._offer()
        if self._waiting and not self._is_updating:
            self._is_updating = True
            self._env.process(self._update_all())

    def _update_all(self) -> Events:
        """One update after the other; who has pushed pulls after it, not before."""
        while self._waiting and not self._is_done:
            if self._update:
                yield self._env.timeout(self._update)
            group = self._waiting.popleft()
            self._apply(group)
            self._release(group)
            self._offer()
        self._is_updating = False
        yield from ()  # a process is a generator, even if it takes no time

    def _apply(self, group: Group) -> None:
        if self._is_done:
            return
        self._staleness[max(self._version - job.version for job in group.jobs)] += 1
        self._num_counted += len(group.jobs)
        self._num_dropped += len(group.dropped)
        if self._descent:
            self._descent.apply(group, self._version, self._env.now)
        self._version += 1
        # What is dropped and has not been begun will not be.
        if self._portion in group.dropped:
            turn, _, shards = self._portion
            self._portion = Portion(turn + 1, 0, shards)

    def _release(self, group: Group) -> None:
        """The workers of this group may begin again."""
        for portion in group.dropped:
            self._worker_of.pop(portion, None)
        for job in group.jobs:
            worker = self._worker_of.pop(job.portion)
            self._engaged[worker] -= 1
            if not self._engaged[worker]:
                del self._engaged[worker]
                if worker in self._asleep:
                    self._asleep.discard(worker)
                    heapq.heappush(self._idle, worker)


class _Crew:
    """The workers, and how long each of them has computed."""

    def __init__(
        self,
        env: simpy.Environment,
        size: int,
        seconds: Seconds,
        generator: np.random.Generator,
        links: _Links | None,
    ) -> None:
        self.size = size
        self._env, self._links = env, links
        self._seconds, self._generator = seconds, generator
        self._busy = [0.0] * size  # seconds, with those that are yet to pass
        self._until = [0.0] * size

    def work(self, worker: int, batches: int) -> Events:
        """Reads, computes and sends."""
        if self._links:
            yield from self._links.read()
        seconds = self._seconds(worker, self._generator) * batches
        if not seconds >= 0:
            raise ArgumentError(
                f"compute gave {seconds!r} s for worker {worker}; expected seconds >= 0"
            )
        self._busy[worker] += seconds
        self._until[worker] = self._env.now + seconds
        yield self._env.timeout(seconds)
        if self._links:
            yield from self._links.send()

    def idle(self) -> tuple[float, ...]:
        """The share of the time until now that each has not computed."""
        now = self._env.now or math.inf
        pairs = zip(self._busy, self._until, strict=True)
        spent = [busy - max(0.0, until - now) for busy, until in pairs]
        return tuple(min(1.0, max(0.0, 1 - seconds / now)) for seconds in spent)


class _Links:
    """The master's line out and its line in."""

    def __init__(
        self, simpy: Any, env: simpy.Environment, network: Network, size: float
    ) -> None:
        self._env, self._network = env, network
        self._seconds = size / network.bandwidth
        self._out, self._in = simpy.Resource(env), simpy.Resource(env)

    def read(self) -> Events:
        """Parameters travel to a worker."""
        return self._transfer(self._out)

    def send(self) -> Events:
        """A gradient travels to the master."""
        return self._transfer(self._in)

    def _transfer(self, line: simpy.Resource) -> Events:
        with line.request() as turn:
            yield turn
            yield self._env.timeout(self._seconds)
        yield self._env.timeout(self._network.latency)


class _Descent:
    """Parameters, and what the workers have read of them."""

    def __init__(self, training: Training, mode: Mode) -> None:
        recorded = mode.head.mode if isinstance(mode, Replay) else mode
        if _has_own_steps(recorded):
            raise ArgumentError(
                f"training= with {mode!r}: its workers take steps of their own, and "
                "only their time is simulated; leave training= out, or take a mode "
                "without such steps"
            )
        correction = getattr(recorded, "correction", None)
        self._correction = correction.fresh() if correction else None
        self._gradient, self._rate = training.gradient, training.rate
        leaves, self._structure = flatten(training.start)
        self._params: list[Array] = [np.asarray(leaf) for leaf in leaves]
        self._read: dict[Portion, list[Array]] = {}
        self.losses: list[tuple[float, float]] = []

    def read(self, portion: Portion) -> None:
        """Whoever computes this portion has the parameters of now."""
        self._read[portion] = self._params

    def apply(self, group: Group, version: int, seconds: float) -> None:
        """One update."""
        reads = [self._read.pop(job.portion) for job in group.jobs]
        pairs = zip(group.jobs, reads, strict=True)
        loss, grads = _mean([self._answer(job.portion, read) for job, read in pairs])
        if self._correction:
            (job,), (read,) = group.jobs, reads
            age = version - job.version
            stale = Stale(grads, self._params, read, age, job.worker)
            grads = self._correction.correct(stale)
        for portion in group.dropped:
            self._read.pop(portion, None)
        pairs_of_arrays = zip(self._params, grads, strict=True)
        self._params = [np.asarray(w - self._rate * g) for w, g in pairs_of_arrays]
        self.losses.append((seconds, loss))

    def _answer(
        self, portion: Portion, read: list[Array]
    ) -> tuple[float, list[Array], float]:
        params = unflatten(self._structure, read)
        loss, grad, weight = self._gradient(params, *portion)
        leaves = leaves_like(grad, self._structure)
        return float(loss), [np.asarray(leaf) for leaf in leaves], float(weight)


def _has_own_steps(mode: Mode) -> bool:
    if isinstance(mode, Asynchronous):
        return (mode.fetch or mode.push) > 1
    return isinstance(mode, Local)


def _mean(
    answers: Sequence[tuple[float, list[Array], float]],
) -> tuple[float, list[Array]]:
    """Loss and gradients, averaged by weight."""
    total = math.fsum(weight for _, _, weight in answers)
    shares = [weight / total for _, _, weight in answers]
    losses, grads, _ = zip(*answers, strict=True)
    loss = math.fsum(share * loss for share, loss in zip(shares, losses, strict=True))
    return loss, [_weighted(shares, leaves) for leaves in zip(*grads, strict=True)]


def _weighted(shares: Sequence[float], arrays: Sequence[Array]) -> Array:
    first, *rest = (s * a for s, a in zip(shares, arrays, strict=True))
    return np.asarray(sum(rest, first))


def _after(portion: Portion) -> Portion:
    turn, shard, shards = portion
    last = shard + 1 == shards
    return Portion(turn + 1, 0, shards) if last else Portion(turn, shard + 1, shards)


def _simpy() -> Any:
    try:
        import simpy
    except ImportError as error:
        raise import_error("SimPy", "simulate") from error
    return simpy
