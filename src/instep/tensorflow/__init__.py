"""TensorFlow 2: gradients of a loss over a whole batch, by several processes.

For graph scripts (`tf.compat.v1`) there is `instep.tensorflow.v1`.
"""

from __future__ import annotations

import importlib
from typing import Any

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    from instep._errors import import_error

    raise import_error("TensorFlow", "tensorflow") from error

from instep.tensorflow._pool import GradientPool as GradientPool


def __getattr__(name: str) -> Any:
    if name == "v1":  # imported when first used: few scripts are of that style
        return importlib.import_module("instep.tensorflow.v1")
    raise AttributeError(f"module 'instep.tensorflow' has no attribute {name!r}")
