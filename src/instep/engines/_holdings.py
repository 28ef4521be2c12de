"""Which outputs are on which other machine, and which of them nobody wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GONE = -1  # the station of outputs whose machine is gone


class Held(NamedTuple):
    """Where outputs are."""

    station: int
    key: int


class Holdings:
    """Outputs of a call's shards, by shard, and of kept frames, by key."""

    def __init__(self) -> None:
        self._of_shards: dict[int, Held] = {}
        self._of_keys: dict[int, Held] = {}
        self._spare: list[Held] = []

    def hold(self, held: Held, shard: int | None, *, is_wanted: bool) -> None:
        """Outputs are there; of a shard's the first count."""
        if not is_wanted:
            self.spare(held)
        elif shard is None:
            self._of_keys[held.key] = held
        elif self._of_shards.setdefault(shard, held) is not held:
            self.spare(held)

    def spare(self, held: Held) -> None:
        """Nobody wants these outputs."""
        if held.station != GONE:
            self._spare.append(held)

    def find(self, shards: int, keys: Sequence[int] | None) -> list[Held | None]:
        """Where the outputs of a call, or those with these keys, are; None: here."""
        if keys is None:
            return [self._of_shards.get(shard) for shard in range(shards)]
        return [self._of_keys.get(key) for key in keys]

    def drop(self, held: Sequence[Held | None]) -> None:
        """The stations have given these up."""
        gone = {where for where in held if where is not None}
        for known in (self._of_shards, self._of_keys):
            for name in [name for name, where in known.items() if where in gone]:
                del known[name]

    def forget(self, key: int) -> bool:
        """Nobody wants those with this key; False: they are here."""
        held = self._of_keys.pop(key, None)
        if held is not None:
            self.spare(held)
        return held is not None

    def forget_call(self) -> None:
        """Nobody wants those of shards."""
        for held in self._of_shards.values():
            self.spare(held)
        self._of_shards.clear()

    def take_spare(self, station: int) -> list[int]:
        """Keys of what that station is to forget."""
        keys = [held.key for held in self._spare if held.station == station]
        if keys:
            self._spare = [held for held in self._spare if held.station != station]
        return keys

    def lose(self, station: int) -> None:
        """That machine is gone."""
        self.take_spare(station)
        for known in (self._of_shards, self._of_keys):
            for name, held in known.items():
                if held.station == station:
                    known[name] = Held(GONE, held.key)
