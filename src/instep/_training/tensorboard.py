"""Scalars for TensorBoard, written by its own record writer; imports no TensorFlow."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from instep._closing import Closing
from instep._errors import InstepError, MissingFrameworkError

# Seconds after which what was written can be seen.
FLUSH_S = 2.0


class ScalarWriter(Closing):
    """An event file in a folder, as TensorBoard looks for it.

    Args:
        folder: made if it is not there.

    Raises:
        MissingFrameworkError: TensorBoard is not installed.
        InstepError: nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer import record_writer
        except ModuleNotFoundError as error:
            raise MissingFrameworkError(
                "--tensorboard needs TensorBoard, which is not installed here; install "
                "it with: pip install tensorboard"
            ) from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{name}.{os.getpid()}").open("wb")
        except OSError as error:
            raise InstepError(f"cannot write to {folder}: {error.strerror}") from error
        self._records = record_writer.RecordWriter(self._file)
        self._flushed = time.monotonic()
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the values that these tags have after `step` updates."""
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars.items()
        ]
        summary = self._summary(value=values)
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Writes what is left."""
        self._records.close()

    def _write(self, event: object) -> None:
        self._records.write(event.SerializeToString())  # type: ignore[attr-defined]
        if time.monotonic() - self._flushed > FLUSH_S:
            self._records.flush()
            self._flushed = time.monotonic()
