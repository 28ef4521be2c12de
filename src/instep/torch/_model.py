"""Refuses a model that workers cannot have a copy of, and says why."""

from __future__ import annotations

from typing import Any

import torch

from instep._errors import ArgumentError, ShipError


def check_model(model: Any) -> None:
    """Every part of the model must pickle, have a shape, and be on the CPU.

    Raises:
        ArgumentError: not a module, or a part that is lazy or on another device.
        ShipError: a part that PyTorch does not pickle.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"the model is a {type(model).__name__}; expected a torch.nn.Module"
        )
    for name, module in model.named_modules():
        if problem := _shipping_problem(module):
            raise ShipError(f"{'.'.join(['model', name]).rstrip('.')} {problem}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise ArgumentError(
                f"{name} is lazy and has no shape yet; call the model once on a batch"
            )
        if not tensor.is_cpu:
            raise ArgumentError(
                f"{name} is on {tensor.device}; instep computes on the CPU: model.cpu()"
            )


def _shipping_problem(module: torch.nn.Module) -> str:
    """Why PyTorch does not pickle this module; empty if it does."""
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "is a torch.jit.ScriptModule, which cannot be sent to the workers; give "
            "the pool the module that it was made from"
        )
    if torch.nn.utils.parametrize.is_parametrized(module):
        return (
            "is parametrized (weight_norm, spectral_norm, orthogonal), and PyTorch "
            "does not pickle such modules; compute its weight in forward, or take "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    return ""
