"""What is compared: one process, and each mode with each number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from instep._training.choice import SYNCHRONOUS, Choice

ONE_PROCESS = "one process"


@dataclass(frozen=True)
class Setting:
    """One way to train the job.

    Attributes:
        choice: the mode.
        workers: processes that compute; 1 for one process.
        options: of the pool.
    """

    choice: Choice
    workers: int
    options: dict[str, Any]

    @property
    def is_alone(self) -> bool:
        """Whether the script's own process computes everything."""
        return bool(self.options["engine"] == "serial")

    @property
    def mode(self) -> str:
        """What the mode is called."""
        return ONE_PROCESS if self.is_alone else self.choice.text

    @property
    def name(self) -> str:
        """What the setting is called."""
        if self.is_alone:
            return ONE_PROCESS
        plural = "" if self.workers == 1 else "s"
        return f"{self.choice.text}, {self.workers} worker{plural}"


def alone(threads: int) -> Setting:
    """One process with so many threads."""
    options = {"engine": "serial", "workers": 1, "shards": 1, "threads": threads}
    return Setting(SYNCHRONOUS, 1, options)


def together(
    choices: Sequence[Choice], workers: Sequence[int], options: dict[str, Any]
) -> list[Setting]:
    """Each mode with each number of workers.

    Args:
        choices: the modes.
        workers: the numbers.
        options: of every pool; without `shards`, each batch has as many as the most
            workers, so that synchronous runs have the same bits.
    """
    shared = {"engine": "processes", "threads": 1, "shards": max(workers), **options}
    pairs = [(choice, number) for choice in choices for number in workers]
    return [
        Setting(choice, number, {**shared, "workers": number})
        for choice, number in pairs
    ]
