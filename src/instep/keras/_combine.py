"""How the losses of shards make the loss of the batch.

Most models have one loss that is a mean over rows; then nothing has to be known of the
whole batch. A mask or weighted mean that is the model's only loss brings its own
denominator. Else every loss is scaled by its share, for which the denominators of the
whole batch are computed first: a forward pass of which compilers keep what masks need.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from keras import Model

from instep._tree import Structure, flatten
from instep.keras._reductions import Kind, Reduction, Totals, watched
from instep.keras._updates import noted


class Combine(enum.Enum):
    """What shards are averaged by."""

    ROWS = "by rows"
    OWN = "by the denominator of the only loss"
    SHARES = "by rows, each loss scaled by its share of the batch's denominator"


class Combiner:
    """Finds out how a model's losses combine, and their denominators.

    Args:
        model: compiled.
        shards: of a batch.
        forward: computes loss and predictions of a batch, not for training. Its
            arguments are those of `of`.
        compiled: what the framework has to make one function of many operations.
    """

    def __init__(
        self,
        model: Any,
        shards: Callable[[], int],
        forward: Callable[..., Any],
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._model, self._shards, self._forward = model, shards, forward
        self._compiled = compiled
        self.forget()

    def forget(self) -> None:
        """After another `compile`."""
        self._known: dict[Structure, Combine] = {}
        self._denominators = self._compiled(self._observed)

    def of(self, data: Any, *state: Any) -> tuple[Combine, Totals | None]:
        """How the shards of this batch are combined; `totals` for SHARES alone."""
        if self._shards() == 1:
            return Combine.ROWS, None
        structure = flatten(tuple(data))[1]
        combine = self._known.get(structure)
        if combine in (Combine.ROWS, Combine.OWN):
            return combine, None
        own = self._denominators(data, *state)
        self._known.setdefault(structure, self._found)
        combine = self._known[structure]
        totals = Totals(data.rows, own) if combine is Combine.SHARES else None
        return combine, totals

    def _observed(self, *arguments: Any) -> tuple[Any, ...]:
        """Denominators over the batch; what needs no numbers is kept aside."""
        with (
            watched() as seen,
            noted(self._model.metrics),
            _counted_terms(self._model) as terms,
        ):
            self._forward(*arguments)
        self._found = _how_to_combine(self._model, seen, len(terms))
        return tuple(r.denominator for r in seen if r.kind is Kind.OWN)


def _how_to_combine(model: Any, seen: Sequence[Reduction], terms: int) -> Combine:
    kinds = [reduction.kind for reduction in seen]
    if all(kind is Kind.ROWS for kind in kinds):
        return Combine.ROWS
    # Regularisers are the same in every shard; other terms are means over rows.
    regularized = [v for v in model.trainable_variables if v.regularizer is not None]
    is_standard = type(model).compute_loss is Model.compute_loss
    is_alone = kinds == [Kind.OWN] and is_standard and terms == len(regularized)
    return Combine.OWN if is_alone else Combine.SHARES


@contextmanager
def _counted_terms(model: Any) -> Iterator[list[Any]]:
    """Inside, terms that are added to the compiled loss are listed."""
    original, terms = model._aggregate_additional_loss, list[Any]()

    def aggregate(term: Any) -> Any:
        terms.append(term)
        return original(term)

    model._aggregate_additional_loss = aggregate
    try:
        yield terms
    finally:
        del model._aggregate_additional_loss
