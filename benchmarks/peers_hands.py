"""What the contenders of peers.py need that others would write by hand."""

from __future__ import annotations

import ctypes
import functools
import signal
from typing import Any

import numpy as np
import torch
from peers_models import TASKS, Task
from torch import nn

_PR_SET_PDEATHSIG = 1


def half_gradient(
    name: str, parameters: list[np.ndarray], half: tuple[np.ndarray, np.ndarray]
) -> tuple[float, list[np.ndarray]]:
    """Loss and gradient of some rows, in another process."""
    task, model = _model_here(name)
    with torch.no_grad():
        for own, value in zip(model.parameters(), parameters, strict=True):
            own.copy_(torch.from_numpy(_writable(value)))
    model.zero_grad()
    loss = task.loss(model, *(torch.from_numpy(_writable(array)) for array in half))
    loss.backward()
    return loss.item(), [_gradient(p) for p in model.parameters()]


class Actor:
    """The same for Ray."""

    def __init__(self, name: str) -> None:
        self._name = name

    def half(self, parameters: list[np.ndarray], half: Any) -> Any:
        return half_gradient(self._name, parameters, half)


@functools.cache
def _model_here(name: str) -> tuple[Task, nn.Module]:
    """The model of this process, which is to end with the one that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    task = TASKS[name]()
    return task, task.model()


def _writable(array: np.ndarray) -> np.ndarray:
    """PyTorch warns of arrays that others lend."""
    return array if array.flags.writeable else array.copy()


def _gradient(parameter: torch.Tensor) -> np.ndarray:
    assert parameter.grad is not None
    return parameter.grad.numpy()


def dense_layers(model: nn.Module) -> list[tuple[np.ndarray, np.ndarray]]:
    """(weight, bias) of each dense layer, weights as JAX and Keras have them."""
    return [
        (layer.weight.detach().numpy().T.copy(), layer.bias.detach().numpy().copy())
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]


def keras_task(task: Task) -> Any:
    """The same for keras_trainers.py; images have their channels last."""
    import keras
    from keras_models import Task as KerasTask

    x = np.concatenate([_channels_last(x) for x, _ in task.batches])
    y = np.concatenate([y for _, y in task.batches])
    is_regression = y.dtype.kind == "f"
    losses = keras.losses

    def loss() -> Any:
        if is_regression:
            return losses.MeanSquaredError()
        return losses.SparseCategoricalCrossentropy(from_logits=True)

    return KerasTask(
        model=lambda: _keras_model(task.model(), x.shape[1:]),
        optimizer=lambda: keras.optimizers.SGD(task.rate),
        loss=loss,
        x=x,
        y=y,
        batch=len(task.batches[0][0]),
    )


def _keras_model(model: nn.Module, shape: tuple[int, ...]) -> Any:
    """A Keras model with the layers and the weights of a sequential one."""
    import keras

    layers = [keras.Input(shape), *(_keras_layer(layer) for layer in model)]
    copy = keras.Sequential(layers)
    pairs = [layer for layer in model if hasattr(layer, "weight")]
    for own, other in zip([x for x in copy.layers if x.weights], pairs, strict=True):
        own.set_weights([_keras_weight(other, model), other.bias.detach().numpy()])
    return copy


def _keras_layer(layer: nn.Module) -> Any:
    from keras import layers

    if isinstance(layer, nn.Linear):
        return layers.Dense(layer.out_features)
    if isinstance(layer, nn.Conv2d):
        return layers.Conv2D(layer.out_channels, layer.kernel_size)
    if isinstance(layer, nn.ReLU):
        return layers.ReLU()
    return (
        layers.MaxPooling2D() if isinstance(layer, nn.MaxPool2d) else layers.Flatten()
    )


def _keras_weight(layer: Any, model: nn.Module) -> np.ndarray:
    """Its weight in Keras's order of axes."""
    weight = layer.weight.detach().numpy()
    if isinstance(layer, nn.Conv2d):
        return weight.transpose(2, 3, 1, 0)
    channels = [x.out_channels for x in model if isinstance(x, nn.Conv2d)]
    if channels and layer.in_features > 1000:  # the one after Flatten
        side = round((layer.in_features / channels[-1]) ** 0.5)
        parted = weight.reshape(layer.out_features, channels[-1], side, side)
        weight = parted.transpose(0, 2, 3, 1).reshape(layer.out_features, -1)
    return weight.T


def _channels_last(x: np.ndarray) -> np.ndarray:
    return x.transpose(0, 2, 3, 1).copy() if x.ndim == 4 else x
