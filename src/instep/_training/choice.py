"""A mode as it was asked for: its name and arguments, and the words for both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from instep._training.learner import Learner
from instep.modes import Local, Mode, Synchronous


@dataclass(frozen=True)
class Choice:
    """A mode that can be made for any learner.

    Attributes:
        text: what it was called.
        kind: its class.
        arguments: of the class. A `Local` without an optimizer has the job's.
    """

    text: str
    kind: type[Any]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def is_synchronous(self) -> bool:
        """Whether it waits for every shard, so that its bits are always the same."""
        return self.kind is Synchronous and not self.arguments.get("backup")

    def mode(self, learner: Learner) -> Mode:
        """The mode itself."""
        given = dict(self.arguments)
        if self.kind is Local:
            given.setdefault("optimizer", learner.worker_optimizer())
        mode: Mode = self.kind(**given)
        return mode


SYNCHRONOUS = Choice("synchronous", Synchronous)
