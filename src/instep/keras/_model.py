"""What a model must be for its steps to go through a pool, and what it says of them."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import keras
from keras import Model
from keras.src.trainers.data_adapters import data_adapter_utils

from instep._errors import ArgumentError
from instep.keras._shard import Data


def check_model(model: Any) -> None:
    """Raises an ArgumentError that says what to do."""
    if not isinstance(model, Model):
        raise ArgumentError(
            f"the model is a {type(model).__module__}.{type(model).__qualname__}; "
            "expected a keras.Model"
        )
    if not all(layer.built for layer in model._flatten_layers()):
        raise ArgumentError(
            f"the model {model.name!r} is not built: it has not all its variables yet. "
            "Give it a keras.Input, call it on a batch, or call model.build(shape), "
            "before instep.keras.parallel"
        )
    check_compiled(model)
    check_steps(model)


def check_compiled(model: Any) -> None:
    if not model.compiled:
        raise ArgumentError(
            f"the model {model.name!r} is not compiled; call model.compile(optimizer, "
            "loss) before instep.keras.parallel"
        )


def check_steps(model: Any) -> None:
    if _is_own(model, "train_step"):
        raise ArgumentError(
            f"{type(model).__name__} defines its own train_step, which instep would "
            "have to replace. Move the loss to compute_loss() or add_loss() and the "
            "metrics to compute_metrics(), and remove it; or keep it and compute the "
            "gradient in it with instep.tensorflow.GradientPool, "
            "instep.jax.value_and_grad or instep.torch.GradientPool"
        )


def check_keywords(keywords: dict[str, Any]) -> None:
    wrong = [name for name in ("reduction", "has_aux") if name in keywords]
    if wrong:
        raise ArgumentError(
            f"{wrong[0]}={keywords[wrong[0]]!r}: a Keras model says itself how its "
            "losses are reduced, and metrics take the place of aux; leave it out"
        )


def tests_its_own_way(model: Any) -> bool:
    """Whether evaluation has to be left to the model."""
    return _is_own(model, "test_step")


def _is_own(model: Any, name: str) -> bool:
    defined = inspect.getattr_static(model, name)
    return defined is not inspect.getattr_static(Model, name)


def unpacked(batch: Any) -> Data:
    """What a data set, a generator or `fit`'s arguments gave for one step."""
    return Data(*data_adapter_utils.unpack_x_y_sample_weight(batch))


def scale_of(model: Any) -> Any:
    """By what the optimizer wants its loss multiplied; None: by nothing."""
    optimizer = model.optimizer
    plain = type(optimizer).scale_loss is keras.optimizers.Optimizer.scale_loss
    if plain and optimizer.loss_scale_factor is None:
        return None
    return optimizer.scale_loss(keras.ops.ones((), "float32"))


def warn_if_all_are_frozen() -> None:
    warnings.warn("The model does not have any trainable weights.", stacklevel=3)
