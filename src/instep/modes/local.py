"""Workers take steps of their own, and the master averages how far they came.

Local SGD: Stich, 2019. Post-local SGD: Lin, Stich, Patel and Jaggi, 2020. Elastic
averaging: Zhang, Choromanska and LeCun, 2015. DiLoCo: Douillard et al., 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from instep._errors import ArgumentError
from instep.modes.synchronous import SynchronousRules


@dataclass(frozen=True)
class Local:
    """One update per `steps` batches: how far the workers went from the old parameters.

    Each batch is split into the pool's `shards`. Whoever has shard k begins with the
    master's parameters and takes `steps` steps with shard k of `steps` batches. The
    update's gradients are old minus new parameters, averaged over the shards by rows.
    So the master's optimizer decides what becomes of them:

    * plain SGD with rate 1: the average of the parameters (local SGD);
    * SGD with Nesterov momentum (rate 0.7, momentum 0.9): DiLoCo, with AdamW as the
      workers' optimizer.

    The workers' optimizers have a state for each shard, which lasts; it travels with
    the shard, so that bits depend on neither the number of workers nor their deaths.

    Args:
        steps: that a worker takes between two updates.
        optimizer: of the workers. PyTorch: `optimizer(parameters)` gives an optimizer,
            such as `functools.partial(torch.optim.SGD, lr=0.1)`. Keras: a function
            that gives one, such as `functools.partial(keras.optimizers.SGD, 0.1)`.
            JAX: an optax optimizer. NumPy: `optimizer(params, grads) -> params`, which
            may be an object with a state. Any: a number, the rate of plain SGD.
        warmup: so many updates are made with one step each before (post-local SGD).
        elastic: alpha of elastic averaging; None: plain averaging. The shards keep
            parameters x of their own and give them up to the master's only by
            `alpha * (x - master's)`; the update's gradients are minus the sum of these
            over the shards. The master's optimizer is plain SGD with rate 1.

    Raises:
        ArgumentError: a number that makes no sense.

    Example:
        >>> import instep
        >>> mode = instep.Local(steps=8, optimizer=0.1)
    """

    steps: int
    optimizer: Any
    warmup: int = 0
    elastic: float | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("steps", self.steps, 1),
            ("warmup", self.warmup, 0),
        ):
            if type(value) is not int or value < least:
                raise ArgumentError(
                    f"{name}={value!r}; expected a whole number, at least {least}"
                )
        is_rate = isinstance(self.optimizer, int | float)
        if not (is_rate or callable(self.optimizer) or hasattr(self.optimizer, "init")):
            raise ArgumentError(
                f"optimizer={self.optimizer!r}; expected the rate of plain SGD, a "
                "function that makes an optimizer, or an optax optimizer"
            )
        if self.elastic is not None and not 0 <= self.elastic <= 1:
            raise ArgumentError(
                f"elastic={self.elastic!r}; expected a number between 0 and 1, or None"
            )

    def rules(self, workers: int) -> SynchronousRules:
        """Those of the synchronous mode."""
        return SynchronousRules()

    def parts(self, shards: int) -> int:
        """As many as the pool has shards."""
        return shards

    def batches(self, turn: int) -> int:
        """`steps`, after the warm-up."""
        return 1 if turn < self.warmup else self.steps
