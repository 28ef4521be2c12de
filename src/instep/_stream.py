"""A stream of updates: batches go in, one update per optimizer step comes out.

    script's batches ── portions ──> courier ──> workers
                            ^                       │ gradients
    script's optimizer <── update <── rules of the mode

The mode's rules say who may begin and which gradients make an update; everything here
carries that out. Workers read versions of the parameters that are copies on a shelf,
kept until the last of their readers has answered, so that an optimizer which writes in
place never changes what a worker reads.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

import numpy as np

from instep._aux import ShardAnswer
from instep._courier import Courier, Parcel
from instep._dispatch import Dispatcher
from instep._errors import ArgumentError, PoolClosedError
from instep._frame import FrameRef
from instep._layout import Layout
from instep._local import LocalProgram, Walked
from instep._options import Options
from instep._outcome import Outcome
from instep._portions import Cut, Portions, turn_of
from instep._program import Array, Output, Program, Task
from instep._reduction import reduce_scalar
from instep._sharding import Batch, Plan, Splitter
from instep.engines._base import Done, Engine, Kept
from instep.modes import Asynchronous, Local, Mode, Replay
from instep.modes._rules import Group, Job, Portion, Rules
from instep.modes.corrections import Correction, Stale
from instep.modes.replay import Head, group_line, head_line

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Update:
    """What one optimizer step is made of.

    Attributes:
        loss: over the rows that count, as the framework's scalar.
        grads: gradients of the parameters, in the framework's structure; in PyTorch
            they are in `.grad` already.
        weight: what the update counts for: rows, unless the loss returns its own.
        staleness: updates applied since its parameters were read; of the stalest
            gradient, where there are several.
        worker: who computed it; None where several did.
        dropped: rows of the batch that do not count, because they were late.
        aux: the loss's, where the pool has one.
        compute_seconds: the time its slowest part took a worker.
        wait_seconds: the time the master has waited since the last update.
    """

    loss: Any
    grads: Any = field(repr=False)
    weight: float
    staleness: int
    worker: int | None
    dropped: tuple[int, ...]
    aux: Any = None
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0


class Prepared(NamedTuple):
    """A batch, as the adapter hands it to the stream.

    Attributes:
        arguments: trees of arrays, as for a step.
        split: per argument, False: not split by rows; None: all are.
        outputs: what every portion returns besides its loss.
        form: whatever the adapter needs to know of it later.
        key: equal for batches that need the same parameters.
    """

    arguments: tuple[Any, ...]
    split: Sequence[bool] | None
    outputs: Sequence[Output]
    form: Any = None
    key: Any = None


@dataclass
class _Version:
    """One version of the parameters, on the shelf."""

    ref: FrameRef
    readers: int = 1  # the stream itself, while it is the newest


@dataclass
class _Errand:
    """A job under way, or answered."""

    job: Job
    cut: Cut
    prepared: Prepared
    version: _Version
    kept: Kept
    read: int  # the version its steps began with
    done: Done | None = None


class Host(Protocol):
    """What a stream needs of its pool."""

    _lock: Any
    _engine: Engine
    _dispatcher: Dispatcher
    _options: Options
    _params: Splitter
    _sent: Program
    _bytes_moved: int
    _steps: int
    _version: int

    @property
    def shards(self) -> int: ...

    @property
    def _workers(self) -> int: ...

    def _check_usable(self) -> None: ...

    def _layout_of(self, outputs: Sequence[Output]) -> Layout: ...

    def _end_stream(self, stream: Stream) -> None: ...

    def _split_into(self, parts: int) -> AbstractContextManager[None]: ...

    def _stream_publish(self, params: Any) -> None: ...

    def _stream_batch(self, batch: tuple[Any, ...]) -> Prepared: ...

    def _stream_params(self, prepared: Prepared) -> Any: ...

    def _stream_arrays(
        self, leaves: list[Array], prepared: Prepared
    ) -> list[Array]: ...

    def _stream_result(
        self, outcome: Outcome, prepared: Prepared
    ) -> tuple[Any, Any]: ...


class Stream:
    """An iterator of updates; made by `pool.stream`.

    Between two updates the script takes its optimizer's step. `publish` gives new
    parameters where they are not updated in place.
    """

    def __init__(
        self,
        pool: Host,
        batches: Iterable[Any],
        mode: Mode,
        record: str | os.PathLike[str] | None,
    ) -> None:
        self._pool, self._mode = pool, mode
        self._inner = mode.head.mode if isinstance(mode, Replay) else mode
        self._parts = mode.parts(pool.shards)
        self._splitter = Splitter(self._parts)
        self._portions = Portions(batches, mode, self._split)
        self._rules: Rules = mode.rules(pool._workers)
        self._walk = _walk_of(self._inner)
        self._correction = _correction_of(self._inner)
        self._courier = Courier(pool._engine, pool._options, pool._dispatcher.counters)
        self._errands: dict[Portion, _Errand] = {}
        self._by_key: dict[int, _Errand] = {}
        self._arrived: deque[_Errand] = deque()
        self._groups: deque[Group] = deque()
        self._memories: dict[int, Array] = {}  # by lane
        self._fetches: dict[int, tuple[int, int]] = {}  # lane: turns, version read
        self._turn_plans: dict[Any, Plan] = {}
        self._base = pool._steps
        self._version, self._number = 0, 0
        self._newest: dict[Any, _Version] = {}
        self._layout: Layout | None = None
        self._has_handed = self._is_closed = False
        self._waited = 0.0
        self._file: TextIO | None = None
        if record is not None:
            self._file = self._recorded(record)
        if self._walk is not None:
            pool._dispatcher.start(self.program(pool._sent))

    def program(self, sent: Program) -> Program:
        """What workers run for this pool's program while the stream is open."""
        return sent if self._walk is None else self._walk(sent)

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        with self._pool._lock:
            if self._is_closed:
                raise StopIteration
            try:
                update = self._next()
            except BaseException as error:
                self._close(at_once=not isinstance(error, Exception))
                raise
            if update is None:
                self._close()
                raise StopIteration
            return update

    def publish(self, params: Any) -> None:
        """Gives the parameters after the optimizer's step, or before the first one.

        Needed where they are not updated in place.
        """
        with self._pool._lock:
            self._pool._stream_publish(params)

    def close(self) -> None:
        """Forgets what is under way; the pool is free for other calls."""
        with self._pool._lock:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end
            self.close()

    def settle(self) -> None:
        """Waits for what is under way and keeps the answers: the workers are free."""
        while self._courier.is_waiting:
            self._courier.idle()
            self._receive()

    # One update

    def _next(self) -> Update | None:
        self._pool._check_usable()
        if self._has_handed:
            self._advance()
        while True:
            self._hand_out()
            if self._groups:
                return self._apply(self._groups.popleft())
            if not self._arrived:
                if not self._courier.is_waiting and self._portions.next() is None:
                    self._groups.extend(self._rules.finish())
                    if not self._groups:
                        return None
                    continue
                self._receive()
            if self._arrived:
                self._arrive(self._arrived.popleft())

    def _advance(self) -> None:
        """The script has taken its step: there is another version."""
        self._has_handed = False
        self._version += 1
        self._pool._steps += 1
        for version in self._newest.values():
            self._leave(version)
        self._newest.clear()

    def _hand_out(self) -> None:
        """Gives idle workers portions, as far as the rules allow."""
        engaged = self._engaged()
        for worker in self._courier.idle():
            if worker in engaged:
                continue
            portion = self._wanted()
            if portion is None:
                return
            if self._rules.may_start(worker, portion, self._version):
                self._send(worker, portion)

    def _engaged(self) -> set[int]:
        """Workers whose gradient is there, and not yet applied: they read it next."""
        pending = [self._errands[job.portion] for g in self._groups for job in g.jobs]
        done = [errand.done for errand in (*self._arrived, *pending)]
        return {answer.worker for answer in done if answer is not None}

    def _wanted(self) -> Portion | None:
        """The next portion that has to be computed."""
        while (portion := self._portions.next()) is not None:
            if not self._rules.skips(portion):
                return portion
            self._portions.skip()
        return None

    def _send(self, worker: int, portion: Portion) -> None:
        engine, cut = self._pool._engine, self._portions.cut(portion)
        lane = portion.shard if isinstance(self._inner, Local) else worker
        lane = self._rules.lane(lane, portion)
        job = Job(portion, self._version, lane)
        prepared: Prepared = cut.tag
        version, read = self._read(prepared), self._began(lane)
        batch = cut.batches[0]
        if self._walk is not None:
            batch = turn_of(cut, self._memory(lane), self._turn_plans)
        kept = Kept(version.ref, engine.kept_batches.keep(batch), self._number)
        self._number += 1
        self._pool._bytes_moved += kept.batch.nbytes
        errand = _Errand(job, cut, prepared, version, kept, read)
        self._errands[portion] = self._by_key[kept.key] = errand
        self._rules.start(job)
        self._courier.submit(worker, self._parcel(errand))

    def _parcel(self, errand: _Errand) -> Parcel:
        portion, (start, stop) = errand.job.portion, errand.cut.rows[0]
        pool = self._pool
        task = Task(
            step=self._base + errand.cut.first,
            shard=portion.shard,
            shards=portion.shards,
            rows=stop - start,
            pool_seed=pool._options.seed % 2**63,
            gradient=True,
            version=pool._version,
        )
        what = f"shard {portion.shard} of {portion.shards} of batch {errand.cut.first}"
        return Parcel(task, errand.kept, what)

    def _receive(self) -> None:
        begin = time.perf_counter()
        answers = self._courier.wait()
        self._waited += time.perf_counter() - begin
        for parcel, done in answers:
            errand = self._by_key.pop(parcel.kept.key)
            errand.done = done
            self._arrived.append(errand)

    def _arrive(self, errand: _Errand) -> None:
        """Tells the rules; what they did not wait for is forgotten."""
        self._pool._engine.kept_batches.release(errand.kept.batch)
        self._remember(errand)
        if self._errands.get(errand.job.portion) is not errand:  # dropped meanwhile
            self._pool._engine.forget(errand.kept.key)
            self._leave(errand.version)
            self._rules.arrive(errand.job)
            return
        self._groups.extend(self._rules.arrive(errand.job))

    def _apply(self, group: Group) -> Update:
        """Averages a group's gradients and hands them over."""
        errands = [self._errands.pop(job.portion) for job in group.jobs]
        dropped = self._drop(group)
        answers = [errand.done for errand in errands if errand.done is not None]
        weights = [answer.weight for answer in answers]
        pool, keys = self._pool, [errand.kept.key for errand in errands]
        is_elastic = self._is_elastic
        even = [1.0] * len(weights) if is_elastic else weights
        outputs = pool._engine.average(even, keys)
        if is_elastic:
            outputs = [_times(output, len(even)) for output in outputs]
        outputs = self._corrected(outputs, errands)
        for errand in errands:
            self._leave(errand.version)
        rule = pool._options.reduction
        loss = reduce_scalar([answer.loss for answer in answers], weights, rule)
        shards = [_shard_answer(errand) for errand in errands]
        outcome = Outcome(loss, float(sum(weights)), outputs, shards)
        value, grads = pool._stream_result(outcome, errands[0].prepared)
        self._has_handed = True
        assert self._layout is not None
        pool._bytes_moved += self._layout.nbytes * len(errands)
        if self._file is not None:
            self._file.write(group_line(group))
            self._file.flush()
        return self._update(value, grads, errands, group, dropped)

    def _update(
        self,
        value: Any,
        grads: Any,
        errands: Sequence[_Errand],
        group: Group,
        dropped: tuple[int, ...],
    ) -> Update:
        loss, aux = value if self._pool._options.has_aux else (value, None)
        workers = {job.worker for job in group.jobs}
        waited, self._waited = self._waited, 0.0
        done = [errand.done for errand in errands if errand.done is not None]
        return Update(
            loss=loss,
            grads=grads,
            weight=float(sum(answer.weight for answer in done)),
            staleness=self._version - min(errand.read for errand in errands),
            worker=workers.pop() if len(workers) == 1 else None,
            dropped=dropped,
            aux=aux,
            compute_seconds=max(answer.seconds for answer in done),
            wait_seconds=waited,
        )

    def _drop(self, group: Group) -> tuple[int, ...]:
        """Rows of the group's dropped portions, which are not waited for any more."""
        rows: list[int] = []
        for portion in group.dropped:
            rows.extend(range(*self._portions.rows(portion)))
            self._errands.pop(portion, None)  # forgotten when it arrives
        if group.dropped:
            self._portions.skip_turn(group.dropped[0].turn)
        return tuple(rows)

    # Versions of the parameters

    def _read(self, prepared: Prepared) -> _Version:
        """The newest parameters, on the shelf, for one more reader."""
        version = self._newest.get(prepared.key)
        if version is None:
            pool = self._pool
            params = pool._params.whole(pool._stream_params(prepared))
            self._lay_out(prepared)
            pool._version += 1
            ref = pool._engine.kept_params.keep(params, self._layout)
            pool._bytes_moved += ref.nbytes
            version = self._newest[prepared.key] = _Version(ref)
        version.readers += 1
        return version

    def _lay_out(self, prepared: Prepared) -> None:
        layout = self._pool._layout_of(prepared.outputs)
        if self._layout is not None and layout is not self._layout:
            raise ArgumentError(
                "the parameters that have gradients, or their form, have changed; end "
                "this stream and begin another"
            )
        self._layout = layout
        self._pool._engine.lay_out(layout)

    def _leave(self, version: _Version) -> None:
        version.readers -= 1
        if not version.readers:
            self._pool._engine.kept_params.release(version.ref)

    def _corrected(
        self, outputs: list[Array | None], errands: Sequence[_Errand]
    ) -> list[Array | None]:
        """The gradients after the mode's correction."""
        if self._correction is None:
            return outputs
        (errand,) = errands
        pool, shelf = self._pool, self._pool._engine.kept_params
        tree = pool._params.whole(pool._stream_params(errand.prepared))
        now = pool._stream_arrays(list(map(np.asarray, tree.leaves)), errand.prepared)
        read = pool._stream_arrays(shelf.arrays(errand.version.ref), errand.prepared)
        # Outputs beyond the parameters are state, which is not corrected.
        there = [k for k in range(len(now)) if outputs[k] is not None]
        gradients = [output for output in outputs[: len(now)] if output is not None]
        stale = Stale(
            gradients,
            [now[k] for k in there],
            [read[k] for k in there],
            self._version - errand.read,
            errand.job.worker,
        )
        corrected = self._correction.correct(stale)
        for k, gradient in zip(there, corrected, strict=True):
            outputs[k] = gradient
        return outputs

    # Steps of the workers' own

    @property
    def _is_elastic(self) -> bool:
        return isinstance(self._inner, Local) and self._inner.elastic is not None

    def _began(self, lane: int) -> int:
        """The version that this lane's steps begin with: now, or when it fetched."""
        mode = self._inner
        if not isinstance(mode, Asynchronous) or mode.fetch in (None, mode.push):
            return self._version
        turns, read = self._fetches.get(lane, (0, self._version))
        if turns % (mode.fetch // mode.push) == 0:
            read = self._version
            self._memories.pop(lane, None)
        self._fetches[lane] = turns + 1, read
        return read

    def _memory(self, lane: int) -> Array:
        return self._memories.get(lane, _NOTHING)

    def _remember(self, errand: _Errand) -> None:
        done = errand.done
        if done is not None and isinstance(done.aux, Walked):
            memory = np.frombuffer(done.aux.memory, np.uint8)
            self._memories[errand.job.worker] = memory
            errand.done = done._replace(aux=done.aux.aux)

    # Batches, and the end

    def _split(self, batch: Any) -> tuple[Batch, Prepared]:
        with self._pool._split_into(self._parts):
            prepared = self._pool._stream_batch(_arguments(batch))
        batch = self._splitter.split(prepared.arguments, prepared.split)
        return batch, prepared

    def _recorded(self, path: str | os.PathLike[str]) -> TextIO:
        pool = self._pool
        mode, seed = self._inner, pool._options.seed
        head = Head(mode, pool._workers, self._parts, seed)
        line = head_line(head)  # refuses before the file is touched
        file = open(path, "w")  # noqa: SIM115 - closed with the stream
        file.write(line)
        return file

    def _close(self, *, at_once: bool = False) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._has_handed:
            self._has_handed = False
            self._pool._steps += 1
        if self._file is not None:
            self._file.close()
        self._pool._end_stream(self)
        with contextlib.suppress(PoolClosedError):
            self._pool._check_usable()
            self._give_up(at_once)

    def _give_up(self, at_once: bool) -> None:
        """Gives back what it has on the shelves."""
        pool, engine = self._pool, self._pool._engine
        pool._dispatcher.abandon(at_once=at_once)
        known = {errand.kept.key: errand for errand in self._errands.values()}
        known |= {errand.kept.key: errand for errand in self._arrived}
        for key, errand in known.items():
            if errand.done is not None:
                engine.forget(key)
        engine.kept_params.clear()
        engine.kept_batches.clear()
        if self._walk is not None:
            pool._dispatcher.start(pool._sent)


_NOTHING = np.empty(0, np.uint8)


def _arguments(batch: Any) -> tuple[Any, ...]:
    """A batch as arguments of the loss: a tuple or list of them, or one."""
    return tuple(batch) if type(batch) in (tuple, list) else (batch,)


def _times(output: Array | None, number: int) -> Array | None:
    return None if output is None else output * output.dtype.type(number)


def _shard_answer(errand: _Errand) -> ShardAnswer:
    assert errand.done is not None
    start, stop = errand.cut.rows[0]
    return ShardAnswer(errand.done.weight, stop - start, errand.done.aux)


def _walk_of(mode: Mode) -> Callable[[Any], LocalProgram] | None:
    """Makes the program of workers that take steps of their own; None otherwise."""
    if isinstance(mode, Local):
        return partial(_local, mode=mode)
    if isinstance(mode, Asynchronous) and (mode.push > 1 or (mode.fetch or 1) > 1):
        return partial(_gathering, mode=mode)
    return None


def _local(program: Any, mode: Local) -> LocalProgram:
    if mode.elastic is None:
        return LocalProgram(program, mode.optimizer, "local")
    pull = mode.elastic
    return LocalProgram(program, mode.optimizer, "elastic", pull, keeps=True)


def _gathering(program: Any, mode: Asynchronous) -> LocalProgram:
    keeps = mode.fetch not in (None, mode.push)
    return LocalProgram(program, mode.rate, "gather", keeps=keeps)


def _correction_of(mode: Mode) -> Correction | None:
    correction = mode.correction if isinstance(mode, Asynchronous) else None
    return None if correction is None else correction.fresh()
