"""What learns in a training: parameters and optimizer, whatever the framework."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from instep._errors import ArgumentError
from instep._job import Job
from instep._program import Array


class Learner(Protocol):
    """A job's model and its optimizer, of one framework.

    Attributes:
        params: what a stream is told to publish; None where the model's own
            parameters are updated in place.
    """

    params: Any

    def step(self, grads: Any) -> None:
        """The optimizer's step with an update's gradients."""

    def follow(self, way: Any) -> None:
        """Parameters minus `way`: what workers went by themselves."""

    def worker_optimizer(self) -> Any:
        """Another optimizer like the job's, as `instep.Local` takes it."""

    def model_state(self) -> Any:
        """A copy of all that the loss depends on; pickles."""

    def load_model_state(self, state: Any) -> None:
        """Makes the model what it was."""

    def optimizer_state(self) -> Any:
        """A copy of what the optimizer remembers; pickles."""

    def load_optimizer_state(self, state: Any) -> None:
        """Makes the optimizer what it was."""

    def arrays(self) -> Sequence[Array]:
        """The model's state in a fixed order."""

    def arguments(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the pool's `evaluate` and `check` take for this batch."""

    def evaluating(self) -> AbstractContextManager[object]:
        """Inside, the model computes as it does when it is used, without dropout."""

    def limit_threads(self, threads: int) -> None:
        """So many for this process's own operations, where the framework spins."""


def make_learner(job: Job) -> Learner:
    """The learner of the job's framework.

    Raises:
        ArgumentError: the job has no optimizer, or one of another kind.
    """
    module = importlib.import_module(f"instep._training.{job.framework}_learner")
    if job.optimizer is None:
        raise ArgumentError(
            f"the job has no optimizer; expected {module.EXPECTED}: "
            "instep.Job(..., optimizer=...)"
        )
    if not module.fits(job.optimizer):
        raise ArgumentError(
            f"the job's optimizer is a {type(job.optimizer).__name__}; expected "
            f"{module.EXPECTED}"
        )
    return cast(Learner, module.Learner(job))


def state_of(learner: Learner) -> dict[str, Any]:
    """All that a learner would need to go on from here."""
    return {"model": learner.model_state(), "optimizer": learner.optimizer_state()}


def load_state(learner: Learner, state: dict[str, Any]) -> None:
    """Puts a learner where the one was that gave this state."""
    learner.load_model_state(state["model"])
    learner.load_optimizer_state(state["optimizer"])


def digest(learner: Learner) -> str:
    """SHA-256 of the model's state: equal where every bit is."""
    sha = hashlib.sha256()
    for array in learner.arrays():
        sha.update(f"{array.dtype.name}{array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()
