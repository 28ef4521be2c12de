"""Catches an optimizer that was built on other parameters than the pool's.

The pool never sees the optimizer. But PyTorch tells of every optimizer's step, and one
whose parameters have no gradient at all would do nothing, in silence, while a pool's
gradients lie unused.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from instep._errors import ArgumentError

# Models with gradients that no optimizer has stepped with yet.
_waiting: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def expect_step(model: torch.nn.Module) -> None:
    """The model's parameters have new gradients, for some optimizer to use."""
    _watch()
    _waiting.add(model)


def expect_no_step(model: torch.nn.Module) -> None:
    """The model's pool is closed."""
    _waiting.discard(model)


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    # A closure computes the gradients after this.
    if not _waiting or options.get("closure") or any(map(inspect.isfunction, args)):
        return
    held = [p for group in optimizer.param_groups for p in group["params"]]
    identities = {id(parameter) for parameter in held}
    served = [m for m in _waiting if any(id(p) in identities for p in m.parameters())]
    if not served and all(parameter.grad is None for parameter in held):
        raise ArgumentError(_problem(optimizer, len(held)))
    for model in served:
        _waiting.discard(model)


def _problem(optimizer: torch.optim.Optimizer, number: int) -> str:
    models = ", ".join(type(model).__name__ for model in _waiting)
    return (
        f"{type(optimizer).__name__} has {number} parameters, none with a gradient and "
        f"none of the model ({models}) that pool.backward has given gradients, so its "
        "step would do nothing; build it on the parameters of the pool's own model"
    )
