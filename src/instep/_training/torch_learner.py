"""Learns with PyTorch: a module and an optimizer of its parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from instep._job import Job
from instep._program import Array
from instep.torch._arrays import to_array

EXPECTED = "a torch.optim.Optimizer of the model's parameters"


def fits(optimizer: Any) -> bool:
    """Whether it is one that this learner can use."""
    return isinstance(optimizer, torch.optim.Optimizer)


class Learner:
    """The model's parameters are updated in place."""

    params = None

    def __init__(self, job: Job) -> None:
        self._model: torch.nn.Module = job.model
        self._optimizer: torch.optim.Optimizer = job.optimizer

    def step(self, grads: Any) -> None:
        self._optimizer.step()  # a stream has put the gradients into .grad

    def follow(self, way: Any) -> None:
        with torch.no_grad():
            for parameter, far in zip(self._model.parameters(), way, strict=True):
                if far is not None:
                    parameter.sub_(far)

    def worker_optimizer(self) -> Any:
        """`partial(kind, ...)` with the options of the first group of parameters."""
        kind = type(self._optimizer)
        known = inspect.signature(kind.__init__).parameters
        group = self._optimizer.param_groups[0]
        options = {k: v for k, v in group.items() if k != "params" and k in known}
        return partial(kind, **options)

    def model_state(self) -> Any:
        return copy.deepcopy(self._model.state_dict())

    def load_model_state(self, state: Any) -> None:
        self._model.load_state_dict(state)

    def optimizer_state(self) -> Any:
        return copy.deepcopy(self._optimizer.state_dict())

    def load_optimizer_state(self, state: Any) -> None:
        self._optimizer.load_state_dict(copy.deepcopy(state))

    def arrays(self) -> Sequence[Array]:
        state = self._model.state_dict().values()
        return [to_array(x) for x in state if isinstance(x, torch.Tensor)]

    def arguments(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        return batch

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def limit_threads(self, threads: int) -> None:
        """PyTorch's threads spin for a while, on cores that the workers need."""
        torch.set_num_threads(threads)
