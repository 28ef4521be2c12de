"""JAX: `jax.value_and_grad` over the whole batch, by several processes."""

from __future__ import annotations

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    from instep._errors import import_error

    raise import_error("JAX", "jax") from error

from instep.jax._pool import GradientPool as GradientPool
from instep.jax._pool import value_and_grad as value_and_grad
