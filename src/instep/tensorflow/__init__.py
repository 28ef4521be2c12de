"""TensorFlow 2: gradients of a loss over a whole batch, by several processes.

For graph scripts (`tf.compat.v1`) there is `instep.tensorflow.v1`.
"""

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    from instep._errors import import_error

    raise import_error("TensorFlow", "tensorflow") from error

from instep.tensorflow._pool import GradientPool as GradientPool
