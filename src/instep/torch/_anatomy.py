"""What a module consists of, found in one walk: it is taken before every step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Place(NamedTuple):
    """Where a module keeps a buffer; the tensor there may change, or be None."""

    module: torch.nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The buffer that lies there now."""
        return self.module._buffers.get(self.name)


class Anatomy(NamedTuple):
    """A module's parts, each once, in the order in which PyTorch lists them.

    Attributes:
        modules: those of `model.modules()`.
        parameters: those of `model.parameters()`.
        buffers: places of dense buffers, empty ones included. Others (a sparse
            adjacency matrix) are constants, which travel with the model.
    """

    modules: list[torch.nn.Module]
    parameters: list[torch.Tensor]
    buffers: list[Place]


def anatomy(model: torch.nn.Module) -> Anatomy:
    """The parts of the model as it is now."""
    modules = _modules(model)
    parameters: dict[int, torch.Tensor] = {}
    buffers: dict[Any, Place] = {}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameters[id(parameter)] = parameter
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.layout is torch.strided:
                key = (id(module), name) if buffer is None else id(buffer)
                buffers.setdefault(key, Place(module, name))
    return Anatomy(modules, list(parameters.values()), list(buffers.values()))


def wiring(parts: Anatomy) -> list[Any]:
    """Which parameter each module has under which name: tied ones share a number."""
    numbers = {id(parameter): k for k, parameter in enumerate(parts.parameters)}
    return [
        [(name, numbers.get(id(tensor))) for name, tensor in module._parameters.items()]
        for module in parts.modules
    ]


def _modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """As `model.modules()`, in a quarter of the time: no nested generators."""
    found: dict[torch.nn.Module, None] = {}
    stack = [model]
    while stack:
        module = stack.pop()
        if module not in found:
            found[module] = None
            children = [m for m in module._modules.values() if m is not None]
            stack.extend(reversed(children))
    return list(found)
