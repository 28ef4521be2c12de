"""Keeps the libraries' chatter from the screen, unless something goes wrong."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def held_back_stderr() -> Iterator[None]:
    """Holds back what is written to descriptor 2, by this process and its workers.

    TensorFlow says a dozen lines about its build in every process that imports it,
    some before any setting can silence it. If the block raises an error, all of it
    is shown: it may hold the reason.
    """
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            yield
        except Exception:
            sys.stderr.flush()
            hidden.seek(0)
            os.write(shown, hidden.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
