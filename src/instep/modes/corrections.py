"""What is done to a stale gradient before it is applied: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from instep._errors import ArgumentError
from instep._program import Array

# Of the running mean of squares in the adaptive form; the authors' value.
_EPSILON = 1e-7


class Stale(NamedTuple):
    """Gradients that were computed some updates ago.

    Attributes:
        gradients: one array per parameter.
        now: the parameters they are going to be applied to.
        read: the parameters they were computed with.
        staleness: updates in between.
        worker: who computed them.
    """

    gradients: Sequence[Array]
    now: Sequence[Array]
    read: Sequence[Array]
    staleness: int
    worker: int


class Correction(Protocol):
    """Changes stale gradients; one for a run, told of every gradient in order."""

    def fresh(self) -> Correction:
        """The same without memory, for a new run."""

    def correct(self, stale: Stale) -> list[Array]:
        """The gradients to apply."""


@dataclass(frozen=True)
class StalenessAware:
    """Divides a gradient by its staleness, where that is above 1.

    Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD for Distributed Deep
    Learning", 2016: the learning rate over the staleness.

    Example:
        >>> import instep
        >>> mode = instep.Asynchronous(correction=instep.StalenessAware())
    """

    def fresh(self) -> StalenessAware:
        """Itself: it remembers nothing."""
        return self

    def correct(self, stale: Stale) -> list[Array]:
        """The gradients, divided by the staleness if it is above 1."""
        if stale.staleness <= 1:
            return list(stale.gradients)
        return [g / g.real.dtype.type(stale.staleness) for g in stale.gradients]


@dataclass(frozen=True)
class DelayCompensated:
    """Adds what the gradient has missed, to first order.

        g + strength * g * g * (now - read)

    where g * g stands for the Hessian's diagonal. Zheng et al., "Asynchronous
    Stochastic Gradient Descent with Delay Compensation", 2017. In the adaptive form
    (their DC-ASGD-a) the strength is divided by the root of a running mean of g * g,
    which each worker has for itself:

        strength / sqrt(MS + 1e-7),    MS = momentum * MS + (1 - momentum) * g * g

    Args:
        strength: lambda; 0 changes nothing. They use 0.04, and 2 in the adaptive form.
        adaptive: whether to adapt it.
        momentum: of the running mean.

    Raises:
        ArgumentError: a negative strength, or a momentum outside [0, 1).

    Example:
        >>> import instep
        >>> mode = instep.Asynchronous(correction=instep.DelayCompensated(0.04))
    """

    strength: float = 0.04
    adaptive: bool = False
    momentum: float = 0.95
    _squares: dict[int, list[Array]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.strength >= 0:
            raise ArgumentError(
                f"strength={self.strength!r}; expected a number of at least 0"
            )
        if not 0 <= self.momentum < 1:
            raise ArgumentError(
                f"momentum={self.momentum!r}; expected a number in [0, 1)"
            )

    def fresh(self) -> DelayCompensated:
        """The same, with no squares remembered."""
        return DelayCompensated(self.strength, self.adaptive, self.momentum)

    def correct(self, stale: Stale) -> list[Array]:
        """The compensated gradients."""
        strengths = self._strengths(stale.gradients, stale.worker)
        # Where nothing was missed, g * g might still overflow: inf * 0 is NaN.
        if self.strength == 0 or stale.staleness == 0:
            return list(stale.gradients)
        parts = zip(stale.gradients, strengths, stale.now, stale.read, strict=True)
        return [g + s * g * g * (w - old) for g, s, w, old in parts]

    def _strengths(self, gradients: Sequence[Array], worker: int) -> list[Array]:
        """One per parameter, in its dtype."""
        constants = [np.asarray(self.strength, g.real.dtype) for g in gradients]
        if not self.adaptive:
            return constants
        before = self._squares.get(worker) or [np.zeros_like(g) for g in gradients]
        share = self.momentum
        squares = [
            (share * ms + (1 - share) * g * g).astype(g.dtype)
            for ms, g in zip(before, gradients, strict=True)
        ]
        self._squares[worker] = squares
        return [
            (s / np.sqrt(ms + _EPSILON)).astype(ms.dtype)
            for s, ms in zip(constants, squares, strict=True)
        ]
