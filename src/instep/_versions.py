"""Versions of the parameters, each kept on the shelf until its last reader answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from instep._errors import ArgumentError
from instep._frame import FrameRef
from instep._host import Host, Prepared
from instep._layout import Layout
from instep._program import Array
from instep.modes.corrections import Correction, Stale


@dataclass
class Version:
    """One version, as a batch of some form needs it."""

    number: int
    ref: FrameRef
    readers: int = 1  # the stream itself, while it is the newest


class Versions:
    """Those that a stream has."""

    def __init__(self, pool: Host) -> None:
        self._pool = pool
        self._newest: dict[Any, Version] = {}  # by what the batch needs
        self.layout: Layout | None = None
        self.number = 0  # of the newest: updates made

    def read(self, prepared: Prepared) -> Version:
        """The newest, for one more reader.

        Raises:
            ArgumentError: other parameters have gradients than before.
        """
        version = self._newest.get(prepared.key)
        if version is None:
            pool = self._pool
            params = pool._params.whole(pool._stream_params(prepared))
            self._lay_out(prepared)
            pool._version += 1
            ref = pool._engine.kept_params.keep(params, self.layout)
            pool._bytes_moved += ref.nbytes
            version = self._newest[prepared.key] = Version(self.number, ref)
        version.readers += 1
        return version

    def leave(self, version: Version) -> None:
        """A reader less."""
        version.readers -= 1
        if not version.readers:
            self._pool._engine.kept_params.release(version.ref)

    def advance(self) -> None:
        """The script has taken its step: there is another version."""
        self.number += 1
        for version in self._newest.values():
            self.leave(version)
        self._newest.clear()

    def corrected(
        self,
        correction: Correction,
        outputs: list[Array | None],
        prepared: Prepared,
        version: Version,
        staleness: int,
        worker: int,
    ) -> list[Array | None]:
        """Gradients of this version, corrected for the newest one."""
        pool, shelf = self._pool, self._pool._engine.kept_params
        tree = pool._params.whole(pool._stream_params(prepared))
        now = pool._stream_arrays(list(map(np.asarray, tree.leaves)), prepared)
        read = pool._stream_arrays(shelf.arrays(version.ref), prepared)
        # Outputs beyond the parameters are state, which is not corrected.
        there = [k for k in range(len(now)) if outputs[k] is not None]
        gradients = [output for output in outputs[: len(now)] if output is not None]
        arrays = [now[k] for k in there], [read[k] for k in there]
        with np.errstate(all="ignore"):  # an overflow is the user's to see in the loss
            corrected = correction.correct(Stale(gradients, *arrays, staleness, worker))
        found = dict(zip(there, corrected, strict=True))
        return [found.get(k, output) for k, output in enumerate(outputs)]

    def _lay_out(self, prepared: Prepared) -> None:
        layout = self._pool._layout_of(prepared.outputs)
        if self.layout is not None and layout is not self.layout:
            raise ArgumentError(
                "the parameters that have gradients, or their form, have changed; end "
                "this stream and begin another"
            )
        self.layout = layout
        self._pool._engine.lay_out(layout)
