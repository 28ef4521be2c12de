"""JAX's switches that change numbers: what is set in the master holds in the workers.

They travel with every call, so that `jax_enable_x64` may change between two steps.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax

Flags = tuple[Hashable, ...]

_config: Any = jax.config  # its attributes are made at run time
_NAMES = tuple(
    name
    for name in (
        "jax_enable_x64",
        "jax_explicit_x64_dtypes",
        "jax_default_dtype_bits",
        "jax_default_matmul_precision",
        "jax_numpy_dtype_promotion",
        "jax_numpy_rank_promotion",
        "jax_default_prng_impl",
        "jax_enable_custom_prng",
        "jax_legacy_prng_key",
        "jax_threefry_partitionable",
        "jax_random_seed_offset",
        "jax_high_dynamic_range_gumbel",
        "jax_softmax_custom_jvp",
        "jax_allow_f16_reductions",
        "jax_use_direct_linearize",
        "jax_optimization_level",
        "jax_disable_most_optimizations",
        "jax_debug_nans",
        "jax_debug_infs",
        "jax_debug_key_reuse",
        "jax_disable_jit",
    )
    if hasattr(_config, name)  # they come and go with JAX's versions
)


def current_flags() -> Flags:
    """The values that hold here and now, `with jax.enable_x64()` included."""
    return tuple(getattr(_config, name) for name in _NAMES)


def set_flags(flags: Flags) -> None:
    """Sets those that have another value."""
    for name, value in zip(_NAMES, flags, strict=True):
        if getattr(_config, name) != value:
            _config.update(name, value)
