"""Another engine that does a pool's work for a few steps, to see how fast it is.

While it is in charge, the pool has its engine, options and dispatcher; what the pool
had comes back afterwards, whatever happens in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from instep._dispatch import Dispatcher
from instep._sharding import Splitter
from instep._tuning import ONE_PROCESS, Setting
from instep.engines import make_engine

# What a step of a rival may change in its pool.
_KEPT = (
    *("_options", "_engine", "_dispatcher", "_splitter"),
    *("_steps", "_bytes_moved", "_broken", "_sent"),
)
# Seconds all workers may take to start, before it is measured without the others.
START_S = 180.0


class Rival:
    """Computes as a pool with other options would.

    Args:
        pool: whose program it runs.
        setting: engine, workers, threads.
        step: computes one step of the pool, of which nothing stays.
    """

    def __init__(self, pool: Any, setting: Setting, step: Callable[[], object]) -> None:
        self._pool, self._step = pool, step
        options = replace(pool._options, **setting.options)
        self._engine = make_engine(options.engine)
        is_alone = setting.engine == ONE_PROCESS
        self._workers = 0 if is_alone else setting.workers
        self._threads = setting.threads if is_alone else 1  # of this process
        self._sent: Any = None
        self._own = {
            "_options": options,
            "_engine": self._engine,
            "_dispatcher": Dispatcher(self._engine, options),
            "_splitter": Splitter(setting.workers),
        }

    def start(self) -> None:
        """Begins to start its workers, and returns at once."""
        with self._in_charge():
            self._ship()

    def wait(self) -> None:
        """Computes until all workers have started."""
        limit = time.monotonic() + START_S
        with self._in_charge():
            while len(self._engine.pids()) < self._workers and time.monotonic() < limit:
                self._step()

    def turn(self, steps: int) -> list[float]:
        """The seconds of so many steps, after one to wake up by."""
        seconds = []
        with self._in_charge():
            self._step()
            for _ in range(steps):
                begin = time.perf_counter()
                self._step()
                seconds.append(time.perf_counter() - begin)
        return seconds

    def close(self) -> None:
        """Ends its workers."""
        self._engine.close()

    @contextmanager
    def _in_charge(self) -> Iterator[None]:
        pool = self._pool
        kept = {name: getattr(pool, name) for name in _KEPT}
        with pool._lent(self._threads):
            try:
                vars(pool).update(self._own)
                if self._sent is not None and self._sent is not pool._sent:
                    self._ship()
                yield
            finally:
                self._sent = pool._sent
                vars(pool).update(kept)
                if self._sent is not kept["_sent"] and pool._closer.alive:
                    pool._ship(self._sent)  # another trace was needed

    def _ship(self) -> None:
        self._pool._ship(self._pool._sent)
