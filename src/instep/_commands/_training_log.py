"""Follows a training: for the screen, for TensorBoard, and for a summary."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

from instep._commands._training_display import Display, View
from instep._training.learner import digest
from instep._training.loop import Step
from instep._training.numbers import finite
from instep._training.training import Training

if TYPE_CHECKING:
    from typing_extensions import Self

    from instep._training.tensorboard import ScalarWriter

_log = logging.getLogger("instep.train")

# Updates that a shown loss is the mean of; batches differ.
RECENT = 20
# Seconds between two pictures.
INTERVAL_S = 0.25


class TrainingLog:
    """Notes every step.

    Attributes:
        saved: the step that the last checkpoint is of.
    """

    def __init__(
        self,
        training: Training,
        steps: int,
        display: Display,
        board: ScalarWriter | None,
    ) -> None:
        self.training, self.display, self._board = training, display, board
        self._steps = steps
        begin = training.distance.batches
        self.saved: int | None = begin or None
        self._resumed_at = self._taken = begin
        self._losses: list[float] = []
        self._recent: deque[Step] = deque(maxlen=RECENT)
        self._staleness: Counter[int] = Counter()
        self._load, self._whole = Load(), Load()
        self._shown = float("-inf")
        self._begin = training.distance
        self._lost = 0

    def note(self, step: Step) -> None:
        """One more."""
        self._taken += step.batches
        self._losses.append(step.loss)
        self._recent.append(step)
        self._staleness[step.staleness] += 1
        for load in (self._load, self._whole):
            load.note(step)
        is_due = time.monotonic() - self._shown > INTERVAL_S
        if self._board is not None:
            self._write(self._board, step, is_due)
        if is_due:
            self._show()

    def summary(self) -> dict[str, Any]:
        """How it went, for `--json`."""
        training, statistics = self.training, self._statistics
        distance = training.distance
        updates = distance.updates - self._begin.updates
        seconds = distance.seconds - self._begin.seconds
        return {
            "framework": training.job.framework,
            "engine": statistics.engine,
            "workers": statistics.workers,
            "shards": statistics.shards,
            "threads": statistics.threads,
            "seed": training.job.seed,
            "steps": distance.batches,
            "resumed_at": self._resumed_at,
            "updates": updates,
            "examples": distance.examples,
            "seconds": seconds,
            "updates_per_second": updates / seconds if seconds else 0.0,
            "loss": finite(self._recent_loss()),
            "losses": list(map(finite, self._losses)),
            "staleness": {str(k): n for k, n in sorted(self._staleness.items())},
            "load": self._whole.shares(),
            "workers_lost": statistics.workers_lost,
            "sha256": digest(training.learner),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._show()
        self._statistics = self.training.pool.statistics()
        self.display.close()

    def _show(self) -> None:
        self._note_lost_workers()
        self.display.show(self._view())
        self._shown, self._load = time.monotonic(), Load()

    def _view(self) -> View:
        recent = list(self._recent)
        seconds = sum(step.seconds for step in recent)
        return View(
            updates=self.training.distance.updates,
            done=self._taken,
            steps=self._steps,
            loss=self._recent_loss(),
            speed=len(recent) / seconds if seconds else 0.0,
            staleness=sum(s.staleness for s in recent) / max(1, len(recent)),
            load=self._load.shares(),
        )

    def _recent_loss(self) -> float:
        recent = [step.loss for step in self._recent]
        return sum(recent) / len(recent) if recent else float("nan")

    def _note_lost_workers(self) -> None:
        lost = self.training.pool.statistics().workers_lost
        if lost > self._lost:
            _log.warning("%d workers were lost and replaced", lost - self._lost)
        self._lost = lost

    def _write(self, board: ScalarWriter, step: Step, is_due: bool) -> None:
        scalars = {
            "loss": step.loss,
            "staleness": step.staleness,
            "updates_per_second": 1 / step.seconds,
        }
        if is_due:
            shares = enumerate(self._load.shares())
            scalars |= {f"load/worker_{k}": share for k, share in shares}
        board.add(self.training.distance.updates, scalars)


class Load:
    """The share of the time for which each worker computes."""

    def __init__(self) -> None:
        self._busy: list[float] = []
        self._seconds = 0.0

    def note(self, step: Step) -> None:
        """One more update."""
        busy = self._busy or [0.0] * len(step.busy)
        self._busy = [a + b for a, b in zip(busy, step.busy, strict=True)]
        self._seconds += step.seconds

    def shares(self) -> list[float]:
        """0.0 to 1.0 for each worker; none before the first update."""
        return [min(1.0, busy / self._seconds) for busy in self._busy]
