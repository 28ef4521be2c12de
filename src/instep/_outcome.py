"""What the shards of one call, or of one update, come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from instep._aux import ShardAnswer, merge_aux
from instep._program import Array


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one call over the whole batch.

    Attributes:
        loss: numpy scalar, in the dtype of the loss.
        weight: sum of the shards' weights.
        outputs: one array per output, or None; memory that is not used again while
            anyone holds it.
        shards: what each shard gave, in order.
    """

    loss: Any
    weight: float
    outputs: list[Array | None]
    shards: list[ShardAnswer]

    @property
    def aux(self) -> Any:
        """The aux of the whole batch, merged by the rules of `instep.Sum`."""
        return merge_aux(self.shards)
