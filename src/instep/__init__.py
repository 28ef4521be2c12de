"""instep: the gradient of a whole batch, computed by several processes.

    script                 pool.backward(x, y)                framework tensors
    adapter                numpy · torch · tensorflow · jax   tensors <-> flat arrays
                           keras: model.fit, through one of the last three
    pool                   owns engine, step counter, seed; checks the batch
    sharding               batch -> shards (contiguous, weighted, any pytree)
    schedule               which worker computes which shard; stealing, retries
    engine                 serial · processes · mpi · ray     moves bytes
    worker                 one loop: read params, compute shard, write gradient
    reduction              fixed tree over shard index; weighted means
    adapter, script        grads in the user's own structure; optimizer.step()

The result is a function of (parameters, batch, seed, step, shards, threads) and of
nothing else: not of the number of workers, nor of who computed what, or when.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from instep._errors import ArgumentError as ArgumentError
from instep._errors import BatchError as BatchError
from instep._errors import EngineUnavailableError as EngineUnavailableError
from instep._errors import GradientError as GradientError
from instep._errors import InstepError as InstepError
from instep._errors import LossError as LossError
from instep._errors import MissingFrameworkError as MissingFrameworkError
from instep._errors import PoolBrokenError as PoolBrokenError
from instep._errors import PoolClosedError as PoolClosedError
from instep._errors import ShardTimeoutError as ShardTimeoutError
from instep._errors import ShipError as ShipError
from instep._errors import StartError as StartError
from instep._errors import WorkerError as WorkerError
from instep._errors import WorkerLostError as WorkerLostError
from instep._errors import WorkerTraceback as WorkerTraceback
from instep._job import Job as Job
from instep._shuffled import shuffled as shuffled
from instep._values import Mean as Mean
from instep._values import Sum as Sum
from instep._values import Weighted as Weighted

if TYPE_CHECKING:
    from instep import engines as engines
    from instep import jax as jax
    from instep import keras as keras
    from instep import numpy as numpy
    from instep import tensorflow as tensorflow
    from instep import testing as testing
    from instep import torch as torch
    from instep._simulation import Simulation as Simulation
    from instep._simulation import Training as Training
    from instep._simulation import simulate as simulate
    from instep._stream import Stream as Stream
    from instep._stream import Update as Update
    from instep._times import Constant as Constant
    from instep._times import Gamma as Gamma
    from instep._times import HeavyTail as HeavyTail
    from instep._times import Network as Network
    from instep._times import OneSlow as OneSlow
    from instep.modes.asynchronous import Asynchronous as Asynchronous
    from instep.modes.corrections import DelayCompensated as DelayCompensated
    from instep.modes.corrections import StalenessAware as StalenessAware
    from instep.modes.local import Local as Local
    from instep.modes.replay import Replay as Replay
    from instep.modes.stale_synchronous import StaleSynchronous as StaleSynchronous
    from instep.modes.synchronous import Synchronous as Synchronous

__version__ = "0.1.0"

# So that tracebacks name the place a user can import from.
for _public in list(globals().values()):
    if getattr(_public, "__module__", "").startswith("instep._"):
        _public.__module__ = "instep"
del _public

# Imported when first used: `import instep` loads no framework.
_MODULES = ("engines", "jax", "keras", "numpy", "tensorflow", "testing", "torch")


# These load NumPy, which takes longer than all the rest.
_LATER = {
    "Asynchronous": "instep.modes.asynchronous",
    "Constant": "instep._times",
    "DelayCompensated": "instep.modes.corrections",
    "Gamma": "instep._times",
    "HeavyTail": "instep._times",
    "Local": "instep.modes.local",
    "Network": "instep._times",
    "OneSlow": "instep._times",
    "Replay": "instep.modes.replay",
    "Simulation": "instep._simulation",
    "StaleSynchronous": "instep.modes.stale_synchronous",
    "StalenessAware": "instep.modes.corrections",
    "Stream": "instep._stream",
    "Synchronous": "instep.modes.synchronous",
    "Training": "instep._simulation",
    "Update": "instep._stream",
    "simulate": "instep._simulation",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"instep.{name}")
    if name in _LATER:
        found = getattr(importlib.import_module(_LATER[name]), name)
        found.__module__ = "instep"
        globals()[name] = found
        return found
    raise AttributeError(f"module 'instep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_LATER})
