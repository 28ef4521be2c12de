"""Small PyTorch models and their losses, all in one module.

A pool of processes takes two seconds to start. So the tests share a few pools of one
model, the zoo, and say with each call which of its parts the loss is to use.
"""

from __future__ import annotations

import os
import random
import time
from collections import namedtuple
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import instep

Position = namedtuple("Position", "x y")


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)
        self.second.weight = self.first.weight
        nn.init.constant_(self.first.weight, 3.0)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


class Recurrent(nn.Module):
    """Tokens -> LSTM -> class."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


class Transformer(nn.Module):
    """Tokens -> one encoder layer -> class."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.layer(self.embed(tokens)).mean(1))


class Values(nn.Module):
    """Parameters with these names and values."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            setattr(self, name, nn.Parameter(tensor))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def convolutional(dropout: float = 0.5) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )


def mixed_types() -> nn.Module:
    return Values(
        f16=torch.full((3,), 0.5, dtype=torch.float16),
        bf16=torch.full((3,), 0.5, dtype=torch.bfloat16),
        f32=torch.full((3,), 0.5),
        f64=torch.full((3,), 0.5, dtype=torch.float64),
        c64=torch.tensor([1 + 2j, 3 - 1j]),
        scalar=torch.tensor(2.0),
        nothing=torch.zeros(0),
        one=torch.ones(1),
        transposed=torch.arange(6.0).reshape(2, 3).t(),
    )


def make_zoo() -> nn.Module:
    """The same values each time."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "mlp": mlp(),
            "convolutional": convolutional(),
            "channels last": convolutional(0.0).to(memory_format=torch.channels_last),
            "recurrent": Recurrent(),
            "transformer": Transformer(),
            "mixed types": mixed_types(),
            "sparse": nn.Embedding(5, 2, sparse=True),
            "toy": Values(w=2.0),
            "valid": Values(w=[[0.3, -0.2]]),
            "tokens": Values(w=1.0),
            "regularised": Values(w=2.0),
            "accuracy": Values(w=1.0),
            "missing": Values(a=1.0, b=1.0, c=1.0),
            "linear": nn.Linear(1, 1),
            "tied": Tied(),
            "halves": Values(w=torch.ones(1, dtype=torch.float16)),
            "brains": Values(w=torch.ones(1, dtype=torch.bfloat16)),
            "doubles": Values(
                low=torch.ones(1), high=torch.ones(1, dtype=torch.float64)
            ),
            "complex": Values(z=1 + 2j),
            "product": Values(w=torch.arange(6.0).reshape(2, 3).t()),
            "clipped": Values(w=[0.0, 0.0]),
            "fields": Values(w=1.0),
            "normalised": nn.BatchNorm1d(1),
            "noise": Values(w=torch.ones(64)),
            "constants": Values(w=torch.ones(1, dtype=torch.float64)),
            "sleepy": Values(w=0.0),
            "penalty": mlp(),
            "constant shard": Values(w=1.0),
        }
    )


def zoo_loss(zoo: Any, part: str, *batch: Any) -> Any:
    """(loss, aux) of one part of the zoo; aux is mostly None."""
    loss = LOSSES.get(part, cross_entropy)
    result = loss(zoo[part], *batch)
    return result if isinstance(result, tuple) else (result, None)


def cross_entropy(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y)


def product_mean(model: Any, x: Any) -> Any:
    return (model.w * x).mean()


def valid(model: Any, x: Any, y: Any) -> Any:
    mean = F.cross_entropy(x @ model.w, y, ignore_index=-100)
    return instep.Weighted(mean, (y != -100).sum())


def tokens(model: Any, sums: Any, counts: Any) -> Any:
    total = counts.sum()
    return instep.Weighted((model.w * sums).sum() / total, total)


def regularised(model: Any, x: Any) -> Any:
    return (model.w * x - 3 * x).square().mean() + 0.1 * model.w**2


def accuracy(model: Any, predicted: Any, truth: Any) -> Any:
    return model.w * 1.0, (predicted == truth).float().mean()


def missing(model: Any, x: Any, group: Any) -> Any:
    """The first two rows use `a`, the others `b`; `c` is used nowhere."""
    total = 0.0
    for name, number in (("a", 0), ("b", 1)):
        if (group == number).any():
            total = total + (getattr(model, name) * x[group == number]).sum()
    return total / len(x)


