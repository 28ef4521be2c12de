"""Where each output of a shard lies in its slot: one flat run per rule and dtype.

    | present: one byte per output | pad | mean float32 ... | mean float64 ... |

Outputs of one dtype and rule lie together, so that averaging passes over a few
long vectors however many parameters a model has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from instep._errors import GradientError
from instep._frame import aligned
from instep._program import Array, Output, Rule


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes in a slot with one dtype and one combining rule."""

    rule: Rule
    dtype: np.dtype[Any]
    start: int
    stop: int

    def clipped(self, start: int, stop: int) -> Segment:
        """What of it lies between these bytes; nothing if start >= stop."""
        first, last = max(self.start, start), min(self.stop, stop)
        return replace(self, start=first, stop=last)


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of all outputs in a slot of `nbytes` bytes; compared by identity."""

    outputs: tuple[Output, ...]
    offsets: tuple[int, ...]
    segments: tuple[Segment, ...]
    nbytes: int

    @classmethod
    def of(cls, outputs: Sequence[Output]) -> Layout:
        """Places the outputs, those of one rule and dtype side by side."""
        offsets = [0] * len(outputs)
        segments: list[Segment] = []
        end = aligned(len(outputs))
        for key in dict.fromkeys((o.rule, o.dtype) for o in outputs):
            start = end
            for index, output in enumerate(outputs):
                if (output.rule, output.dtype) == key:
                    offsets[index] = end
                    end += aligned(_nbytes(output))
            segments.append(Segment(*key, start, end))
        return cls(tuple(outputs), tuple(offsets), tuple(segments), end)

    @cached_property
    def working(self) -> Layout:
        """With the dtypes that outputs are combined in; itself, if they are the same.

        The results of a part of the shards lie so, since half precision is rounded
        once, when all are combined.
        """
        outputs = [replace(o, dtype=working_dtype(o.dtype)) for o in self.outputs]
        return self if tuple(outputs) == self.outputs else Layout.of(outputs)

    def convert(self, slot: Array, layout: Layout) -> Array:
        """A slot that lies as in this layout, as it lies in one of other dtypes."""
        if layout is self:
            return slot
        out = np.zeros(layout.nbytes, np.uint8)
        layout.present(out)[:] = self.present(slot)
        with np.errstate(all="ignore"):  # an overflow is the user's to see
            for view, target in zip(self.views(slot), layout.views(out), strict=True):
                target[...] = view
        return out

    def views(self, buffer: memoryview | Array, base: int = 0) -> list[Array]:
        """One array per output, in place."""
        return [
            np.ndarray(output.shape, output.dtype, buffer, base + offset)
            for output, offset in zip(self.outputs, self.offsets, strict=True)
        ]

    def present(self, buffer: memoryview | Array, base: int = 0) -> Array:
        """One byte per output: 1 where the shard has it, 0 where it is None."""
        return np.ndarray((len(self.outputs),), np.uint8, buffer, base)


def working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that arrays of this one are combined in."""
    is_half = dtype.itemsize == 2 and dtype.kind in "fV"  # bfloat16 has kind V
    return np.dtype(np.float32) if is_half else dtype


def store(
    layout: Layout,
    values: Sequence[Array | None],
    views: Sequence[Array],
    present: Array,
) -> None:
    """Copies a shard's outputs into its slot.

    An output that is None counts as zero should another shard have it.

    Raises:
        GradientError: an array whose shape or dtype is not that of its parameter.
    """
    if len(values) != len(views):
        raise GradientError(
            f"the loss gave {len(values)} gradients for {len(views)} parameters"
        )
    for index, (value, view) in enumerate(zip(values, views, strict=True)):
        present[index] = value is not None
        if value is None:
            view.fill(0)
        else:
            _check(value, layout.outputs[index])
            np.copyto(view, value)


def _check(value: Array, output: Output) -> None:
    if value.shape != output.shape or value.dtype != output.dtype:
        raise GradientError(
            f"the gradient of {output.name or 'a parameter'} has shape {value.shape} "
            f"and dtype {value.dtype}; expected those of the parameter: "
            f"{output.shape} and {output.dtype}"
        )


def _nbytes(output: Output) -> int:
    return output.dtype.itemsize * int(np.prod(output.shape, dtype=np.int64))
