"""Which traces a pool has, and which one a batch needs.

A loss is traced with an open number of rows and with numbers as 0-d tensors, so that
one trace serves all shards, all batches and every learning rate. It is traced again

* when the batch's structure, dtypes, bools or strings change;
* when another set of variables is trainable;
* when another dimension changes, which is left open from then on.

A loss that cannot be traced so gets its Python numbers as float64 or, with a trace
per number, as they are; or a trace per shard size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from instep._errors import InstepError, LossError
from instep._program import Array
from instep._sharding import is_row_list, shard_bounds
from instep._tree import Structure, flatten, leaf_names, unflatten
from instep.tensorflow._arrays import Numbers, batch_array, is_number
from instep.tensorflow._program import Trace, TraceKey
from instep.tensorflow._trace import EagerTrace, LossFunction, trace_loss

Shape = tuple[int | None, ...]


@dataclass
class Entry:
    """A loss traced for one kind of batch.

    Attributes:
        number: what the workers know it by.
        shapes: of the arrays; None where a dimension is open.
        by_rows: traces by rows of the shard; under None the one for any number.
    """

    number: int
    shapes: tuple[Shape, ...]
    by_rows: dict[int | None, EagerTrace] = field(default_factory=dict)

    @property
    def traced(self) -> EagerTrace:
        """Any of its traces: they differ in the number of rows alone."""
        return next(iter(self.by_rows.values()))


@dataclass(frozen=True, slots=True)
class Batch:
    """The loss's arguments, taken apart.

    Attributes:
        structure: of the arguments.
        leaves: their leaves.
        arrays: the same as arrays; None for a Python value.
    """

    structure: Structure
    leaves: list[Any]
    arrays: list[Array | None]

    @classmethod
    def of(cls, arguments: tuple[Any, ...], numbers: Numbers) -> Batch:
        """Takes the arguments apart."""
        leaves, structure = flatten(arguments, is_row_list)
        names = leaf_names(structure, "batch")
        arrays = [
            batch_array(name, leaf, numbers)
            for name, leaf in zip(names, leaves, strict=True)
        ]
        return cls(structure, leaves, arrays)

    @property
    def has_numbers(self) -> bool:
        return any(map(is_number, self.leaves))

    @property
    def data(self) -> list[Array]:
        """The arrays alone."""
        return [array for array in self.arrays if array is not None]

    @property
    def kind(self) -> Hashable:
        """Everything but the shapes: another kind needs another trace."""
        pairs = zip(self.leaves, self.arrays, strict=True)
        values = tuple(x if a is None else None for x, a in pairs)
        types = tuple((array.dtype.str, array.ndim) for array in self.data)
        return self.structure, values, types

    @property
    def rows(self) -> int:
        return next((len(array) for array in self.data if array.ndim), 0)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes with an open number of rows."""
        return tuple((None, *a.shape[1:]) if a.ndim else () for a in self.data)

    def shippable(self) -> Any:
        """The arguments as arrays; the Python values are in the trace."""
        return unflatten(self.structure, self.arrays)

    def with_tensors(self, tensors: Sequence[tf.Tensor]) -> Any:
        """The arguments with a tensor for every array."""
        rest = iter(tensors)
        pairs = zip(self.leaves, self.arrays, strict=True)
        leaves = [x if array is None else next(rest) for x, array in pairs]
        return unflatten(self.structure, leaves)


