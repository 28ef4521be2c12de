"""Commands in a job of MPI: rank 0 does the work, the other ranks serve it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence

_FAILED = 1
# Where Open MPI, MPICH with its relatives, and Slurm's srun say it. Not SLURM_NTASKS: a
# batch script has that, too.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def engine_here(engine: str | None) -> str | None:
    """The engine that is meant: MPI's where its launcher has started several of us."""
    started = max(int(os.environ.get(name, 1)) for name in _SIZES)
    return "mpi" if engine is None and started > 1 else engine


def on_ranks(given: Sequence[str], work: Callable[[], int]) -> int:
    """Works on rank 0, and serves on the others until that has ended; the exit code.

    Args:
        given: the words after `instep`.
        work: what rank 0 does.
    """
    from instep._options import defaults
    from instep.engines import mpi

    if "PYTHONHASHSEED" not in os.environ:  # one for all: it decides the order of sets
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "instep", *given])
    if not mpi.is_master():
        mpi.serve()
        return 0
    mpi.begin_serving()
    defaults.setdefault("workers", mpi.num_workers())
    try:
        code = work()
    except Exception:
        traceback.print_exc()
        code = _FAILED
    finally:
        mpi.end_serving()
    return code