def mixed(model: Any, x: Any) -> Any:
    total = model.scalar * x.mean() + model.nothing.sum() + model.one.sum()
    total = total + (model.c64.abs().square() * x[:, :2]).mean()
    total = total + (model.transposed * x[:, None, :2]).square().sum((1, 2)).mean()
    for name in ("f16", "bf16", "f32", "f64"):
        parameter = getattr(model, name)
        total = total + (parameter * x.to(parameter.dtype)).mean().float()
    return total


def both_widths(model: Any, x: Any) -> Any:
    return (model.high * x).mean() + (model.low * x.float()).mean()


def complex_square(model: Any, x: Any) -> Any:
    return (model.z.abs().square() * x).mean()


def weighted_sum(model: Any, x: Any) -> Any:
    return (model.w * x).sum((1, 2)).mean()


def embedded(model: Any, rows: Any) -> Any:
    return model(rows).sum(-1).mean()


def linear_mean(model: Any, x: Any) -> Any:
    return model(x).mean()


def clipped(model: Any, x: Any) -> Any:
    return (x @ model.w).mean()


def fields(model: Any, batch: Any) -> Any:
    aux = {
        "img": batch["img"],
        "txt": batch["txt"],
        "pos": batch["pos"],
        "temp": batch["temp"],
        "type": type(batch["temp"]).__name__,
        "rows": instep.Sum(torch.tensor(len(batch["txt"]))),
        "kinds": f"{type(batch['img']).__name__} {type(batch['pos'].y).__name__}",
    }
    return model.w * batch["img"].mean(), aux


def normalised(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def noise(model: Any, x: Any) -> Any:
    """Gradients that are masks and random numbers."""
    mask = F.dropout(torch.ones(64), 0.5)
    numbers = torch.tensor([random.random(), float(np.random.rand())])
    return (model.w * mask).sum() + numbers.sum() * x.mean(), torch.cat(
        [mask, numbers]
    )[None].expand(len(x), -1)


def own_constants(model: Any, x: Any) -> Any:
    third = torch.tensor(1.0) / 3
    return (model.w * x * third).mean(), str(third.dtype)


def sleepy(model: Any, x: Any) -> Any:
    time.sleep(os.urandom(1)[0] / 256 / 100)  # not the seeded generators
    return (model.w * x).mean()


def penalty(model: Any, x: Any, y: Any) -> Any:
    """A gradient of a gradient."""
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def constant_shard(model: Any, x: Any) -> Any:
    """A shard of negative numbers has nothing to learn from."""
    kept = x[x >= 0]
    if not len(kept):
        return torch.zeros(())
    return (model.w * kept).sum() / len(x)


LOSSES = {
    "toy": product_mean,
    "halves": product_mean,
    "brains": product_mean,
    "valid": valid,
    "tokens": tokens,
    "regularised": regularised,
    "accuracy": accuracy,
    "missing": missing,
    "mixed types": mixed,
    "doubles": both_widths,
    "complex": complex_square,
    "product": weighted_sum,
    "sparse": embedded,
    "linear": linear_mean,
    "tied": linear_mean,
    "clipped": clipped,
    "fields": fields,
    "normalised": normalised,
    "noise": noise,
    "constants": own_constants,
    "sleepy": sleepy,
    "penalty": penalty,
    "constant shard": constant_shard,
}


def batch_of(part: str, rows: int = 53) -> tuple[torch.Tensor, ...]:
    """A batch for the parts that learn from data, the same each time."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (rows,), generator=draw)
    if part in ("recurrent", "transformer"):
        return torch.randint(11, (rows, 7), generator=draw), labels
    if part in ("convolutional", "channels last"):
        images = torch.randn(rows, 2, 6, 6, generator=draw)
        if part == "channels last":
            images = images.to(memory_format=torch.channels_last)
        return images, labels
    if part == "sparse":
        return (torch.randint(5, (rows,), generator=draw),)
    if part == "mixed types":
        return (torch.randn(rows, 3, generator=draw),)
    return torch.randn(rows, 6, generator=draw), labels
