"""JAX losses for the tests: a module of their own, since workers import it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import instep


class Layer(NamedTuple):
    """Weights and bias."""

    w: Any
    b: Any


def toy(w: Any, x: Any) -> Any:
    """The mean of w * x; its gradient is the mean of x."""
    return jnp.mean(w * x)


def any_loss(fun: Any, params: Any, *batch: Any) -> Any:
    """Calls the loss that is passed: one pool serves many."""
    return fun(params, *batch)


def mlp(params: list[Any], x: Any, y: Any) -> Any:
    """Cross entropy of a small network."""
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer.w + layer.b)
    scores = jax.nn.log_softmax(x @ params[-1].w + params[-1].b)
    return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))


def convolution(kernel: Any, images: Any) -> Any:
    """A convolution and a norm."""
    names = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=names
    )
    return jnp.mean(jnp.sqrt(1 + jnp.sum(out**2, axis=(1, 2, 3))))


def network(params: dict[str, Any], tokens: Any, valid: Any, y: Any, key: Any) -> Any:
    """An embedding, noise and two layers in several dtypes; a weighted mean."""
    noise = jax.random.uniform(key, y.shape)  # a mask takes 0.6 s more to compile
    x = params["table"][tokens].mean(1) * noise[:, None]
    x = jnp.tanh(x @ params["hidden"].w + params["hidden"].b)
    x = (x.astype(jnp.bfloat16) @ params["out"]).astype(jnp.float32)
    count = valid.sum()
    total = jnp.sum((x - y) ** 2 * valid) * jnp.abs(params["phase"])
    return instep.Weighted(total / jnp.maximum(count, 1), count)


def mixed(params: dict[str, Any], x: Any) -> Any:
    """Parameters of several dtypes."""
    total = sum(jnp.sum(jnp.abs(p).astype(jnp.float32) ** 2) for p in params.values())
    return jnp.mean(x) * total


def noisy(w: Any, x: Any) -> Any:
    """Draws from NumPy's generator, which a trace would freeze."""
    return jnp.mean((x @ w + np.random.normal(size=len(x))) ** 2)


TRACES: list[tuple[int, ...]] = []


def counted(w: Any, x: Any) -> Any:
    """Notes every trace."""
    TRACES.append(x.shape)
    return toy(w, x)


def network_arguments() -> tuple[Any, ...]:
    """Parameters and a batch of 11 rows; the last three do not count."""
    params = {
        "table": draw(5, 4),
        "hidden": Layer(draw(4, 6), draw(6, dtype=jnp.float16)),
        "out": draw(6, dtype=jnp.bfloat16),
        "phase": jnp.complex64(1 + 2j),
    }
    tokens = jnp.arange(44).reshape(11, 4) % 5
    valid = jnp.arange(11) < 8
    return params, tokens, valid, jnp.arange(11) % 3, jax.random.key(3)


def problems() -> dict[str, tuple[Any, ...]]:
    """Loss, parameters and a batch of 11 rows each."""
    layers = [Layer(draw(9, 16), draw(16)), Layer(draw(16, 3), draw(3))]
    dtypes = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64)
    numbers = {dtype.__name__: draw(5, dtype=dtype) for dtype in dtypes}
    return {
        "mlp": (mlp, layers, draw(11, 9), jnp.arange(11) % 3),
        "convolution": (convolution, draw(3, 3, 2, 4), draw(11, 6, 6, 2)),
        "mixed": (mixed, numbers, draw(11)),
        "noisy": (noisy, draw(9), draw(11, 9)),
    }


def draw(*shape: int, dtype: Any = np.float32) -> Any:
    """The same numbers every time."""
    generator = np.random.default_rng(len(shape))
    return jnp.asarray(generator.normal(size=shape), dtype)
