"""Every gradient is an update of its own, as soon as it is there.

Downpour SGD: Dean et al., "Large Scale Distributed Deep Networks", 2012.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from instep._errors import ArgumentError
from instep.modes._rules import Group, Job, Portion, Rules
from instep.modes.corrections import Correction


@dataclass(frozen=True)
class Asynchronous:
    """One update per batch, which one worker computes whole.

    A worker reads the newest parameters, computes, and its gradient is applied when it
    arrives, though others may have been applied meanwhile: their number is the update's
    `staleness`. Nobody waits for anybody. With one worker this is plain SGD, bit for
    bit. Equally fast workers settle at a staleness of workers - 1.

    Give it batches of the size that one worker should have.

    Downpour SGD with `n_fetch = n_push = 1` is the default, and Adagrad the master's
    optimizer. With `push=n`, a worker takes n steps by itself, `w -= rate * g`, and
    hands over the sum of its n gradients; with `fetch=m`, it reads the master's
    parameters only every m steps, a multiple of `push`, and goes on with its own in
    between.

    Args:
        max_staleness: no update is staler. Workers wait where it would be exceeded;
            nothing is dropped. None: no bound.
        correction: what is done to a stale gradient; `instep.StalenessAware()` or
            `instep.DelayCompensated(...)`.
        push: steps a worker takes before it hands over what it has gathered.
        fetch: steps after which a worker reads parameters; None: as `push`.
        rate: of the worker's own steps; needed where `push` or `fetch` is above 1.
        warm_start: so many updates are made with one worker before the others join.

    Raises:
        ArgumentError: a number that makes no sense, or `rate` is missing.

    Example:
        >>> import instep
        >>> mode = instep.Asynchronous(max_staleness=4)
    """

    max_staleness: int | None = None
    correction: Correction | None = None
    push: int = 1
    fetch: int | None = None
    rate: float | None = None
    warm_start: int = 0

    def __post_init__(self) -> None:
        limit = self.max_staleness
        if limit is not None and (type(limit) is not int or limit < 0):
            raise ArgumentError(
                f"max_staleness={limit!r}; expected a whole number, at least 0, or None"
            )
        fetch = self.push if self.fetch is None else self.fetch
        for name, value, least in (
            ("push", self.push, 1),
            ("fetch", fetch, 1),
            ("warm_start", self.warm_start, 0),
        ):
            if type(value) is not int or value < least:
                raise ArgumentError(
                    f"{name}={value!r}; expected a whole number, at least {least}"
                )
        if fetch % self.push:
            raise ArgumentError(
                f"fetch={fetch} is no multiple of push={self.push}; a worker reads "
                "parameters only when it begins to gather gradients"
            )
        if fetch > 1 and self.rate is None:
            raise ArgumentError(
                "a worker that takes steps by itself needs their rate: rate=0.01"
            )

    def rules(self, workers: int) -> AsynchronousRules:
        """The rules of a new run."""
        return AsynchronousRules(self.max_staleness, self.warm_start)

    def parts(self, shards: int) -> int:
        """One: a worker computes a batch whole."""
        return 1

    def batches(self, turn: int) -> int:
        """As many as a worker gathers."""
        return self.push


class AsynchronousRules(Rules):
    """Applies on arrival, unless that would make another gradient too stale.

    A job is open from its start until its update is issued. All can be in time if they
    would be when issued oldest first: if, for every version, the open jobs that have
    read it or an older one are not more than the updates until it is too old.
    """

    def __init__(self, max_staleness: int | None, warm_start: int = 0) -> None:
        self._limit = max_staleness
        self._warm_start = warm_start
        self._issued = 0  # updates, whether applied or about to be
        self._open: Counter[int] = Counter()  # version -> jobs
        self._num_open = 0
        self._held: list[Job] = []

    def may_start(self, worker: int, portion: Portion, version: int) -> bool:
        is_warm = self._issued >= self._warm_start
        if not is_warm and (self._num_open > len(self._held) or version < self._issued):
            return False
        # No open job has read a newer version: this one would be the last.
        is_late = self._limit is not None and (
            self._issued + self._num_open - version > self._limit
        )
        return not is_late

    def start(self, job: Job) -> None:
        self._open[job.version] += 1
        self._num_open += 1

    def arrive(self, job: Job) -> Sequence[Group]:
        self._held.append(job)
        groups = []
        while (due := self._due()) is not None:
            self._issue(due)
            groups.append(Group((due,)))
        return groups

    def _issue(self, job: Job) -> None:
        self._held.remove(job)
        self._issued += 1
        self._num_open -= 1
        self._open[job.version] -= 1
        if not self._open[job.version]:
            del self._open[job.version]

    def _due(self) -> Job | None:
        """The first of those held after which all others can still be in time."""
        if not self._held:
            return None
        tight = self._tight()
        return next((job for job in self._held if job.version <= tight), None)

    def _tight(self) -> float:
        """The oldest version before whose jobs no other update has a place."""
        if self._limit is None:
            return math.inf
        older = 0
        for version in sorted(self._open):
            older += self._open[version]
            if self._issued + older - 1 - version >= self._limit:
                return version
        return math.inf
