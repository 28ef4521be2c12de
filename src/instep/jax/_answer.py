"""What the shards gave -> loss, gradients and aux of the batch, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from instep._aux import ShardAnswer, merge_columns
from instep._errors import LossError
from instep._outcome import Outcome
from instep._values import marked
from instep.jax._loss import AuxForm, AuxLeaf, rebuilt_aux
from instep.jax._program import Extras


class Answer(NamedTuple):
    """The result of a call, flat.

    Attributes:
        loss: scalar array.
        grads: one per differentiated leaf.
        aux: the values of aux's leaves.
        weak: the Python type that the loss follows, where it is weakly typed.
        aux_form: of the whole batch.
    """

    loss: Any
    grads: list[Any]
    aux: list[Any]
    weak: type | None
    aux_form: AuxForm | None

    @classmethod
    def of(cls, outcome: Outcome) -> Answer:
        """The answer as NumPy arrays.

        Raises:
            LossError: aux cannot be merged.
        """
        extras = [shard.aux or _NO_EXTRAS for shard in outcome.shards]
        aux = _merged(outcome.shards, extras)
        weak, form = extras[0].weak, extras[0].aux
        grads: list[Any] = list(outcome.outputs)
        return cls(np.asarray(outcome.loss), grads, aux, weak, form)

    def on_device(self) -> Answer:
        """With JAX arrays where the loss had JAX arrays.

        A large gradient is not copied: the array lies where the workers put it.
        """
        is_array = [leaf.is_array for leaf in self._aux_leaves]
        arrays = [v for v, is_a in zip(self.aux, is_array, strict=True) if is_a]
        put = iter(jax.device_put([self.loss, *self.grads, *arrays]))
        loss, grads = next(put), [next(put) for _ in self.grads]
        pairs = zip(self.aux, is_array, strict=True)
        aux = [next(put) if is_a else value for value, is_a in pairs]
        return self._replace(loss=loss, grads=grads, aux=aux)

    @property
    def _aux_leaves(self) -> tuple[AuxLeaf, ...]:
        return () if self.aux_form is None else self.aux_form.leaves

    def rebuilt_aux(self) -> Any:
        """The user's aux."""
        assert self.aux_form is not None
        pairs = zip(self.aux, self.aux_form.leaves, strict=True)
        return rebuilt_aux(self.aux_form, [_as_key(*pair) for pair in pairs])


_NO_EXTRAS = Extras(None, None, [])


def _as_key(value: Any, leaf: AuxLeaf) -> Any:
    return value if leaf.key is None else jax.random.wrap_key_data(value, impl=leaf.key)


def _merged(shards: Sequence[ShardAnswer], extras: Sequence[Extras]) -> list[Any]:
    form = extras[0].aux
    if form is None:
        return []
    if any(e.aux is None or e.aux.treedef != form.treedef for e in extras):
        raise LossError("aux has not the same structure in every shard")
    columns = list(zip(*map(_values, extras), strict=True))
    return merge_columns([leaf.name for leaf in form.leaves], columns, shards)


def _values(extras: Extras) -> list[Any]:
    assert extras.aux is not None
    arrays = iter(extras.arrays)
    return [
        marked(leaf.marker, next(arrays) if leaf.is_array else leaf.static)
        for leaf in extras.aux.leaves
    ]
