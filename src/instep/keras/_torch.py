"""Keras on PyTorch: the model's train and test functions, through a pool.

    batch ─► pool ─► gradients, loss, predictions ─► optimizer, metrics ─► logs

The pool sees a module whose parameters are the model's trainable variables and whose
buffers are the others: it moves both to the workers, and state back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from keras import tree

from instep._check import Report
from instep.keras._combine import Combiner
from instep.keras._model import scale_of, unpacked, warn_if_all_are_frozen
from instep.keras._shard import Data, forward, measured, shard_loss
from instep.keras._state import STRIDE, is_seed
from instep.keras._travel import Traveller
from instep.torch import GradientPool


class Variables(torch.nn.Module):
    """A Keras model's variables, under the roles that PyTorch has for them."""

    def __init__(self, traveller: Traveller) -> None:
        super().__init__()
        self.traveller = traveller
        model = traveller.model
        for index, variable in enumerate(model.trainable_variables):
            self.register_parameter(f"p{index}", variable.value)
        others = [variable.value for variable in model.non_trainable_variables]
        for index, buffer in enumerate([*others, *model.buffers()]):
            self.register_buffer(f"b{index}", buffer)

    def __reduce__(self) -> tuple[Any, ...]:
        return Variables, (self.traveller,)


class Model(torch.nn.Module):
    """What the pool takes for the model; its one part is new after every `compile`."""

    variables: Variables

    def take(self, model: Any) -> None:
        """This is the model from now on, as it is compiled now."""
        self.variables = Variables(Traveller(model))

    def forward(
        self,
        data: tuple[Any, ...],
        positions: torch.Tensor,
        totals: Any,
        scale: Any,
        training: bool,
        combine: str,
    ) -> Any:
        """The loss of a shard, and aux."""
        model = self.variables.traveller.model
        model.train(training)  # for layers that are PyTorch's own
        with _own_seeds(model, int(positions[0])):
            loss, aux = shard_loss(
                model,
                lambda data: forward(model, data, training),
                data,
                combine,
                totals,
                scale,
            )
        return loss, _detached(aux)


@contextmanager
def _own_seeds(model: Any, position: int) -> Iterator[None]:
    """Every shard draws its own random numbers; the first one those of the model."""
    seeds = [v.value for v in model.non_trainable_variables if is_seed(v)]
    shift = torch.tensor(position * STRIDE % 2**32).to(torch.int32)
    with torch.no_grad():
        for seed in seeds:
            seed[0] += shift
    yield
    with torch.no_grad():
        for seed in seeds:
            seed[0] -= shift


def _detached(aux: Any) -> Any:
    def detached(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf

    return tree.map_structure(detached, aux)


class Steps:
    """Makes the functions that `fit` and `evaluate` call.

    Args:
        model: compiled and built.
        **keywords: see `instep.Options`.
    """

    def __init__(self, model: Any, **keywords: Any) -> None:
        self._model = model
        self._combiner = Combiner(
            model,
            lambda: self.pool.shards,
            lambda data: forward(model, data, False),
            torch.no_grad(),
        )
        self._module = Model()
        self._module.take(model)
        self.pool = GradientPool(self._module, Model.__call__, has_aux=True, **keywords)

    def compiled(self) -> None:
        """The model has been compiled: from now on the workers have it as it is."""
        self._combiner.forget()
        self._module.take(self._model)

    def train_function(self) -> Callable[..., Any]:
        """For `model.train_function`."""
        return lambda batches: self._train(unpacked(batches[0]))

    def test_function(self) -> Callable[..., Any]:
        """For `model.test_function`."""
        return lambda batches: self._test(unpacked(batches[0]))

    def check(self, *batch: Any) -> Report:
        """Of the pool, for one batch."""
        return self.pool.check(*self._arguments(Data(*batch), True))

    @torch.no_grad()
    def _train(self, data: Data) -> Any:
        model = self._model
        if not model.trainable_weights:
            warn_if_all_are_frozen()
            _, aux = self.pool.evaluate(*self._arguments(data, True))
            return measured(model, data, aux)
        with torch.enable_grad():
            arguments = self._arguments(data, True)
            (_, aux), gradients = self.pool.gradients(*arguments)
        model.optimizer.apply(gradients, model.trainable_weights)
        return measured(model, data, aux)

    @torch.no_grad()
    def _test(self, data: Data) -> Any:
        _, aux = self.pool.evaluate(*self._arguments(data, False))
        return measured(self._model, data, aux)

    def _arguments(self, data: Data, training: bool) -> tuple[Any, ...]:
        """Of `Model.forward`."""
        combine, totals = self._combiner.of(data)
        scale = scale_of(self._model) if training else None
        positions = torch.arange(data.rows)
        return tuple(data), positions, totals, scale, training, combine.name
