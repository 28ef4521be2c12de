"""The frameworks the demo can train with; a new one is a file and a line here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Framework:
    """Where a framework's trainers are made.

    Attributes:
        trainer: module that has `make`, see `instep._demo.trainer.Maker`.
        package: what it imports.
        extra: of instep, installs it.
    """

    trainer: str
    package: str
    extra: str


FRAMEWORKS = {
    "tensorflow": Framework("tensorflow_trainer", "tensorflow", "tensorflow"),
    "torch": Framework("torch_trainer", "torch", "torch"),
    "jax": Framework("jax_trainer", "jax", "jax"),
    "numpy": Framework("numpy_trainer", "numpy", "numpy"),
}
