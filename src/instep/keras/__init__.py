"""Keras: `model.fit` with several processes, and nothing else changed."""

from __future__ import annotations

try:
    import keras as _keras  # noqa: F401
except ImportError as error:
    from instep._errors import import_error

    raise import_error("Keras", "keras") from error

from instep.keras._parallel import Parallel as Parallel
from instep.keras._parallel import parallel as parallel
