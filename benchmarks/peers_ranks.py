"""The processes of peers.py: each trains a model in one way, or its part of it.

    python peers_ranks.py CONTENDER TASK PORTS FOLDER RANK

See crew.py for how they are told to. An order is {"steps": number}, the answer
{"seconds": per step, "loss": mean over these steps and this process's rows}. Every
turn begins with a step that is not timed: it wakes the others up.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import peers_hands
import torch
from crew import Answer, Order, rank_of, received_orders, serve
from peers_models import TASKS, Task, rows_of

Step = Callable[[], Any]
"""Takes a step; the loss before it, of this process's rows, as a number or tensor."""


@dataclass(frozen=True)
class Place:
    """Which of the ranks this process is, where they meet, and what they train."""

    rank: int
    ranks: int
    folder: Path
    ports: list[str]
    task: str


@contextmanager
def instep_pool(
    task: Task, place: Place, workers: int = 2, engine: str = "processes"
) -> Iterator[Step]:
    """A pool of this library."""
    import instep.torch

    model, batches = task.model(), cycle(task.tensors())
    optimizer = task.optimizer(model)
    options = {"workers": workers, "threads": 1, "engine": engine}
    with instep.torch.GradientPool(model, task.loss, **options) as pool:

        def step() -> Any:
            optimizer.zero_grad()
            loss = pool.backward(*next(batches))
            optimizer.step()
            return loss

        step()
        while len(pool.statistics().pids) < workers:
            pool.evaluate(*task.tensors()[0])
        yield step


@contextmanager
def alone(task: Task, place: Place) -> Iterator[Step]:
    """One process, or ranks that know nothing of each other, each with its rows."""
    model = task.model()
    optimizer = task.optimizer(model)
    batches = cycle(task.tensors(place.rank, place.ranks))
    step = training(model, optimizer, task.loss, batches)
    step()
    yield step


@contextmanager
def data_parallel(task: Task, place: Place) -> Iterator[Step]:
    """A rank of DistributedDataParallel."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    method = f"file://{place.folder}/rendezvous"
    distributed.init_process_group(
        "gloo", init_method=method, rank=place.rank, world_size=place.ranks
    )
    model = DistributedDataParallel(task.model())
    optimizer = task.optimizer(model)
    batches = cycle(task.tensors(place.rank, place.ranks))
    step = training(model, optimizer, task.loss, batches)
    step()
    yield step


def training(
    model: Any, optimizer: Any, loss_of: Callable[..., Any], batches: Iterator[Any]
) -> Step:
    """The loop of a PyTorch script."""

    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, *next(batches))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@contextmanager
def mpi(task: Task, place: Place) -> Iterator[Step]:
    """A rank of Open MPI that adds up the flattened gradient."""
    from mpi4py import MPI

    world, model = MPI.COMM_WORLD, task.model()
    optimizer = task.optimizer(model)
    batches = cycle(task.tensors(place.rank, place.ranks))
    parameters = list(model.parameters())
    own, total = torch.empty(2, sum(p.numel() for p in parameters))
    pieces = total.split([p.numel() for p in parameters])
    gradients = [v.view_as(p) for v, p in zip(pieces, parameters, strict=True)]

    def step() -> Any:
        optimizer.zero_grad()
        loss = task.loss(model, *next(batches))
        loss.backward()
        torch.cat([p.grad.reshape(-1) for p in parameters], out=own)
        world.Allreduce(own.numpy(), total.numpy())
        total.div_(world.size)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        return loss.detach()

    step()
    yield step


@contextmanager
def loky(task: Task, place: Place) -> Iterator[Step]:
    """joblib: parameters and rows go out, gradients come back, as arrays."""
    from joblib import Parallel, delayed

    # Memory-mapped files, its default from 1 MB on, stay until the end: 100 MB a step.
    with Parallel(n_jobs=2, backend="loky", max_nbytes=None) as parallel:

        def compute(parameters: list[np.ndarray], halves: list[Any]) -> list[Any]:
            call = delayed(peers_hands.half_gradient)
            return parallel(call(place.task, parameters, half) for half in halves)

        step = by_hand(task, compute)
        step()
        yield step


@contextmanager
def ray_actors(task: Task, place: Place) -> Iterator[Step]:
    """Ray: the same with two actors, and parameters in its object store."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        actors = [ray.remote(peers_hands.Actor).remote(place.task) for _ in "ab"]

        def compute(parameters: list[np.ndarray], halves: list[Any]) -> list[Any]:
            stored = ray.put(parameters)
            pairs = zip(actors, halves, strict=True)
            return ray.get([actor.half.remote(stored, half) for actor, half in pairs])

        step = by_hand(task, compute)
        step()
        yield step
    finally:
        ray.shutdown()


def by_hand(task: Task, compute: Callable[..., list[Any]]) -> Step:
    """The loop of a script that has halves of each batch computed elsewhere."""
    model = task.model()
    optimizer = task.optimizer(model)
    parameters = list(model.parameters())
    pairs = cycle([[half_of(x, y, part) for part in range(2)] for x, y in task.batches])

    def step() -> Any:
        answers = compute([p.detach().numpy() for p in parameters], next(pairs))
        (loss_a, grads_a), (loss_b, grads_b) = answers
        for parameter, a, b in zip(parameters, grads_a, grads_b, strict=True):
            parameter.grad = torch.from_numpy((a + b) * np.float32(0.5))
        optimizer.step()
        return (loss_a + loss_b) / 2

    return step


