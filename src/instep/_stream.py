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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from instep._aux import ShardAnswer
from instep._closing import Closing
from instep._courier import Courier, Parcel
from instep._errors import OutputsLostError, PoolClosedError
from instep._events import AVERAGE, WAIT, Batches
from instep._host import Host, Prepared
from instep._lanes import Lanes
from instep._outcome import Outcome
from instep._portions import Cut, Portions
from instep._program import Array, Program, Task
from instep._reduction import reduce_scalar
from instep._sharding import Batch, Splitter
from instep._versions import Version, Versions
from instep.engines._base import Done, Kept
from instep.modes import Asynchronous, Mode, Replay
from instep.modes._rules import Group, Job, Portion, Rules
from instep.modes.corrections import Correction
from instep.modes.replay import Head, group_line, head_line


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


@dataclass
class _Errand:
    """A job under way, or answered."""

    job: Job
    cut: Cut
    version: Version
    kept: Kept
    read: int  # the version its steps began with
    done: Done | None = None  # when it is answered
    is_again: bool = False  # it was answered before


class Stream(Closing):
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
        self._pool = pool
        inner = mode.head.mode if isinstance(mode, Replay) else mode
        self._parts = mode.parts(pool.shards)
        self._splitter = Splitter(self._parts)
        self._events = pool._dispatcher.events
        self._portions = Portions(Batches(self._events, batches), mode, self._split)
        self._rules: Rules = mode.rules(pool._workers)
        self._lanes = Lanes(inner)
        self._correction = _correction_of(inner)
        watched = pool._dispatcher.counters, self._events
        self._courier = Courier(pool._engine, pool._options, *watched)
        self._versions = Versions(pool)
        self._errands: dict[Portion, _Errand] = {}  # without those that were dropped
        self._by_key: dict[int, _Errand] = {}  # under way
        self._arrived: deque[_Errand] = deque()
        self._groups: deque[Group] = deque()
        self._number = 0  # of the next errand
        self._has_handed = self._is_closed = False
        self._waited = 0.0
        head = Head(inner, pool._workers, self._parts, pool._options.seed, pool._steps)
        self._head = mode.head if isinstance(mode, Replay) else head
        self._record = None if record is None else Record(record, head)
        if self._lanes.are_used:
            pool._dispatcher.start(self.program(pool._sent))

    def program(self, sent: Program) -> Program:
        """What workers run for this pool's program while the stream is open."""
        return self._lanes.program(sent)

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        with self._pool._lock, self._events.call:
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
        self._count()
        while True:
            self._hand_out()
            if self._groups:
                return self._apply(self._groups.popleft())
            if self._arrived:
                self._arrive(self._arrived.popleft())
            elif self._courier.is_waiting or self._portions.next() is not None:
                self._receive()
            elif groups := self._rules.finish():
                self._groups.extend(groups)
            else:
                return None

    def _count(self) -> None:
        """The script has taken its step, if it had an update."""
        if self._has_handed:
            self._has_handed = False
            self._pool._steps += 1
            self._versions.advance()

    def _hand_out(self) -> None:
        """Gives idle workers portions, as far as the rules allow."""
        engaged = self._engaged()
        for worker in self._courier.idle():
            if worker in engaged:
                continue
            portion = self._wanted()
            if portion is None:
                return
            if self._rules.may_start(worker, portion, self._versions.number):
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
        cut = self._portions.cut(portion)
        lane = self._rules.lane(self._lanes.lane(worker, portion), portion)
        version = self._versions.read(cut.tag)
        read = self._lanes.begin(lane, version.number)
        batch = self._pool._engine.kept_batches.keep(self._lanes.batch(lane, cut))
        kept = Kept(version.ref, batch, self._number)
        self._number += 1
        self._pool._bytes_moved += batch.nbytes
        job = Job(portion, version.number, lane)
        errand = _Errand(job, cut, version, kept, read)
        self._errands[portion] = self._by_key[kept.key] = errand
        self._rules.start(job)
        self._courier.submit(worker, self._parcel(errand))

    def _parcel(self, errand: _Errand) -> Parcel:
        portion, (start, stop) = errand.job.portion, errand.cut.rows[0]
        task = Task(
            step=self._head.steps + errand.cut.first,
            shard=portion.shard,
            shards=portion.shards,
            rows=stop - start,
            pool_seed=self._head.seed % 2**63,
            gradient=True,
            version=self._pool._version,
        )
        what = f"shard {portion.shard} of {portion.shards} of batch {errand.cut.first}"
        return Parcel(task, errand.kept, what)

    def _receive(self) -> None:
        before = self._events.phase(WAIT) if self._events.is_on else None
        begin = time.perf_counter()
        answers = self._courier.wait()
        self._waited += time.perf_counter() - begin
        if before is not None:
            self._events.phase(before)
        for parcel, done in answers:
            errand = self._by_key.pop(parcel.kept.key)
            errand.done = done
            if errand.is_again:
                errand.done = self._lanes.end(errand.job.worker, done)
            else:
                self._arrived.append(errand)

    def _arrive(self, errand: _Errand) -> None:
        """Tells the rules; what they did not wait for is forgotten."""
        assert errand.done is not None
        errand.done = self._lanes.end(errand.job.worker, errand.done)
        if self._errands.get(errand.job.portion) is not errand:  # dropped meanwhile
            self._pool._engine.forget(errand.kept.key)
            self._leave(errand)
        self._groups.extend(self._rules.arrive(errand.job))

    def _leave(self, errand: _Errand) -> None:
        """Gives back the frames that it was computed from."""
        self._pool._engine.kept_batches.release(errand.kept.batch)
        self._versions.leave(errand.version)

    def _apply(self, group: Group) -> Update:
        """Averages a group's gradients and hands them over."""
        if self._events.is_on:
            self._events.phase(AVERAGE)
        errands = [self._errands.pop(job.portion) for job in group.jobs]
        dropped = self._drop(group)
        outputs = self._averaged(errands)
        for errand in errands:
            self._leave(errand)
        outcome = self._outcome(errands, outputs)
        value, grads = self._pool._stream_result(outcome, errands[0].cut.tag)
        self._has_handed = True
        if self._record is not None:
            self._record.write(group)
        update = self._update(value, grads, errands, dropped)
        if self._events.is_on:
            self._tell(update, outcome, errands)
        return update

    def _tell(
        self, update: Update, outcome: Outcome, errands: Sequence[_Errand]
    ) -> None:
        """Those who watch learn of the update."""
        bounds = [bounds for errand in errands for bounds in errand.cut.rows]
        self._events.update(
            self._pool._steps,
            float(outcome.loss),
            sum(stop - start for start, stop in bounds),
            update.staleness,
            update.worker,
            len(update.dropped),
        )

    def _averaged(self, errands: Sequence[_Errand]) -> list[Array | None]:
        """Their outputs, averaged by weight (or added up) and corrected."""
        assert self._versions.layout is not None
        self._pool._bytes_moved += self._versions.layout.nbytes * len(errands)
        if self._lanes.are_elastic:
            means = self._average(errands, [1.0] * len(errands))
            return [_times(mean, len(errands)) for mean in means]
        weights = [answer.weight for answer in _answers(errands)]
        outputs = self._average(errands, weights)
        if self._correction is None:
            return outputs
        (errand,) = errands
        return self._versions.corrected(
            self._correction,
            outputs,
            errand.cut.tag,
            errand.version,
            self._versions.number - errand.read,
            errand.job.worker,
        )

    def _average(
        self, errands: Sequence[_Errand], weights: list[float]
    ) -> list[Array | None]:
        keys = [errand.kept.key for errand in errands]
        while True:
            try:
                return self._pool._engine.average(weights, keys)
            except OutputsLostError as lost:
                self._compute_again([e for e in errands if e.kept.key in lost.keys])

    def _compute_again(self, errands: Sequence[_Errand]) -> None:
        """Their outputs were on a machine that is gone."""
        for errand in errands:
            errand.is_again, errand.done = True, None
            self._by_key[errand.kept.key] = errand
            self._courier.again(self._parcel(errand), "its outputs are lost")
        while any(errand.done is None for errand in errands):
            self._courier.idle()
            self._receive()

    def _outcome(
        self, errands: Sequence[_Errand], outputs: list[Array | None]
    ) -> Outcome:
        answers = _answers(errands)
        weights = [answer.weight for answer in answers]
        rule = self._pool._options.reduction
        loss = reduce_scalar([answer.loss for answer in answers], weights, rule)
        shards = [_shard_answer(errand) for errand in errands]
        return Outcome(loss, float(sum(weights)), outputs, shards)

    def _update(
        self,
        value: Any,
        grads: Any,
        errands: Sequence[_Errand],
        dropped: tuple[int, ...],
    ) -> Update:
        loss, aux = value if self._pool._options.has_aux else (value, None)
        workers = {errand.job.worker for errand in errands}
        waited, self._waited = self._waited, 0.0
        answers = _answers(errands)
        return Update(
            loss=loss,
            grads=grads,
            weight=float(sum(answer.weight for answer in answers)),
            staleness=self._versions.number - min(errand.read for errand in errands),
            worker=workers.pop() if len(workers) == 1 else None,
            dropped=dropped,
            aux=aux,
            compute_seconds=max(answer.seconds for answer in answers),
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

    # Batches, and the end

    def _split(self, batch: Any) -> tuple[Batch, Prepared]:
        with self._pool._split_into(self._parts):
            prepared = self._pool._stream_batch(_arguments(batch))
        batch = self._splitter.split(prepared.arguments, prepared.split)
        return batch, prepared

    def _close(self, *, at_once: bool = False) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._count()
        if self._record is not None:
            self._record.close()
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
        if self._lanes.are_used:
            pool._dispatcher.start(pool._sent)


class Record:
    """A file with the order of events."""

    def __init__(self, path: str | os.PathLike[str], head: Head) -> None:
        line = head_line(head)  # refuses before the file is touched
        self._file = open(path, "w")  # noqa: SIM115 - closed with the stream
        self._file.write(line)

    def write(self, group: Group) -> None:
        """An update was made of this group."""
        self._file.write(group_line(group))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _arguments(batch: Any) -> tuple[Any, ...]:
    """A batch as arguments of the loss: a tuple or list of them, or one."""
    return tuple(batch) if type(batch) in (tuple, list) else (batch,)


def _times(output: Array | None, number: int) -> Array | None:
    return None if output is None else output * output.dtype.type(number)


def _answers(errands: Sequence[_Errand]) -> list[Done]:
    return [errand.done for errand in errands if errand.done is not None]


def _shard_answer(errand: _Errand) -> ShardAnswer:
    assert errand.done is not None
    start, stop = errand.cut.rows[0]
    return ShardAnswer(errand.done.weight, stop - start, errand.done.aux)


def _correction_of(mode: Mode) -> Correction | None:
    correction = mode.correction if isinstance(mode, Asynchronous) else None
    return None if correction is None else correction.fresh()
