"""A recorded run again: the same versions read, the same order of updates.

A record is a text file, one JSON object per line: first what was run, then one line per
update with the jobs it was made of.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from instep._errors import ArgumentError
from instep.modes._rules import Group, Job, Mode, Portion, Rules
from instep.modes.asynchronous import Asynchronous
from instep.modes.corrections import DelayCompensated, StalenessAware
from instep.modes.stale_synchronous import StaleSynchronous
from instep.modes.synchronous import Synchronous

FORMAT = 1
_KINDS = (
    *(Synchronous, Asynchronous, StaleSynchronous),
    *(StalenessAware, DelayCompensated),
)


class Head(NamedTuple):
    """The first line of a record."""

    mode: Mode
    workers: int
    parts: int
    seed: int
    steps: int  # that the pool had taken before


class Replay:
    """Repeats a run that was recorded by `pool.stream(batches, mode, record=path)`.

    With the same batches, start and optimizer it gives the same bits, on any number of
    workers. The pool's `shards` and `seed` do not matter.

    Args:
        path: the record.

    Raises:
        ArgumentError: there is no such file, or it is no record.

    Example:
        >>> import instep
        >>> mode = instep.Replay("run.jsonl")  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.head, self._groups = _read(self.path)

    def __repr__(self) -> str:
        return f"Replay({str(self.path)!r})"

    def rules(self, workers: int) -> ReplayRules:
        """The recorded ones."""
        return ReplayRules(self._groups)

    def parts(self, shards: int) -> int:
        """As many as were recorded."""
        return self.head.parts

    def batches(self, turn: int) -> int:
        """Those of the recorded mode."""
        return self.head.mode.batches(turn)


class ReplayRules(Rules):
    """Begins and applies what the record says, when it says so.

    An update waits until all who read the parameters before it have begun: here there
    may be fewer workers than there were.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = list(groups)
        self._jobs = {job.portion: job for group in groups for job in group.jobs}
        self._last = max(self._jobs, default=None)
        self._versions = sorted(job.version for job in self._jobs.values())
        self._begun = 0  # jobs; they begin in the order of their versions
        self._busy: set[int] = set()  # lanes
        self._arrived: set[Portion] = set()
        self._issued = 0

    def may_start(self, worker: int, portion: Portion, version: int) -> bool:
        job = self._jobs.get(portion)
        return (
            job is not None and job.version == version and job.worker not in self._busy
        )

    def start(self, job: Job) -> None:
        self._busy.add(job.worker)
        self._begun += 1

    def arrive(self, job: Job) -> Sequence[Group]:
        self._busy.discard(job.worker)
        self._arrived.add(job.portion)
        groups = []
        while self._issued < len(self._groups) and not self._is_wanted():
            group = self._groups[self._issued]
            if any(one.portion not in self._arrived for one in group.jobs):
                break
            groups.append(group)
            self._issued += 1
        return groups

    def skips(self, portion: Portion) -> bool:
        is_past = self._last is None or portion > self._last
        return portion not in self._jobs and not is_past

    def lane(self, worker: int, portion: Portion) -> int:
        return self._jobs[portion].worker

    def _is_wanted(self) -> bool:
        """Whether somebody has yet to read the parameters as they are."""
        versions = self._versions[self._begun : self._begun + 1]
        return any(version <= self._issued for version in versions)


def head_line(head: Head) -> str:
    """The first line of a record."""
    return _line(
        {
            "instep": FORMAT,
            "mode": _described(head.mode),
            **{name: getattr(head, name) for name in Head._fields[1:]},
        }
    )


def group_line(group: Group) -> str:
    """The line of an update."""
    jobs = [[*job.portion, job.version, job.worker] for job in group.jobs]
    return _line({"jobs": jobs, "dropped": [list(p) for p in group.dropped]})


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


def _described(value: Any) -> dict[str, Any]:
    """A mode or a correction as its name and arguments."""
    if not isinstance(value, _KINDS):
        raise ArgumentError(
            f"{value!r} cannot be recorded: it gives the same bits every time"
        )
    names = [name for name in value.__dataclass_fields__ if not name.startswith("_")]
    arguments = {name: getattr(value, name) for name in names}
    if arguments.get("correction") is not None:
        arguments["correction"] = _described(arguments["correction"])
    return {"name": type(value).__name__, "arguments": arguments}


def _made(description: dict[str, Any]) -> Any:
    kinds = {kind.__name__: kind for kind in _KINDS}
    arguments = dict(description["arguments"])
    if arguments.get("correction") is not None:
        arguments["correction"] = _made(arguments["correction"])
    return kinds[description["name"]](**arguments)


def _read(path: Path) -> tuple[Head, list[Group]]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ArgumentError(
            f"{path} cannot be read ({error.strerror}); expected a record, as "
            "stream(batches, mode, record=path) writes it"
        ) from error
    try:
        head = json.loads(lines[0])
        if head["instep"] != FORMAT:
            raise ValueError(f"format {head['instep']}, expected {FORMAT}")
        numbers = (head[name] for name in Head._fields[1:])
        return Head(_made(head["mode"]), *numbers), list(_groups(lines[1:]))
    except (ValueError, LookupError, TypeError) as error:
        raise ArgumentError(
            f"{path} is no record of a run ({type(error).__name__}: {error}); expected "
            "what stream(batches, mode, record=path) writes"
        ) from error


def _groups(lines: Sequence[str]) -> Iterator[Group]:
    for line in lines:
        record = json.loads(line)
        jobs = tuple(
            Job(Portion(turn, shard, shards), version, worker)
            for turn, shard, shards, version, worker in record["jobs"]
        )
        yield Group(jobs, tuple(Portion(*dropped) for dropped in record["dropped"]))
