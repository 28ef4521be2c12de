"""Training in PyTorch: module, optimizer, `backward`."""

from __future__ import annotations

from typing import Any

import torch

import instep.torch
from instep._demo.parabola import LEARNING_RATE, Parameters, points
from instep._demo.trainer import PoolSize, wait_for_workers


def make(parameters: Parameters, size: PoolSize | None) -> TorchTrainer:
    """A trainer that starts from `parameters`."""
    trainer = TorchTrainer(parameters, size)
    if trainer.pool is not None:
        wait_for_workers(trainer.pool, trainer.value_and_grad)
    return trainer


class Network(torch.nn.Module):
    """Two dense layers."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        arrays = (torch.nn.Parameter(torch.tensor(array)) for array in parameters)
        self.weights, self.biases, self.out_weights, self.out_biases = arrays

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ self.weights + self.biases)
        return hidden @ self.out_weights + self.out_biases


def mean_squared_error(model: Network, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The mean over rows of the squared error."""
    return (model(x) - y).square().sum(dim=1).mean()


class TorchTrainer:
    """A module, its optimizer, and the pool that computes its gradients, if any."""

    def __init__(self, parameters: Parameters, size: PoolSize | None) -> None:
        torch.set_num_threads(1)  # more would spin beside the workers
        self._model = Network(parameters)
        self._optimizer = torch.optim.SGD(self._model.parameters(), LEARNING_RATE)
        self._points = [torch.from_numpy(array) for array in points()]
        self.pool: instep.torch.GradientPool | None = None
        if size is not None:
            self.pool = instep.torch.GradientPool(
                self._model,
                mean_squared_error,
                workers=size.workers,
                shards=size.shards,
            )

    def step(self) -> float:
        loss = self._backward()
        self._optimizer.step()
        return loss

    def value_and_grad(self) -> tuple[float, Parameters]:
        loss = self._backward()
        return loss, [p.grad.numpy() for p in self._parameters() if p.grad is not None]

    def parameters(self) -> Parameters:
        return [p.detach().numpy().copy() for p in self._parameters()]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def _backward(self) -> float:
        self._optimizer.zero_grad()
        if self.pool is not None:
            return float(self.pool.backward(*self._points))
        loss = mean_squared_error(self._model, *self._points)
        loss.backward()
        return float(loss.detach())

    def _parameters(self) -> list[torch.nn.Parameter]:
        return list(self._model.parameters())
