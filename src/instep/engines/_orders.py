"""What the master tells a machine's station, and what it hears from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from instep._frame import FrameRef
from instep._layout import Layout
from instep._partials import Node
from instep._program import Task
from instep.engines._base import Event, Kept


class Start(NamedTuple):
    """Start these workers with the program that comes beside, pickled.

    Attributes:
        number: of the order; what is said of these workers is in answer to it.
        program: counts the programs.
        host: the name of the master's machine.
        environment: variables that the master's own workers would have.
        sys_path: where modules are looked for besides.
        cores: which a worker should run on; without, the station decides.
    """

    number: int
    program: int
    workers: Sequence[int]
    modules: Sequence[str]
    threads: int
    host: str
    environment: dict[str, str]
    sys_path: Sequence[str]
    cores: dict[int, set[int]]


class Staff(NamedTuple):
    """Start those of these workers that are missing, and end all others."""

    number: int
    workers: Sequence[int]


class LayOut(NamedTuple):
    """Outputs lie so from now on."""

    layout: Layout


class Params(NamedTuple):
    """Parameters, or bytes `start` to `stop` of their frame.

    Attributes:
        ref: their frame.
        version: counts the frames that were sent.
        program: that they are for.
        start: the first of the bytes that come beside.
        pass_on: stations that they are to be passed on to.
    """

    ref: FrameRef
    version: int
    program: int
    start: int = 0
    pass_on: Sequence[int] = ()


class Compute(NamedTuple):
    """Have a worker compute a shard, with the rows that come beside."""

    number: int
    worker: int
    task: Task
    kept: Kept
    version: int  # of the parameters


class Replace(NamedTuple):
    """End a worker's process and start another."""

    number: int
    worker: int


class Forget(NamedTuple):
    """Outputs with these keys are not wanted."""

    keys: Sequence[int]


class Share(NamedTuple):
    """A machine's part in an average.

    Attributes:
        nodes: of the tree, combined there.
        keys: of the outputs of all shards under them.
        weights: of these shards.
    """

    nodes: Sequence[Node]
    keys: Sequence[int]
    weights: Sequence[float]


class Average(NamedTuple):
    """Combine your share of the tree, and tell it to those who combine the rest.

    Attributes:
        number: of the average.
        shares: of all stations that have one.
        weights: of all shards.
        cuts: where the parts begin that the owners combine of all nodes, and the end.
        owners: stations; each combines one part and tells the master.
    """

    number: int
    shares: dict[int, Share]
    weights: Sequence[float]
    cuts: Sequence[int]
    owners: Sequence[int]


class Part(NamedTuple):
    """A part of a node, or of the result, comes beside.

    Attributes:
        number: of the average.
        node: None: the result.
        start: its first byte.
    """

    number: int
    node: Node | None
    start: int


class Close(NamedTuple):
    """End all workers."""


class Word(NamedTuple):
    """What happened to a worker.

    Attributes:
        number: of the last order that concerned it.
        pid: of its process, where it has just started on the master's machine.
    """

    number: int
    event: Event
    pid: int = 0


class Trouble(NamedTuple):
    """The station itself has failed: a packed error."""

    error: bytes


class PackedError(Exception):
    """An exception on its way; only the master opens it."""

    def __init__(self, packed: bytes) -> None:
        super().__init__(packed)
        self.packed = packed
