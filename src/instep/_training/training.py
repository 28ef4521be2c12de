"""A job's training: a pool, a learner, and how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from instep._closing import Closing
from instep._errors import ArgumentError
from instep._job import Job
from instep._training.batches import batches_between
from instep._training.choice import Choice
from instep._training.learner import load_state, make_learner, state_of
from instep._training.loop import Step, take_steps

# What decides which rows come when: a state of another job would go on elsewhere.
_OF_THE_JOB = ("framework", "rows", "batch_size", "seed")


@dataclass(frozen=True)
class Distance:
    """How far a training is.

    Attributes:
        batches: taken and applied.
        updates: of the parameters.
        examples: that counted; rows, unless the loss returns its own weight.
        seconds: that the updates took.
    """

    batches: int = 0
    updates: int = 0
    examples: float = 0.0
    seconds: float = 0.0

    def after(self, step: Step) -> Distance:
        """One update further; batches count when all of a stretch are applied."""
        return Distance(
            self.batches,
            self.updates + 1,
            self.examples + step.weight,
            self.seconds + step.seconds,
        )


class Training(Closing):
    """Trains a job in stretches; between two of them its state can be saved.

    Args:
        job: what to train.
        choice: the mode.
        options: of the pool.

    Raises:
        ArgumentError: the job has no optimizer, or the options make no sense.
    """

    def __init__(self, job: Job, choice: Choice, options: dict[str, Any]) -> None:
        self.job, self.learner = job, make_learner(job)
        self._mode = choice.mode(self.learner)
        self.pool = job.pool(**options)
        statistics = self.pool.statistics()
        is_alone = statistics.engine == "serial"
        self.learner.limit_threads(statistics.threads if is_alone else 1)
        self.distance = Distance()

    def steps(self, stop: int) -> Iterator[Step]:
        """Trains on all batches before number `stop`; yields after every update."""
        batches = batches_between(self.job, self.distance.batches, stop)
        for step in take_steps(self.pool, self.learner, batches, self._mode):
            self.distance = self.distance.after(step)
            yield step
        self.distance = Distance(**{**asdict(self.distance), "batches": stop})

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here."""
        return {
            "job": {name: getattr(self.job, name) for name in _OF_THE_JOB},
            "pool": self.pool.state_dict(),
            "learner": state_of(self.learner),
            "distance": asdict(self.distance),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the training that gave this state was.

        Raises:
            ArgumentError: it is of another job, or of a pool with other threads.
        """
        for name, value in state["job"].items():
            if getattr(self.job, name) != value:
                raise ArgumentError(
                    f"the checkpoint is of a job with {name}={value!r}, and this one "
                    f"has {name}={getattr(self.job, name)!r}; expected the same job"
                )
        self.pool.load_state_dict(state["pool"])
        load_state(self.learner, state["learner"])
        self.distance = Distance(**state["distance"])

    def close(self) -> None:
        """Ends the pool."""
        self.pool.close()
