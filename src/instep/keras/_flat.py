"""A `tf.function` of trees, called flat.

TensorFlow spends 0.4 ms a call on nested arguments, five times what the optimizer of a
small model takes. So the trees are taken apart here, and one concrete function is kept
per structure and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from instep._tree import flatten, unflatten


class FlatFunction:
    """Calls a function with the same trees, compiled.

    Args:
        function: of trees of tensors, `tf.IndexedSlices` and numbers; returns a tree
            of tensors.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._traced: dict[Any, Any] = {}
        self._concrete: dict[Any, Any] = {}

    def __call__(self, *trees: Any) -> Any:
        leaves, structure = flatten(trees)
        kind = structure, tuple(isinstance(x, tf.IndexedSlices) for x in leaves)
        tensors = [tf.convert_to_tensor(part) for part in _parts(leaves)]
        form = kind, tuple([(t.shape, t.dtype) for t in tensors])
        if form not in self._concrete:
            if kind not in self._traced:
                self._traced[kind] = self._trace(*kind)
            # With another shape than before it is open, as in Keras's own function.
            concrete = self._traced[kind].get_concrete_function(*tensors)
            self._concrete[form] = concrete
        return self._concrete[form](*tensors)

    def _trace(self, structure: Any, are_slices: tuple[bool, ...]) -> Any:
        def flat(*tensors: tf.Tensor) -> Any:
            parts = iter(tensors)
            leaves = [_leaf(parts) if s else next(parts) for s in are_slices]
            return self._function(*unflatten(structure, leaves))

        return tf.function(flat, autograph=False, reduce_retracing=True)


def _parts(leaves: Iterable[Any]) -> Iterator[Any]:
    for leaf in leaves:
        if isinstance(leaf, tf.IndexedSlices):
            yield from (leaf.values, leaf.indices, leaf.dense_shape)
        else:
            yield leaf


def _leaf(parts: Iterator[tf.Tensor]) -> tf.IndexedSlices:
    return tf.IndexedSlices(next(parts), next(parts), next(parts))
