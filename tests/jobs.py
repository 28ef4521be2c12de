"""Job files that several tests run."""

PARABOLA = '''
import numpy as np
import instep

rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, size=(200, 1))
y = x**2


def loss(params, x, y):
    hidden = np.tanh(x @ params["a"] + params["b"])
    error = hidden @ params["c"] - y
    slope = 2 * error / len(x)
    inner = slope @ params["c"].T * (1 - hidden**2)
    gradient = {"a": x.T @ inner, "b": inner.sum(0), "c": hidden.T @ slope}
    return np.mean(error**2) + 0 * np.random.rand(), gradient


class Momentum:
    """SGD that remembers."""

    def __init__(self):
        self.speed = None

    def __call__(self, params, grads):
        if self.speed is None:
            self.speed = {name: np.zeros_like(x) for name, x in params.items()}
        for name in params:
            self.speed[name] = 0.9 * self.speed[name] + grads[name]
        return {name: x - 0.005 * self.speed[name] for name, x in params.items()}


def job():
    start = {
        "a": rng.normal(size=(1, 8)),
        "b": rng.normal(size=8),
        "c": rng.normal(size=(8, 1)),
    }
    return instep.Job(
        start, loss, (x, y), batch_size=30, optimizer=Momentum(), steps=40
    )
'''

TORCH = """
import torch
from torch import nn
import instep


def loss(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def job():
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return instep.Job(model, loss, (x, x[:, :1]), 20, optimizer, steps=6)
"""

KERAS = """
import keras
import numpy as np
import instep


def loss(model, x, y):
    return keras.ops.mean((model(x, training=True) - y) ** 2)


def job():
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
    layers = keras.layers
    norm = layers.BatchNormalization()
    stack = [keras.Input((3,)), layers.Dense(4), norm, layers.Dropout(0.2)]
    model = keras.Sequential([*stack, layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    return instep.Job(model, loss, (x, x[:, :1]), 20, optimizer, steps=6)
"""

JAX = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
import instep


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def job():
    x = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
    params = {"a": jnp.ones((3, 4)) / 2, "b": jnp.ones((4, 1))}
    return instep.Job(params, loss, (x, x[:, :1]), 20, optax.adam(0.01), steps=6)
"""
