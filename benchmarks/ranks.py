"""The ranks of gloo and MPI: processes that wait for an order to all-reduce.

    python ranks.py FOLDER SIZE                     forks SIZE ranks of gloo
    mpirun -n SIZE python ranks.py FOLDER SIZE      is one of MPI

FOLDER holds named pipes: `orders.RANK`, from which a rank reads how often to reduce,
and `answers`, to which rank 0 writes the seconds it took. So a rank that has nothing
to do sleeps in a read; in a barrier of MPI it would spin. Its end is the end of the
orders, whatever became of the benchmark.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

NUM_FLOATS = 16


def serve(folder: Path, rank: int, all_reduce: Callable[[], object]) -> None:
    """Carries out orders until there are no more."""
    with (
        open(folder / f"orders.{rank}") as orders,
        open(folder / "answers", "w") as out,
    ):
        for order in orders:
            all_reduce()  # all ranks are awake after this one
            begin = time.perf_counter()
            for _ in range(int(order)):
                all_reduce()
            if rank == 0:
                print(time.perf_counter() - begin, file=out, flush=True)


def run_gloo(folder: Path, size: int) -> None:
    """Forks ranks that have torch already."""
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                serve_gloo(folder, rank, size)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def serve_gloo(folder: Path, rank: int, size: int) -> None:
    """One rank of gloo, which meets the others over loopback."""
    import torch
    from torch import distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size
    )
    vector = torch.zeros(NUM_FLOATS)
    serve(folder, rank, lambda: distributed.all_reduce(vector))


def serve_mpi(folder: Path) -> None:
    """One rank of MPI."""
    import numpy as np
    from mpi4py import MPI

    vector, result = np.zeros((2, NUM_FLOATS), np.float32)
    world = MPI.COMM_WORLD
    serve(folder, world.rank, lambda: world.Allreduce(vector, result))


if __name__ == "__main__":
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        serve_mpi(folder)
    else:
        run_gloo(folder, size)
