"""May this loss be sharded at all? Compares the whole batch with its shards.

The gradient of the whole batch, computed as one shard, is what a pool promises.
Where the shards do not give it, a few more splits tell the likely reason:

    shards added up give it                      the loss is a sum, not a mean
    shards averaged give it (reduction="sum")    the loss is a mean, not a sum
    the excess grows with the number of shards   something is counted once per shard
    another weighting of the shards gives it     the mean is not over rows
    it is the same for each row twice            batch statistics
    else                                         rows are compared with each other
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from instep._program import Array, Rule
from instep._sharding import shard_bounds

Gradients = Mapping[str, Array | None]

SUM = "the loss is a sum over rows, not a mean: use reduction='sum', or average it"
MEAN = "the loss is a mean over rows, not a sum: use reduction='mean', or add it up"
PER_SHARD = (
    "something that does not depend on the rows (a regulariser) is counted once per "
    "shard: use a mean and reduction='mean', or divide it by the number of shards"
)
WEIGHTS = (
    "the loss's mean is not over the rows (masked or weighted rows): return "
    "instep.Weighted(mean, weight) with what it is over"
)
STATISTICS = (
    "batch statistics: rows are normalised by the batch they are in (BatchNorm), "
    "which is another batch in every shard"
)
PAIRS = (
    "rows are compared with each other (in-batch negatives, ranking, sorting), and a "
    "shard has fewer of them"
)
RANDOM = (
    "randomness (dropout, sampling): every shard draws numbers of its own, so only "
    "the expectation is the same"
)
NONDETERMINISTIC = (
    "the same seed gives different results: a generator that instep does not seed, "
    "or threads that race"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that differs.

    Attributes:
        name: the parameter, or "loss".
        difference: largest difference, relative to the largest value in either.
        reason: the likely one.
    """

    name: str
    difference: float
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `pool.check` found; prints as a table.

    Attributes:
        findings: one per parameter that differs, and for the loss.
        checked: how many parameters were compared.
        shards: how many shards they were compared at.
        largest: the largest relative difference of all.
        notes: remarks that do not make the loss unfit.
    """

    findings: tuple[Finding, ...]
    checked: int
    shards: int
    largest: float
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether the shards give the whole batch's loss and gradient."""
        return not self.findings

    def __str__(self) -> str:
        verdict = "gives" if self.ok else "does NOT give"
        head = (
            f"{self.shards} shards: the mean of the shards {verdict} the whole batch's "
            f"loss and gradient ({self.checked} parameters, largest relative "
            f"difference {self.largest:.1e})"
        )
        width = max((len(f.name) for f in self.findings), default=0)
        lines = [head]
        for reason in dict.fromkeys(f.reason for f in self.findings):
            lines.append(f"  likely reason: {reason}")
            same = (f for f in self.findings if f.reason == reason)
            lines += [f"    {f.name:<{width}}  {f.difference:8.1e}" for f in same]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class Trial:
    """What one computation gave; nothing of the user's was changed by it."""

    loss: float
    gradients: Gradients


class Compute(Protocol):
    """Computes the batch in some other way than the pool would."""

    def __call__(
        self, shards: int, rule: Rule, *, seed: int = 0, index: Array | None = None
    ) -> Trial:
        """The batch, or its rows `index`, in so many shards combined by the rule."""


def check(compute: Compute, whole: Trial, shards: int, rule: Rule, rows: int) -> Report:
    """Compares `shards` shards with the whole batch and says what differs, and why."""
    sharded = compute(shards, rule)
    differences = _differences(whole, sharded)
    wrong = {n: d for n, d in differences.items() if not d <= _precision(whole)}
    notes: tuple[str, ...] = ()
    reason = None
    if wrong:
        reason = _randomness(compute, rule, whole)
        if reason == RANDOM:
            notes, wrong = (RANDOM,), {}
        else:
            diagnosis = _Diagnosis(compute, whole, sharded, shards, rule, rows)
            reason = reason or diagnosis.reason()
    findings = tuple(Finding(n, d, str(reason)) for n, d in wrong.items())
    largest = max(differences.values(), default=0.0)
    return Report(findings, len(whole.gradients), shards, largest, notes)


def _randomness(compute: Compute, rule: Rule, whole: Trial) -> str | None:
    """What kind of chance the loss depends on, if any."""
    if not _agree(whole, compute(1, rule)):
        return NONDETERMINISTIC
    return None if _agree(whole, compute(1, rule, seed=1)) else RANDOM


