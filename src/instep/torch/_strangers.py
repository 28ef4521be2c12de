"""Finds what a loss would train beside the model: its gradient would be lost."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def strangers(loss: Any, known: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Trainable tensors that the loss refers to by name and that are not known.

    A frozen teacher, used without gradient, is among them and does no harm: what
    counts is whether one of them has a gradient after `backward`.
    """
    familiar = {id(tensor) for tensor in known}
    return {
        name: tensor
        for name, tensor in _trainable(loss)
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in familiar
    }


def _trainable(loss: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in _named(loss).items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, torch.nn.Module):
            for parameter_name, parameter in value.named_parameters():
                yield f"{name}.{parameter_name}", parameter


def _named(loss: Any) -> dict[str, Any]:
    """What a function, partial, bound method, module or other object refers to."""
    if isinstance(loss, functools.partial):
        named = {f"argument {k}": value for k, value in enumerate(loss.args)}
        return {**_named(loss.func), **named, **loss.keywords}
    if inspect.ismethod(loss):
        return {"self": loss.__self__, **_named(loss.__func__)}
    if inspect.isfunction(loss):
        variables = inspect.getclosurevars(loss)
        return {**variables.globals, **variables.nonlocals}
    return {"loss": loss, **getattr(loss, "__dict__", {})}
