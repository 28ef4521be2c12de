"""The Ray engine: workers are actors, spread over the nodes of a Ray cluster.

    pool = instep.torch.GradientPool(model, loss, engine=instep.engines.Ray(workers=16))

Parameters go to Ray's object store once per step, and from there once to each node. An
actor or a node that dies is a worker that dies: its shards go to others, another actor
is started where there is room, and the bits stay the same.
"""

from __future__ import annotations

import time
from typing import Any

from instep._errors import EngineUnavailableError, PoolClosedError
from instep._frame import RESIDENT
from instep._program import Array
from instep.engines._remote import Command, Compute, Desk, Remote, Report, Start
from instep.engines.processes import worker_environment

# Seconds after which a wait looks whether the pool was closed.
_LOOK_S = 0.2


class Ray(Remote):
    """Workers that are actors of a Ray cluster.

    Args:
        address: of the cluster, as for `ray.init`; None: the one in RAY_ADDRESS, or
            else one that is started on this machine.
        workers: of pools that name no number; None: as many as the cluster has CPUs.
        **options: for `ray.init`, where Ray is not initialised yet.

    Raises:
        EngineUnavailableError: Ray is missing, or the cluster cannot be reached.
    """

    def __init__(
        self, address: str | None = None, workers: int | None = None, **options: Any
    ) -> None:
        self._ray = _ray()
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            quiet = {"include_dashboard": False, "log_to_driver": False}
            try:
                self._ray.init(address, **{**quiet, **options})
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise EngineUnavailableError(
                    f"no Ray cluster at address={address!r}: {error}"
                ) from error
        cpus = int(self._ray.cluster_resources().get("CPU", 1))
        self.workers = workers or max(1, cpus)
        self._actors: dict[int, Any] = {}
        self._answers: dict[Any, int] = {}  # what is awaited -> of which worker
        self._stored: tuple[int, Any] = (-1, None)
        super().__init__()

    def replace(self, worker: int) -> None:
        """Ends the actor and starts another."""
        actor = self._actors.pop(worker, None)
        if actor is not None:
            self._ray.kill(actor)
        self._answers = {ref: w for ref, w in self._answers.items() if w != worker}
        self._drop(worker)
        if worker < self._workers:
            self._take_in(worker)

    def abandon(self, *, at_once: bool) -> None:
        super().abandon(at_once=at_once)
        if at_once:
            for worker in list(self._running):
                self.replace(worker)

    def _prepare(self, workers: int) -> None:
        for worker in [w for w in self._actors if w >= workers]:
            self._workers = workers
            self.replace(worker)

    def _send(self, worker: int, command: Command, params: Array | None) -> None:
        if worker not in self._actors:
            assert isinstance(command, Start)
            self._actors[worker] = self._started(command.threads)
        stored = None if params is None else self._store(command, params)
        answer = self._actors[worker].carry_out.remote(command, stored)
        self._answers[answer] = worker

    def _store(self, command: Command, params: Array) -> Any:
        """The parameters in the object store; those of a call only once."""
        if isinstance(command, Compute) and command.params_ref.base != RESIDENT:
            return self._ray.put(params.copy())
        number, stored = self._stored
        if number != self._published:
            stored = self._ray.put(params.copy())
            self._stored = self._published, stored
        return stored

    def _started(self, threads: int) -> Any:
        environment = worker_environment(threads)
        names = [name for name in environment if name.endswith("_NUM_THREADS")]
        names += ["PYTHONPATH", "PYTHONHASHSEED", "OMP_WAIT_POLICY"]
        variables = {name: environment[name] for name in names}
        has_room = self._ray.available_resources().get("CPU", 0) >= threads
        kind = self._ray.remote(Desk).options(
            num_cpus=threads if has_room else 0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": variables},
        )
        return kind.remote()

    def _collect(self, timeout: float | None) -> list[tuple[int, Report | str]]:
        limit = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._is_closed:
                raise PoolClosedError("the pool was closed during this call")
            left = _LOOK_S
            if limit is not None:
                left = min(left, max(0.0, limit - time.monotonic()))
            ready = self._ready(left)
            if ready or (limit is not None and time.monotonic() >= limit):
                return [(self._answers.pop(ref), self._report(ref)) for ref in ready]

    def _ready(self, seconds: float) -> list[Any]:
        if not self._answers:
            time.sleep(seconds)
            return []
        refs = list(self._answers)
        ready, rest = self._ray.wait(refs, num_returns=1, timeout=seconds)
        if ready and rest:
            ready += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return list(ready)

    def _report(self, answer: Any) -> Report | str:
        try:
            report: Report = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return report

    def _close(self) -> None:
        self._answers.clear()
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._stored = (-1, None)
        if self._is_ours:
            self._ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise EngineUnavailableError(
            "engine='ray' needs Ray, which is not installed here; install it with: "
            "pip install 'instep[ray]'"
        ) from error
    return ray