@dataclass(frozen=True, slots=True)
class _Diagnosis:
    """Tries other ways to combine shards until one gives the whole batch."""

    compute: Compute
    whole: Trial
    sharded: Trial
    shards: int
    rule: Rule
    rows: int

    def reason(self) -> str:
        tests: list[tuple[Callable[[], bool], str]] = [
            (self._other_rule_fits, SUM if self.rule == "mean" else MEAN),
            (self._excess_grows_with_shards, PER_SHARD),
            (self._other_weights_fit, WEIGHTS),
            (self._is_the_same_for_each_row_twice, STATISTICS),
        ]
        return next((reason for test, reason in tests if test()), PAIRS)

    def _other_rule_fits(self) -> bool:
        other: Rule = "sum" if self.rule == "mean" else "mean"
        return _agree(self.whole, self.compute(self.shards, other))

    def _excess_grows_with_shards(self) -> bool:
        """Each further shard adds the same to a sum."""
        if self.rule == "mean" or self.rows <= self.shards:
            return False
        more = self.compute(self.shards + 1, self.rule)
        whole, now, then = map(_vector, (self.whole, self.sharded, more))
        expected = whole + self.shards * (now - whole) / (self.shards - 1)
        return _distance(expected, then) <= 100 * _precision(self.whole)

    def _other_weights_fit(self) -> bool:
        """Whether the whole batch is an average of the shards with other weights."""
        if self.rule == "sum":
            return False
        bounds = shard_bounds(self.rows, self.shards)
        alone = [self.compute(1, self.rule, index=np.arange(*b)) for b in bounds]
        columns = np.stack(list(map(_vector, alone)), axis=1)
        target = _vector(self.whole)
        weights = np.linalg.lstsq(columns, target, rcond=None)[0]
        is_average = abs(weights.sum() - 1) < 1e-3 and weights.min() > -1e-3
        fits = _distance(columns @ weights, target) <= 10 * _precision(self.whole)
        # With as many shards as numbers, some weights always fit.
        return bool(is_average and fits and len(target) > len(bounds))

    def _is_the_same_for_each_row_twice(self) -> bool:
        twice = np.repeat(np.arange(self.rows), 2)
        return _agree(self.whole, self.compute(1, self.rule, index=twice))


def _agree(one: Trial, other: Trial) -> bool:
    return all(d <= _precision(one) for d in _differences(one, other).values())


def _differences(one: Trial, other: Trial) -> dict[str, float]:
    """Relative differences of the loss and of every gradient."""
    pairs = {
        name: _arrays(one.gradients[name], other.gradients[name])
        for name in one.gradients
    }
    # Some gradients are zero but for rounding: that of a bias before BatchNorm, or of
    # the keys' bias in attention. So each is measured against the others, too.
    least = 0.01 * max((_scale(*pair) for pair in pairs.values()), default=0.0)
    return {
        "loss": _distance(np.float64(one.loss), np.float64(other.loss)),
        **{name: _distance(*pair, least) for name, pair in pairs.items()},
    }


def _arrays(a: Array | None, b: Array | None) -> tuple[Any, Any]:
    """None is a gradient of zero."""
    return (0.0 if a is None else a), (0.0 if b is None else b)


def _distance(a: Any, b: Any, least: float = 0.0) -> float:
    """Largest difference relative to the largest value; NaNs at the same place fit.

    Args:
        a: one array.
        b: the other.
        least: values below this are small.
    """
    a, b = (np.asarray(x).astype(np.result_type(x, np.float64)) for x in (a, b))
    if not a.size and not b.size:
        return 0.0
    scale = max(_scale(a, b), least)
    if scale == 0 or np.array_equal(a, b, equal_nan=True):
        return 0.0
    return float(np.max(np.abs(a - b)) / scale)


def _scale(a: Any, b: Any) -> float:
    """The largest value in either."""
    return max(float(np.max(np.abs(x), initial=0.0)) for x in (a, b))


def _precision(trial: Trial) -> float:
    """The relative difference that rounding alone may make in the coarsest dtype."""
    dtypes = [g.dtype for g in trial.gradients.values() if g is not None]
    return max((_rounding(dtype) for dtype in dtypes), default=1e-4)


def _rounding(dtype: np.dtype[Any]) -> float:
    if dtype.itemsize == 2:  # float16 and bfloat16 keep 11 and 8 bits
        return 0.02 if dtype.kind == "f" else 0.1
    return 1e3 * float(np.finfo(dtype).eps)


def _vector(trial: Trial) -> Array:
    """All gradients one after the other, in float64."""
    parts = [np.ravel(g) for g in trial.gradients.values() if g is not None]
    return np.concatenate(parts).astype(np.result_type(*parts, np.float64))
