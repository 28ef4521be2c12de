"""Draws the demo: the points and the fit, and how the loss fell."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from instep._demo.measure import Results
from instep._demo.parabola import points, predict
from instep._demo.words import name
from instep._errors import ArgumentError, InstepError

POOLED, ONE, POINTS = "#d1495b", "#30638e", "#8d99ae"


def check_format(path: Path) -> None:
    """Raises ArgumentError if no picture can be written under this name."""
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in formats:
        raise ArgumentError(
            f"--output {path}: the name says no known format; expected one that ends "
            "in .png, .pdf or .svg"
        )


def draw(results: Results, path: Path) -> None:
    """Writes the picture, all or nothing.

    Raises:
        InstepError: the file cannot be written.
    """
    # No pyplot: it would want a screen, or set one up for the whole process.
    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=150)
    fit, curve = figure.subplots(1, 2)
    _draw_fit(fit, results)
    _draw_losses(curve, results)
    for axes in (fit, curve):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.lower().lstrip("."))
    try:
        path.write_bytes(content.getvalue())
    except OSError as error:
        raise InstepError(f"cannot write {path}: {error.strerror}") from error


def _draw_fit(axes: Any, results: Results) -> None:
    x, y = points()
    fine = np.linspace(-2, 2, 400, dtype=np.float32)[:, np.newaxis]
    axes.plot(x, y, "o", color=POINTS, markersize=5, label="50 points of $y = x^2$")
    fitted = predict(results.pooled.end.parameters, fine)
    axes.plot(fine, fitted, color=POOLED, linewidth=2, label="1-5-1 tanh network")
    axes.set(title=f"Trained by {name(results.size)}", xlabel="x", ylabel="y")


def _draw_losses(axes: Any, results: Results) -> None:
    one, pooled = results.one.losses, results.pooled.losses
    # The curves coincide: the broad one shows on both sides of the narrow one.
    axes.semilogy(one, color=ONE, alpha=0.35, linewidth=6, label="one process")
    axes.semilogy(pooled, color=POOLED, linewidth=1.5, label=name(results.size))
    axes.set(title="Mean squared error", xlabel="step", ylabel="loss")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.02)
