"""Batches -> portions: what one worker computes at once, cut out in the master.

A portion goes whole to its worker: its rows are a batch of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from instep._pieces import Cutter, whole_plan
from instep._program import Array
from instep._sharding import Batch, Bounds, Kind, Plan
from instep._tree import LEAF, Structure
from instep.modes._rules import Mode, Portion

# Turns whose bounds are known: portions are dropped soon after they were cut.
_REMEMBERED = 16


@dataclass(frozen=True)
class Turn:
    """What a worker gets that takes steps of its own: a tree, sent as any other.

    Attributes:
        batches: arguments of the loss, one tuple for each step.
        rows: of each.
        state: pickled state of its optimizer, as bytes in an array; empty at first.
    """

    batches: tuple[Any, ...]
    rows: Array
    state: Array


class Cut(NamedTuple):
    """A portion, cut out.

    Attributes:
        first: how many batches the script gave before those of this turn.
        rows: (start, stop) within each of its batches.
        batches: the rows, as arguments of the loss; one per batch of the turn.
        tag: what `split` gave with the first of them.
    """

    first: int
    rows: list[tuple[int, int]]
    batches: list[Batch]
    tag: Any


class Portions:
    """Takes batches from the script when a portion is wanted, and cuts them up.

    Args:
        batches: the script's; each a tuple of arguments, or one argument.
        mode: says how many batches make a turn.
        parts: into how many parts a batch is split.
        split: takes a batch apart; gives something to go with it, too.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        mode: Mode,
        split: Callable[[Any], tuple[Batch, Any]],
    ) -> None:
        self._batches = iter(batches)
        self._mode, self._split = mode, split
        self._cutter = Cutter()
        self._turn, self._first, self._taken = -1, 0, 0
        self._current: list[tuple[Batch, Any]] = []
        self._bounds: dict[int, Bounds] = {}  # of the last few turns
        self._shard = self._shards = 0

    def next(self) -> Portion | None:
        """The portion that is to be handed out next; None after the last."""
        if self._shard >= self._shards and not self._take():
            return None
        return Portion(self._turn, self._shard, self._shards)

    def cut(self, portion: Portion) -> Cut:
        """This portion, which is the next."""
        self._shard += 1
        batches = [
            batch
            for batch, _ in self._current
            if portion.shard < len(batch.plan.bounds)  # a short one has fewer parts
        ]
        rows = [batch.plan.bounds[portion.shard] for batch in batches]
        pieces = zip(batches, rows, strict=True)
        cut = [self._cutter.piece(batch, *bounds) for batch, bounds in pieces]
        return Cut(self._first, rows, cut, self._current[0][1])

    def skip(self) -> None:
        """The next portion is not wanted."""
        self._shard += 1

    def skip_turn(self, turn: int) -> None:
        """No more portions of this turn are wanted."""
        if turn == self._turn:
            self._shard = self._shards

    def rows(self, portion: Portion) -> tuple[int, int]:
        """(start, stop) of a portion of one of the last turns, in its first batch."""
        return self._bounds[portion.turn][portion.shard]

    def _take(self) -> bool:
        """Takes the batches of another turn; False if there are none."""
        number = self._mode.batches(self._turn + 1)
        found = [self._split(b) for b in itertools.islice(self._batches, number)]
        if found:
            self._turn += 1
            self._first, self._taken = self._taken, self._taken + len(found)
            bounds = [batch.plan.bounds for batch, _ in found]
            self._current, self._shard, self._shards = found, 0, max(map(len, bounds))
            self._bounds[self._turn] = bounds[0]
            self._bounds.pop(self._turn - _REMEMBERED, None)
        return bool(found)


def turn_of(cut: Cut, state: Array, plans: dict[Any, Plan]) -> Batch:
    """The one argument `Turn(batches, rows, state)`, taken apart."""
    parts = tuple(batch.plan for batch in cut.batches)
    key = parts, state.size
    if key not in plans:
        plans.clear()
        below = tuple(plan.structure for plan in parts)
        steps = Structure(tuple, tuple(range(len(parts))), below)
        turn = Structure(Turn, ("batches", "rows", "state"), (steps, LEAF, LEAF))
        kinds = (*itertools.chain(*(plan.kinds for plan in parts)), *[Kind.WHOLE] * 2)
        plans[key] = whole_plan(Structure(tuple, (0,), (turn,)), kinds)
    leaves = [leaf for batch in cut.batches for leaf in batch.leaves]
    rows = np.array([stop - start for start, stop in cut.rows])
    return Batch(plans[key], [*leaves, rows, state])