class Traces:
    """The traces of one loss.

    Args:
        loss: the loss.
        shards: parts a batch is split into.
        arguments: batch -> what the loss is called with.
    """

    def __init__(
        self,
        loss: LossFunction,
        shards: Callable[[], int],
        arguments: Callable[[Any], Sequence[Any]],
    ) -> None:
        self._loss = loss
        self._shards = shards
        self._arguments = arguments
        self._entries: dict[Hashable, list[Entry]] = {}
        self._numbers: dict[Hashable, Numbers] = {}

    def shipped(self) -> dict[TraceKey, Trace]:
        """All traces, as the workers know them."""
        return {
            (entry.number, rows): traced.trace
            for entry in self._all()
            for rows, traced in entry.by_rows.items()
        }

    def find(self, arguments: tuple[Any, ...]) -> tuple[Batch, Entry]:
        """The batch and its entry; traces the loss where that is needed.

        Raises:
            BatchError: a value that does not make a tensor.
            Exception: what the loss raised while it was traced.
        """
        batch = Batch.of(arguments, Numbers.TENSORS)
        kind = batch.kind
        numbers = self._numbers.get(kind)
        if numbers:
            batch = Batch.of(arguments, numbers)
        entry = self._known(batch)
        if entry is not None:
            return batch, entry
        variants = _variants(arguments, batch.has_numbers, numbers)
        numbers, entry = self._trace(variants)
        batch = variants[numbers]
        if numbers is not Numbers.TENSORS:
            self._numbers[kind] = numbers
        # After the trace: a model that builds itself has its variables only now.
        self._entries.setdefault(self._key(batch), []).insert(0, entry)
        return batch, entry

    def _known(self, batch: Batch) -> Entry | None:
        for entry in self._entries.get(self._key(batch), []):
            if _fit(entry.shapes, batch.shapes):
                if None not in entry.by_rows:
                    self._trace_sizes(entry, batch)
                return entry
        return None

    def _key(self, batch: Batch) -> Hashable:
        return batch.kind, tuple(v.ref() for v in self._loss.variables())

    def _all(self) -> Iterator[Entry]:
        for entries in self._entries.values():
            yield from entries

    def _trace(self, variants: Mapping[Numbers, Batch]) -> tuple[Numbers, Entry]:
        """A trace as general as the loss allows, and how it takes numbers."""
        ways = (self._trace_open, self._trace_fixed)
        *attempts, last = itertools.product(ways, variants)
        for trace, numbers in attempts:
            try:
                return numbers, trace(variants[numbers])
            except InstepError:
                raise
            except Exception:  # the loss may need to know more
                continue
        # What this raises is the loss's own error: it has got all as it was given.
        trace, numbers = last
        return numbers, trace(variants[numbers])

    def _trace_open(self, batch: Batch) -> Entry:
        """A trace for any number of rows, and for any size that has changed."""
        known = self._entries.get(self._key(batch), [])
        shapes = _opened(known[0].shapes, batch.shapes) if known else batch.shapes
        return Entry(self._number(), shapes, {None: self._traced(batch, shapes)})

    def _trace_fixed(self, batch: Batch) -> Entry:
        """Traces for the shard sizes and shapes of this batch."""
        entry = Entry(self._number(), batch.shapes)
        self._trace_sizes(entry, batch)
        return entry

    def _number(self) -> int:
        return sum(1 for _ in self._all())

    def _trace_sizes(self, entry: Entry, batch: Batch) -> None:
        """Traces what is missing of the (at most two) shard sizes of the batch."""
        bounds = shard_bounds(batch.rows, self._shards())
        for rows in sorted({stop - start for start, stop in bounds}):
            if rows not in entry.by_rows:
                shapes = tuple((rows, *s[1:]) if s else s for s in entry.shapes)
                entry.by_rows[rows] = self._traced(batch, shapes)
                _check_same_variables(entry.traced, entry.by_rows[rows])

    def _traced(self, batch: Batch, shapes: Sequence[Shape]) -> EagerTrace:
        specs = [
            tf.TensorSpec(shape, tf.dtypes.as_dtype(array.dtype))
            for shape, array in zip(shapes, batch.data, strict=True)
        ]
        return trace_loss(
            self._loss, lambda t: self._arguments(batch.with_tensors(t)), specs
        )


def _variants(
    arguments: tuple[Any, ...], has_numbers: bool, known: Numbers | None
) -> dict[Numbers, Batch]:
    """The batch, with its numbers in every way that may be tried."""
    ways = [known] if known else list(Numbers) if has_numbers else [Numbers.TENSORS]
    return {numbers: Batch.of(arguments, numbers) for numbers in ways}


def _fit(known: Sequence[Shape], shapes: Sequence[Shape]) -> bool:
    return all(
        k is None or k == n
        for shape, new in zip(known, shapes, strict=True)
        for k, n in zip(shape, new, strict=True)
    )


def _opened(known: Sequence[Shape], shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """None where two batches differ."""
    return tuple(
        tuple(k if k == n else None for k, n in zip(shape, new, strict=True))
        for shape, new in zip(known, shapes, strict=True)
    )


def _check_same_variables(one: EagerTrace, other: EagerTrace) -> None:
    names = [[v.name for v in traced.variables] for traced in (one, other)]
    if names[0] != names[1]:
        raise LossError(
            f"the loss uses the variables {names[0]} for one number of rows and "
            f"{names[1]} for another; expected the same"
        )
