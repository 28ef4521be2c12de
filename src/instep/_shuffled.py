"""Batches of a data set in an order that depends on seed and epoch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from instep._errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np

    Rows = np.ndarray[tuple[int], np.dtype[np.int64]]


def shuffled(
    rows: int, batch_size: int, seed: int = 0, epoch: int = 0
) -> Iterator[Rows]:
    """The row numbers of every batch of an epoch, shuffled.

    Another epoch has another order, and the same epoch the same one: on every machine,
    with every version of NumPy, for any number of workers, in a run that was resumed.

    Args:
        rows: of the data set.
        batch_size: rows per batch; the last batch has what is left.
        seed: any whole number.
        epoch: counts from 0.

    Returns:
        An iterator over int64 arrays, to index arrays with.

    Raises:
        ArgumentError: a negative number, or a batch size of 0.

    Example:
        >>> [batch.size for batch in instep.shuffled(50, 17, seed=1, epoch=0)]
        [17, 17, 16]
    """
    if rows < 0 or batch_size < 1 or epoch < 0:
        raise ArgumentError(
            f"rows={rows}, batch_size={batch_size}, epoch={epoch}; expected whole "
            "numbers, batch_size at least 1 and the others at least 0"
        )
    order = _permutation(rows, seed, epoch)
    return (order[k : k + batch_size] for k in range(0, rows, batch_size))


def _permutation(rows: int, seed: int, epoch: int) -> Rows:
    """Row numbers sorted by random keys.

    NumPy keeps the numbers of its bit generators for ever, those of its `permutation`
    not. A key that comes twice (once in 2**64 / rows pairs) keeps the order of rows.
    """
    import numpy as np  # `import instep` is to be light

    counter = np.array([0, 0, epoch, 0], np.uint64)
    generator = np.random.Philox(key=seed % 2**128, counter=counter)
    return np.argsort(generator.random_raw(rows), kind="stable").astype(np.int64)
