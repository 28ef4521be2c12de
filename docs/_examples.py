"""A griffe extension: an `Example:` in a docstring is shown as code, not as a quote."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Gives the sections the name under which griffe knows doctests."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every function, class and module that is read."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace(
                "\nExample:\n", "\nExamples:\n"
            )
