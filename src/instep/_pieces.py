"""Rows cut out of a batch, as a batch that goes whole to its worker."""

from __future__ import annotations

from typing import Any

from instep._sharding import Batch, Kind, Plan, slice_items
from instep._tree import Structure

_WHOLE = {Kind.ROWS: Kind.WHOLE, Kind.ITEMS: Kind.OBJECT}


class Cutter:
    """Cuts rows out of batches; pieces of the same form have the same plan."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}

    def piece(self, batch: Batch, start: int, stop: int) -> Batch:
        """These rows, as a batch that goes whole to a worker."""
        pairs = zip(batch.leaves, batch.plan.kinds, strict=True)
        leaves = [_sliced(leaf, kind, start, stop) for leaf, kind in pairs]
        return Batch(self._plan(batch.plan, stop - start), leaves)

    def _plan(self, plan: Plan, rows: int) -> Plan:
        if (plan, rows) not in self._plans:
            if len(self._plans) >= 64:
                self._plans.clear()
            kinds = tuple(_WHOLE.get(kind, kind) for kind in plan.kinds)
            self._plans[plan, rows] = whole_plan(plan.structure, kinds)
        return self._plans[plan, rows]


def whole_plan(structure: Structure, kinds: tuple[Kind, ...]) -> Plan:
    """A plan that splits nothing."""
    return Plan(structure, kinds, 0, (), has_objects=Kind.OBJECT in kinds)


def _sliced(leaf: Any, kind: Kind, start: int, stop: int) -> Any:
    if kind is Kind.ROWS:
        return leaf[start:stop]
    return slice_items(leaf, start, stop) if kind is Kind.ITEMS else leaf
