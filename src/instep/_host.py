"""What a stream needs of its pool, and the pool of its adapter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from instep._dispatch import Dispatcher
from instep._layout import Layout
from instep._options import Options
from instep._outcome import Outcome
from instep._program import Array, Output, Program
from instep._sharding import Splitter
from instep.engines._base import Engine


class Prepared(NamedTuple):
    """A batch, as the adapter hands it to the stream.

    Attributes:
        arguments: trees of arrays, as for a step.
        split: per argument, False: not split by rows; None: all are.
        outputs: what every portion returns besides its loss.
        form: whatever the adapter needs to know of it later.
        key: equal for batches that need the same parameters.
    """

    arguments: tuple[Any, ...]
    split: Sequence[bool] | None
    outputs: Sequence[Output]
    form: Any = None
    key: Any = None


class Host(Protocol):
    """What a stream needs of its pool."""

    _lock: Any
    _engine: Engine
    _dispatcher: Dispatcher
    _options: Options
    _params: Splitter
    _sent: Program
    _bytes_moved: int
    _steps: int
    _version: int

    @property
    def shards(self) -> int: ...

    @property
    def _workers(self) -> int: ...

    def _check_usable(self) -> None: ...

    def _layout_of(self, outputs: Sequence[Output]) -> Layout: ...

    def _end_stream(self, stream: Any) -> None: ...

    def _split_into(self, parts: int) -> AbstractContextManager[None]: ...

    def _stream_publish(self, params: Any) -> None: ...

    def _stream_batch(self, batch: tuple[Any, ...]) -> Prepared: ...

    def _stream_params(self, prepared: Prepared) -> Any: ...

    def _stream_arrays(
        self, leaves: list[Array], prepared: Prepared
    ) -> list[Array]: ...

    def _stream_result(
        self, outcome: Outcome, prepared: Prepared
    ) -> tuple[Any, Any]: ...
