"""A process that trains one Keras model in one way, a turn whenever it is told to.

    python keras_trainers.py WAY TASK [RANK PORT ...]

Every line on standard input is an order to take one turn; the answer is a line of
JSON: {"seconds": of the turn's steps, "loss": their mean, or of a rank its part of the
mean}. Between turns the process sleeps in a read. The end of the orders is its end,
even in the middle of a turn.

`fit` is timed from the beginning of its epoch to the end: making a data set and an
iterator of the arrays is not a step.

`model.fit` of Keras 3 fails under `MultiWorkerMirroredStrategy` (Keras 3.15 with
TensorFlow 2.21: it takes the mean of a batch over the replicas to build the model, and
a PerReplica is no tensor). So that contender is the custom loop of TensorFlow's guide
"Custom training loop with Keras and MultiWorkerMirroredStrategy", `strategy.run` in a
`tf.function`, and faster where that is fair: each process has its rows of all batches
ready, each rank adds up its losses and combines them with nobody, and there are no
callbacks. As with `fit`, every step is a call.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from keras_models import TASKS, Task

# Seconds to end in after the last order.
GRACE_S = 20.0

Turn = Callable[[], tuple[float, float]]
"""Takes the steps of a turn: their seconds, this process's part of their mean loss."""


@contextmanager
def plain(task: Task) -> Iterator[Turn]:
    """`fit` as it is."""
    yield fitting(task, task.compiled())


@contextmanager
def instep_two(task: Task) -> Iterator[Turn]:
    """`fit` with two workers of this library."""
    import instep.keras

    model = task.compiled()
    with instep.keras.parallel(model, workers=2):
        yield fitting(task, model)


@contextmanager
def mirrored(task: Task) -> Iterator[Turn]:
    """A rank of MultiWorkerMirroredStrategy; TF_CONFIG says which."""
    import tensorflow as tf

    communication = tf.distribute.experimental
    ring = communication.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=communication.CommunicationOptions(implementation=ring)
    )
    step, total = mirrored_step(strategy, task)
    batches = iter(strategy.distribute_datasets_from_function(own_rows(task)))

    def turn() -> tuple[float, float]:
        total.assign(0.0)
        begin = time.perf_counter()
        for _ in range(task.steps):
            step(batches)
        seconds = time.perf_counter() - begin
        return seconds, float(total.numpy()) / task.steps

    yield turn


def mirrored_step(strategy: Any, task: Task) -> tuple[Callable[[Any], None], Any]:
    """A function that takes one step, and the variable that adds up a rank's losses."""
    import tensorflow as tf

    with strategy.scope():
        model, optimizer, loss = task.model(), task.optimizer(), task.loss()
        optimizer.build(model.trainable_variables)
    total = tf.Variable(0.0)

    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))  # Keras divides it by the ranks
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        total.assign_add(value)

    @tf.function(autograph=False)
    def step(batches: Any) -> None:
        strategy.run(replica_step, args=next(batches))

    return step, total


def own_rows(task: Task) -> Callable[[Any], Any]:
    """Makes a rank's data set: its part of each batch, without end."""
    import tensorflow as tf

    def data_set(context: Any) -> Any:
        rank, ranks = context.input_pipeline_id, context.num_input_pipelines
        rows = task.batch // ranks

        def part(array: Any) -> Any:
            batches = array.reshape(task.steps, ranks, rows, *array.shape[1:])
            return batches[:, rank]

        batches = tf.data.Dataset.from_tensor_slices((part(task.x), part(task.y)))
        return batches.cache().repeat().prefetch(tf.data.AUTOTUNE)

    return data_set


def fitting(task: Task, model: Any) -> Turn:
    """A turn is a `fit` over the task's batches."""
    import keras

    class Clock(keras.callbacks.Callback):
        """The seconds of the epoch. It has no hook per batch, and costs none."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begin = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seconds = time.perf_counter() - self.begin

    def turn() -> tuple[float, float]:
        clock = Clock()
        history = model.fit(
            task.x,
            task.y,
            batch_size=task.batch,
            shuffle=False,
            verbose=0,
            callbacks=[clock],
        )
        return clock.seconds, history.history["loss"][0]

    return turn


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the benchmark's to handle
    name, task, *cluster = sys.argv[1:]
    answers, orders, way = answers_only(), received_orders(), WAYS[name]
    if cluster:
        os.environ["TF_CONFIG"] = tf_config(int(cluster[0]), cluster[1:])
    if way.threads:
        use_threads(way.threads)
    with way.trainer(TASKS[task]()) as turn:
        while orders.get():
            seconds, loss = turn()
            print(json.dumps({"seconds": seconds, "loss": loss}), file=answers)


def answers_only() -> Any:
    """Standard output for the answers; what else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def use_threads(number: int) -> None:
    """How many threads TensorFlow may use inside an operation."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(number)


def tf_config(rank: int, ports: list[str]) -> str:
    """A cluster of processes on this machine."""
    workers = [f"localhost:{port}" for port in ports]
    task = {"type": "worker", "index": rank}
    return json.dumps({"cluster": {"worker": workers}, "task": task})


def received_orders() -> queue.SimpleQueue[bool]:
    """True for each order; False at their end, and then the process has to end."""
    orders: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def receive() -> None:
        for _ in sys.stdin:
            orders.put(True)
        orders.put(False)
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=receive, daemon=True).start()
    return orders


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        trainer: makes a process's turns.
        ranks: processes that train together.
        threads: inside an operation; None: as many as TensorFlow likes.
    """

    trainer: Callable[[Task], AbstractContextManager[Turn]]
    ranks: int = 1
    threads: int | None = None


WAYS = {
    "fit": Way(plain),
    "fit, 1 thread": Way(plain, threads=1),
    "instep": Way(instep_two),
    "MWMS": Way(mirrored, ranks=2),
    "MWMS, 1 thread": Way(mirrored, ranks=2, threads=1),
}


if __name__ == "__main__":
    main()