def half_of(x: np.ndarray, y: np.ndarray, part: int) -> tuple[np.ndarray, np.ndarray]:
    return rows_of(x, part, 2), rows_of(y, part, 2)


@contextmanager
def jax_sharded(task: Task, place: Place) -> Iterator[Step]:
    """JAX: one process, the rows on two devices that share its threads."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    layers = peers_hands.dense_layers(task.model())
    loss_of = jax_loss(is_regression=task.batches[0][1].dtype.kind == "f")

    @jax.jit
    def update(weights: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(weights, x, y)
        return loss, jax.tree.map(lambda w, g: w - task.rate * g, weights, grads)

    mesh = Mesh(np.array(jax.devices()), ("rows",))
    by_rows, everywhere = (
        NamedSharding(mesh, PartitionSpec(*names)) for names in [("rows",), ()]
    )
    state = {"weights": jax.device_put(layers, everywhere)}
    batches = cycle([jax.device_put(batch, by_rows) for batch in task.batches])

    def step() -> Any:
        loss, state["weights"] = update(state["weights"], *next(batches))
        return loss.block_until_ready()

    step()
    yield step


def jax_loss(*, is_regression: bool) -> Callable[..., Any]:
    """The loss of dense layers with ReLU in between."""
    import jax
    import jax.numpy as jnp

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for weight, bias in weights[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        x = x @ weights[-1][0] + weights[-1][1]
        if is_regression:
            return jnp.mean((x - y) ** 2)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1)
        return -jnp.mean(chosen)

    return loss


@contextmanager
def mirrored(task: Task, place: Place) -> Iterator[Step]:
    """A rank of TensorFlow's MultiWorkerMirroredStrategy, the loop of keras_fit.py."""
    cluster = {"worker": [f"localhost:{port}" for port in place.ports]}
    kind = {"type": "worker", "index": place.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": kind})
    import tensorflow as tf
    from keras_trainers import mirrored_step, own_rows

    tf.config.threading.set_intra_op_parallelism_threads(1)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            implementation=ring
        )
    )
    keras_task = peers_hands.keras_task(task)
    one, total = mirrored_step(strategy, keras_task)
    batches = iter(strategy.distribute_datasets_from_function(own_rows(keras_task)))

    def step() -> Any:
        before = total.numpy()
        one(batches)
        return (total.numpy() - before) * place.ranks  # Keras divides it by them

    step()
    yield step


def turns_of(step: Step) -> Callable[[Order], Answer]:
    """Carries out orders with it."""

    def carry_out(order: Order) -> Answer:
        losses = [step()]
        begin = time.perf_counter()
        losses += [step() for _ in range(order["steps"])]
        seconds = (time.perf_counter() - begin) / order["steps"]
        return {"seconds": seconds, "loss": float(np.mean([float(x) for x in losses]))}

    return carry_out


@dataclass(frozen=True)
class Way:
    """A contender.

    Attributes:
        trainer: makes a process's step.
        ranks: processes that train together.
        threads: of PyTorch in each; None: as many as it likes.
        tasks: that it can do; empty: all.
        package: that it needs.
        is_exact: takes the same steps as one process, but for rounding.
        environment: variables it needs.
    """

    trainer: Callable[[Task, Place], AbstractContextManager[Step]]
    ranks: int = 1
    threads: int | None = 1
    tasks: tuple[str, ...] = ()
    package: str = "torch"
    is_exact: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return ""


TWO_DEVICES = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "JAX_PLATFORMS": "cpu",
}
KERAS = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
DENSE = ("parabola", "MLP")

WAYS = {
    "instep": Way(instep_pool),
    "1 thread": Way(alone),
    "all threads": Way(alone, threads=None),
    "DDP": Way(data_parallel, ranks=2),
    "limit": Way(alone, ranks=2, is_exact=False),
    "mpi4py": Way(mpi, ranks=2, package="mpi4py"),
    "joblib": Way(loky, package="joblib"),
    "Ray": Way(ray_actors, package="ray"),
    "JAX": Way(jax_sharded, tasks=DENSE, package="jax", environment=TWO_DEVICES),
    "MWMS": Way(
        mirrored,
        ranks=2,
        tasks=(*DENSE, "CNN"),
        package="tensorflow",
        environment=KERAS,
    ),
}

# In jobs of mpirun, with so many ranks that compute.
ON_MPI = {
    f"by hand {ranks}": Way(mpi, ranks=ranks, package="mpi4py") for ranks in (2, 4)
} | {
    f"instep {workers}": Way(partial(instep_pool, workers=workers, engine="mpi"))
    for workers in (2, 4)
}


def main() -> None:
    name, task, ports, folder = *sys.argv[1:4], Path(sys.argv[4])
    way = {**WAYS, **ON_MPI}[name]
    place = Place(rank_of(sys.argv[5]), way.ranks, folder, ports.split(","), task)
    if way.threads:
        torch.set_num_threads(way.threads)
    orders = received_orders(folder, place.rank)
    with way.trainer(TASKS[task](), place) as step:
        serve(orders, folder, place.rank, turns_of(step))


if __name__ == "__main__":
    main()
