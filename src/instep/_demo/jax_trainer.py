"""Training in JAX: `value_and_grad` of a function of the parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import instep.jax
from instep._demo.function_trainer import FunctionTrainer
from instep._demo.parabola import Parameters
from instep._demo.trainer import PoolSize, wait_for_workers


def make(parameters: Parameters, size: PoolSize | None) -> FunctionTrainer:
    """A trainer that starts from `parameters`."""
    start = map(jnp.asarray, parameters)
    if size is None:
        return FunctionTrainer(start, jax.jit(jax.value_and_grad(mean_squared_error)))
    pool = instep.jax.value_and_grad(
        mean_squared_error, workers=size.workers, shards=size.shards
    )
    trainer = FunctionTrainer(start, pool, pool.close)
    wait_for_workers(pool, trainer.value_and_grad)
    return trainer


def mean_squared_error(parameters: Any, x: Any, y: Any) -> Any:
    """The mean over rows of the squared error."""
    weights, biases, out_weights, out_biases = parameters
    prediction = jnp.tanh(x @ weights + biases) @ out_weights + out_biases
    return jnp.mean(jnp.sum(jnp.square(prediction - y), axis=1))
