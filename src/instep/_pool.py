"""The pool: owns an engine, counts steps, turns one call into shards and back."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from instep._aux import ShardAnswer
from instep._check import Report, Trial, check
from instep._closing import Closing
from instep._cores import usable_cores
from instep._dispatch import Dispatcher
from instep._errors import (
    ArgumentError,
    OutputsLostError,
    PoolBrokenError,
    PoolClosedError,
    StartError,
)
from instep._events import AVERAGE, WAIT, Events
from instep._host import Prepared
from instep._layout import Layout
from instep._options import Options
from instep._outcome import Outcome
from instep._program import Array, Output, Program, Rule, Task
from instep._reduction import reduce_scalar
from instep._rival import Rival
from instep._sharding import Batch, Splitter
from instep._statistics import Statistics
from instep._stream import Stream
from instep._trace import Trace
from instep._tuning import Progress, Tuning, decide, measure, settings
from instep.engines import make_engine
from instep.engines._base import Done, Engine
from instep.modes import Mode, Synchronous

if TYPE_CHECKING:
    from instep._dashboard import Dashboard


_SYNCHRONOUS = Synchronous()

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a fork of this process: a lock may be held by a thread that is not here."""
    for pool in _pools:
        pool._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


class Pool(Closing):
    """Workers that compute a gradient together; base of the frameworks' pools.

    A pool is a context manager. Without `with`, it is closed by `close`, when it is
    garbage-collected, or when the interpreter ends.
    """

    def __init__(self, program: Program, options: Options) -> None:
        self._options = options
        self._lock = threading.RLock()
        _pools.add(self)
        self._owner = os.getpid()
        self._steps = self._version = self._bytes_moved = self._rows = 0
        self._layout = Layout.of([])
        self._outputs: Sequence[Output] = ()
        self._splitter, self._params = Splitter(self.shards), Splitter(1)
        self._broken: BaseException | None = None
        self._stream: weakref.ref[Stream] | None = None
        self._trace: Trace | None = None
        self._parts_of_stream: int | None = (
            None  # of a stream's batch, while it is prepared
        )
        self._engine: Engine = make_engine(options.engine)
        self._dispatcher = Dispatcher(self._engine, options)
        self._closer = weakref.finalize(
            self,
            _close,
            self._engine,
            self._dispatcher.events,
            self._lock,
            self._owner,
        )
        self._ship(program)

    def evaluate(self, *batch: Any) -> Any:
        """The loss over the whole batch (and aux), without the gradient."""
        raise NotImplementedError  # each adapter knows its parameters

    def check(self, *arguments: Any) -> Report:
        """Whether shards give the loss and gradient of the whole batch.

        Takes what a gradient takes, computes the batch whole and in shards (and, where
        they differ, in a few more ways) and changes nothing: no gradient is handed
        over, no step counted, no state written.

        Returns:
            A `Report`: `.ok`, `.findings` with one parameter each and the likely
            reason, and `.notes`; prints as a table.
        """

        def compute(
            shards: int, rule: Rule, *, seed: int = 0, index: Array | None = None
        ) -> Trial:
            with self._trial(shards, rule, seed):
                return self._try(arguments, index)

        with self._lock:
            rule = self._options.reduction
            whole = compute(1, rule)  # refuses a bad batch; counts its rows
            shards = min(max(2, self.shards), self._rows)
            return check(compute, whole, shards, rule, self._rows)

    def _try(self, arguments: tuple[Any, ...], index: Array | None) -> Trial:
        """Loss and gradients of the batch, or of these rows; changes nothing."""
        raise NotImplementedError  # each adapter knows its parameters

    @contextmanager
    def _trial(self, shards: int, rule: Rule, seed: int) -> Iterator[None]:
        """Inside, the batch is split and combined in this way, and no step counts."""
        kept = self._splitter, self._options, self._steps
        self._splitter = Splitter(shards)
        self._options = replace(self._options, reduction=rule)
        self._steps += seed
        try:
            yield
        finally:
            self._splitter, self._options, self._steps = kept

    def tune(
        self,
        *arguments: Any,
        seconds: float = 10.0,
        progress: Progress = lambda done: None,
    ) -> Tuning:
        """Which split of the cores into workers and threads is the fastest.

        Measures this model and batch with several splits, with as many shards as
        workers, and in one process with all threads and with one, in turns. Takes
        what a gradient takes and changes nothing: no gradient is handed over, no step
        counted, no state written.

        Args:
            *arguments: what a gradient takes.
            seconds: what measuring may take, after all workers have started and
                compiled; at least three steps are measured of each split.
            progress: called now and then with the part that is done, 0.0 to 1.0.

        Returns:
            A `Tuning`: `.best`, with the `.options` of a pool that computes so, and
            `.rows`; prints as a table. One process is the best unless processes are
            more than 3 % faster.

        Raises:
            ArgumentError: `seconds` is no number above 0.

        Example:
            >>> import numpy as np, instep
            >>> def fun(w, x):
            ...     return np.mean(w * x), np.mean(x)
            >>> with instep.numpy.value_and_grad(fun, engine="serial") as pool:
            ...     tuning = pool.tune(np.float64(2.0), np.arange(50.0), seconds=0.1)
            >>> tuning.best.engine
            'one process'
        """
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise ArgumentError(f"seconds={seconds!r}; expected a number above 0")

        def step() -> None:
            self._try(arguments, None)

        with self._lock, ExitStack() as opened:
            with self._trial(self.shards, self._options.reduction, 0):
                step()  # refuses a bad batch; counts its rows
            rivals = {
                setting: opened.enter_context(closing(Rival(self, setting, step)))
                for setting in settings(usable_cores(), self._rows, self._alone())
            }
            for rival in rivals.values():
                rival.start()
            for rival in rivals.values():
                rival.wait()
                progress(0.0)
            turns = {setting: rival.turn for setting, rival in rivals.items()}
            return decide(measure(turns, seconds, progress))

    def _alone(self) -> Sequence[int]:
        """How many threads one process, this one, can be measured with."""
        return sorted({1, usable_cores()}, reverse=True)

    @contextmanager
    def _lent(self, threads: int) -> Iterator[None]:
        """Inside, another engine computes; afterwards what it changed is as before.

        Args:
            threads: that this process's own operations may use meanwhile.
        """
        yield

    def statistics(self) -> Statistics:
        """What the pool has done so far."""
        counters, workers = self._dispatcher.counters, range(self._workers)
        return Statistics(
            engine=type(self._engine).__name__.lower(),
            workers=self._workers,
            shards=self.shards,
            threads=self._options.threads or 1,
            steps=self._steps,
            pids=self._engine.pids() if self._closer.alive else (),
            workers_lost=counters.workers_lost,
            shards_recomputed=counters.shards_recomputed,
            shards_late=counters.shards_late,
            bytes_moved=self._bytes_moved,
            shards_computed=tuple(counters.shards_computed.get(w, 0) for w in workers),
            seconds=tuple(counters.seconds.get(w, 0.0) for w in workers),
        )

    @overload
    def trace(self, path: str | os.PathLike[str]) -> Trace: ...

    @overload
    def trace(self, path: None) -> None: ...

    def trace(self, path: str | os.PathLike[str] | None) -> Trace | None:
        """Writes what happens from now on to a file, as a picture in time.

        The file holds Chrome trace events: open it at https://ui.perfetto.dev or
        chrome://tracing. There is a lane for each worker, with the shards that it
        had in its hands, and one for the master: splitting and publishing, waiting,
        averaging, and the script's own time in between. A worker that is lost, a
        shard computed again and each update, with loss and staleness, are marks.

        Ends with the pool, at the end of a `with` block, or with `trace(None)`;
        another path ends it as well. The file is complete JSON at any moment, also
        if the process is killed.

        Args:
            path: of the file, which is overwritten; None: writes no more.

        Returns:
            A `Trace` with `.path`, `.close()` and `with`; nothing for None.

        Raises:
            ArgumentError: the file cannot be written.
            PoolClosedError: as for a step.

        Example:
            >>> import os, numpy as np, instep
            >>> def fun(w, x):
            ...     return np.mean(w * x), np.mean(x)
            >>> with instep.numpy.value_and_grad(fun, engine="serial") as pool:
            ...     with pool.trace(os.devnull) as trace:  # or "run.json"
            ...         result = pool(np.float64(2.0), np.arange(50.0))
            >>> trace.path
            '/dev/null'
        """
        with self._lock:
            if path is not None:
                self._check_usable()
            if self._trace is not None:
                self._trace.close()
                self._trace = None
            if path is not None:
                self._trace = Trace(path, self._dispatcher.events)
            return self._trace

    def dashboard(
        self, port: int | None = None, open_browser: bool = False
    ) -> Dashboard:
        """A page that shows what the pool does while it does it.

        Served to this machine alone, at an address with a secret in it. Shows the
        lanes of master and workers over the last seconds, the loss, steps and rows per
        second, staleness, and faults that were survived. Ends with the pool.

        Args:
            port: on 127.0.0.1; None or 0: any that is free.
            open_browser: also shows it.

        Returns:
            A `Dashboard` with `.url`, `.close()` and `with`.

        Raises:
            ArgumentError: the port is taken, or no port.
            PoolClosedError: as for a step.

        Example:
            >>> import numpy as np, instep
            >>> def fun(w, x):
            ...     return np.mean(w * x), np.mean(x)
            >>> with instep.numpy.value_and_grad(fun, engine="serial") as pool:
            ...     with pool.dashboard() as dashboard:
            ...         result = pool(np.float64(2.0), np.arange(50.0))
            ...         dashboard.url.startswith("http://127.0.0.1:")
            True
        """
        from instep._dashboard import Dashboard  # the web server takes 30 ms to import

        with self._lock:
            self._check_usable()
            statistics = weakref.WeakMethod(self.statistics)
            dashboard = Dashboard(self._dispatcher.events, statistics, port)
        if open_browser:
            dashboard.show()
        return dashboard

    def stream(
        self,
        batches: Iterable[Any],
        mode: Mode = _SYNCHRONOUS,
        *,
        params: Any = None,
        record: str | os.PathLike[str] | None = None,
    ) -> Stream:
        """Updates, one per optimizer step, by the rules of a mode.

        The loop is the same in every mode: take the optimizer's step after each update.
        Where parameters are not updated in place, `publish` the new ones.

        Between updates the pool's other methods may be called; they wait for the
        gradients under way. A pool has one stream at a time; another one ends it.

        Args:
            batches: of the script; each a tuple (or list) of the loss's arguments after
                the parameters, or a single one. Taken when a worker can begin with one.
            mode: `instep.Synchronous()`, `Asynchronous()`, `StaleSynchronous(bound)`,
                `Local(steps, optimizer)` or `Replay(path)`.
            params: as `stream.publish(params)` before the first update.
            record: a file to write the order of events to, for `instep.Replay`.

        Returns:
            A `Stream`: an iterator of `Update`s.

        Raises:
            ArgumentError: no mode, one that does not fit the pool, or nothing was
                published. As for a step otherwise.
        """
        with self._lock:
            self._check_usable()
            if isinstance(mode, type) or not hasattr(mode, "rules"):
                raise ArgumentError(
                    f"mode={mode!r}; expected a mode, such as instep.Synchronous() or "
                    "instep.Asynchronous()"
                )
            if (before := self._open_stream()) is not None:
                before.close()
            if params is not None:
                self._stream_publish(params)
            stream = Stream(self, batches, mode, record)
            self._stream = weakref.ref(stream)
            return stream

    def _open_stream(self) -> Stream | None:
        return None if self._stream is None else self._stream()

    def _end_stream(self, stream: Stream) -> None:
        """The stream is closed."""
        if self._open_stream() is stream:
            self._stream = None

    def _settle(self) -> None:
        """Workers have nothing under way when this returns."""
        if (stream := self._open_stream()) is not None:
            stream.settle()

    # What a stream asks of an adapter

    def _stream_publish(self, params: Any) -> None:
        """The parameters are these now."""
        raise ArgumentError(
            "the parameters are the model's own and updated in place; there is nothing "
            "to publish"
        )

    @contextmanager
    def _split_into(self, parts: int) -> Iterator[None]:
        """Inside, batches are prepared for so many parts."""
        self._parts_of_stream = parts
        try:
            yield
        finally:
            self._parts_of_stream = None

    def _stream_batch(self, batch: tuple[Any, ...]) -> Prepared:
        """The arguments of the loss as trees of arrays."""
        raise ArgumentError(f"a {type(self).__name__} has no stream")

    def _stream_params(self, prepared: Prepared) -> Any:
        """The parameters as they are now, as for a step."""
        raise NotImplementedError

    def _stream_arrays(self, leaves: list[Array], prepared: Prepared) -> list[Array]:
        """Of the parameters' leaves those that outputs are the gradients of."""
        raise NotImplementedError

    def _stream_result(self, outcome: Outcome, prepared: Prepared) -> tuple[Any, Any]:
        """(value, gradients) as the framework's own; hands them over."""
        raise NotImplementedError

    def resize(self, workers: int) -> None:
        """Changes the number of worker processes; the bits stay the same.

        Returns at once: new workers take part as soon as they have started, the
        others go on meanwhile. `shards` stays as it was when the pool was made; more
        workers than shards have nothing to do. May be called from any thread; during
        a step it waits for its end.

        Raises:
            ArgumentError: `workers` is no whole number, or less than 1.
        """
        options = self._options.with_workers(workers)
        with self._lock:
            self._check_usable()
            self._settle()  # workers that are ended have nothing under way
            self._options = options
            self._dispatcher.resize(options.workers or 1)

    def state_dict(self) -> dict[str, Any]:
        """What the pool's results depend on besides parameters and batch.

        To be saved with the script's own checkpoint, in any format: whole numbers and
        a string.
        """
        return {
            "steps": self._steps,
            "seed": self._options.seed,
            "shards": self.shards,
            "threads": self._options.threads or 1,
            "reduction": self._options.reduction,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the pool that gave this state was, with the same bits.

        Steps, seed and shards are taken over; the number of workers and the engine may
        differ.

        Raises:
            ArgumentError: this pool has other `threads` or another `reduction`, or the
                state is of something else.
        """
        _check_state(state, self.state_dict())
        with self._lock:
            self._steps = state["steps"]
            self._options = replace(
                self._options, seed=state["seed"], shards=state["shards"]
            )
            self._splitter = Splitter(self.shards)

    def close(self) -> None:
        """Ends the workers and frees their memory. Calling it twice is fine.

        A step in another thread ends with a PoolClosedError.
        """
        self._closer()

    @property
    def shards(self) -> int:
        """Parts that a batch is split into."""
        return self._options.shards or self._workers

    @property
    def _workers(self) -> int:
        return self._options.workers or 1

    def _ship(self, program: Program) -> None:
        """Starts the workers with this program, in place of the one they had."""
        stream = self._open_stream()
        if stream is not None:
            stream.settle()
        self._sent = program
        self._dispatcher.start(program if stream is None else stream.program(program))

    def _resident(self) -> list[Array]:
        """Where the last parameters lie in the workers' memory; [] if nowhere."""
        return self._engine.resident()

    def _step(
        self,
        params: Any,
        batch: tuple[Any, ...],
        outputs: Sequence[Output],
        *,
        gradient: bool = True,
        split_arguments: Sequence[bool] | None = None,
    ) -> Outcome:
        """Loss, outputs and aux of the whole batch.

        Args:
            params: tree of arrays; every shard gets all of it.
            batch: trees of arrays, split by rows.
            outputs: what every shard returns besides its loss.
            gradient: False computes loss and aux only, and is no step.
            split_arguments: per argument of the batch, False: not split.
        """
        with self._lock, self._dispatcher.events.call:
            self._check_usable()
            self._settle()
            parts = self._splitter.split(batch, split_arguments)
            self._rows = parts.plan.rows
            try:
                return self._compute(
                    self._params.whole(params), parts, outputs, gradient
                )
            except StartError as error:
                self._broken = error
                self._engine.close()
                raise
            except BaseException as error:
                # After an error of the loss the others may finish in peace; after
                # Ctrl-C nobody wants to wait for them.
                self._dispatcher.abandon(at_once=not isinstance(error, Exception))
                raise

    def _compute(
        self, params: Batch, batch: Batch, outputs: Sequence[Output], gradient: bool
    ) -> Outcome:
        layout = self._layout_of(outputs)
        self._bytes_moved += self._engine.publish(params, batch, layout)
        self._version += 1
        tasks, rule = self._tasks(batch, gradient), self._options.reduction
        answers, averaged = self._answers(tasks, gradient, self._options.retries)
        weights = [answer.weight for answer in answers]
        if gradient:
            self._bytes_moved += layout.nbytes * len(answers)
            self._steps += 1
        loss = reduce_scalar([answer.loss for answer in answers], weights, rule)
        if gradient and self._dispatcher.events.is_on:
            step, rows = tasks[0].step, batch.plan.rows
            self._dispatcher.events.update(step, float(loss), rows)
        shards = [
            ShardAnswer(answer.weight, stop - start, answer.aux)
            for answer, (start, stop) in zip(answers, batch.plan.bounds, strict=True)
        ]
        return Outcome(loss, float(sum(weights)), averaged, shards)

    def _answers(
        self, tasks: list[Task], gradient: bool, retries: int
    ) -> tuple[list[Done], list[Array | None]]:
        """The shards' answers and their outputs, averaged."""
        events = self._dispatcher.events
        if events.is_on:
            events.phase(WAIT)
        answers = self._dispatcher.run(tasks)
        if events.is_on:
            events.phase(AVERAGE)
        if not gradient:
            return answers, []
        try:
            return answers, self._engine.average([a.weight for a in answers])
        except OutputsLostError:
            if not retries:
                raise
            for task in tasks if events.is_on else ():
                events.again(task, "outputs were lost")
            return self._answers(tasks, gradient, retries - 1)

    def _tasks(self, batch: Batch, gradient: bool) -> list[Task]:
        bounds, seed = batch.plan.bounds, self._options.seed % 2**63
        step, version = self._steps, self._version
        return [
            Task(step, shard, len(bounds), stop - start, seed, gradient, version)
            for shard, (start, stop) in enumerate(bounds)
        ]

    def _layout_of(self, outputs: Sequence[Output]) -> Layout:
        if outputs is not self._outputs and tuple(outputs) != self._layout.outputs:
            self._layout = Layout.of(outputs)
        self._outputs = outputs
        return self._layout

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise PoolBrokenError(
                f"this pool is broken: {self._broken} Make a new one."
            ) from self._broken
        if not self._closer.alive:
            raise PoolClosedError("this pool is closed; make a new one")
        if self._owner != os.getpid():
            raise PoolClosedError(
                f"this pool belongs to process {self._owner} and cannot be used in "
                f"its fork {os.getpid()}; make a pool there"
            )


def _close(engine: Engine, events: Events, lock: Any, owner: int) -> None:
    """Ends a step in another thread, if there is one, and then everything."""
    if os.getpid() != owner:  # a fork: not its engine, and nobody to give up the lock
        return
    engine.interrupt()
    is_free = lock.acquire(timeout=5)  # by a thread that no longer runs, at exit
    try:
        engine.close()
    finally:
        events.close()
        if is_free:
            lock.release()


def _check_state(state: dict[str, Any], own: dict[str, Any]) -> None:
    if not isinstance(state, dict) or state.keys() != own.keys():
        raise ArgumentError(
            f"the state is {state!r}; expected what state_dict() of a pool gave, with "
            f"the keys {sorted(own)}"
        )
    for name in ("threads", "reduction"):
        if state[name] != own[name]:
            raise ArgumentError(
                f"the state is of a pool with {name}={state[name]!r} and this one has "
                f"{name}={own[name]!r}, which gives other bits; make it with "
                f"{name}={state[name]!r}"
            )
