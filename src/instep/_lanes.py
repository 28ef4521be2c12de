"""Steps of the workers' own, as the master sees them: what lasts from turn to turn.

A lane is a shard (of `Local`) or a worker (of `Asynchronous` with `push` or `fetch`).
What its optimizer remembers comes back with an answer and goes out with the next turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from instep._local import LocalProgram, Walked
from instep._portions import Cut, turn_of
from instep._program import Array, Program
from instep._sharding import Batch, Plan
from instep.engines._base import Done
from instep.modes import Asynchronous, Local, Mode
from instep.modes._rules import Portion

_NOTHING = np.empty(0, np.uint8)


class Lanes:
    """All lanes of a stream; they do nothing where workers take no steps."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._memories: dict[int, Array] = {}
        self._fetched: dict[int, tuple[int, int]] = {}  # turns, version read
        self._plans: dict[Any, Plan] = {}

    @property
    def are_used(self) -> bool:
        """Whether workers take steps of their own."""
        mode = self._mode
        if isinstance(mode, Asynchronous):
            return mode.push > 1 or self._turns_per_fetch > 1
        return isinstance(mode, Local)

    @property
    def are_elastic(self) -> bool:
        """Whether what they hand over is added up, not averaged."""
        return isinstance(self._mode, Local) and self._mode.elastic is not None

    def program(self, sent: Any) -> Program:
        """What workers run for the pool's program."""
        mode = self._mode
        if isinstance(mode, Local) and mode.elastic is not None:
            pull = mode.elastic
            return LocalProgram(sent, mode.optimizer, "elastic", pull, keeps=True)
        if isinstance(mode, Local):
            return LocalProgram(sent, mode.optimizer, "local")
        if isinstance(mode, Asynchronous) and self.are_used:
            keeps = self._turns_per_fetch > 1
            return LocalProgram(sent, mode.rate, "gather", keeps=keeps)
        program: Program = sent
        return program

    def lane(self, worker: int, portion: Portion) -> int:
        """Whose turn it is."""
        return portion.shard if isinstance(self._mode, Local) else worker

    def begin(self, lane: int, version: int) -> int:
        """The version that this turn's steps begin with: now, or when it fetched."""
        if self._turns_per_fetch == 1:
            return version
        turns, read = self._fetched.get(lane, (0, version))
        if turns % self._turns_per_fetch == 0:
            read = version
            self._memories.pop(lane, None)
        self._fetched[lane] = turns + 1, read
        return read

    def batch(self, lane: int, cut: Cut) -> Batch:
        """What the worker gets."""
        if not self.are_used:
            return cut.batches[0]
        return turn_of(cut, self._memories.get(lane, _NOTHING), self._plans)

    def end(self, lane: int, done: Done) -> Done:
        """The answer, without what is for the lane's next turn."""
        if not isinstance(done.aux, Walked):
            return done
        self._memories[lane] = np.frombuffer(done.aux.memory, np.uint8)
        return done._replace(aux=done.aux.aux)

    @property
    def _turns_per_fetch(self) -> int:
        mode = self._mode
        if not isinstance(mode, Asynchronous) or mode.fetch is None:
            return 1
        return mode.fetch // mode.push
