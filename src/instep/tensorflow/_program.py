"""Computes shards of a TensorFlow graph in a worker, in a session of its own.

    params ─assign─► variables ─┐
    batch  ─feed───► inputs ────┼─► loss, weight, gradients, aux, state
    seed   ─assign─► generators ┘

The graph arrives as bytes: no user code is needed here, and none is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from instep._aux import ShardAnswer
from instep._cores import usable_cores
from instep._program import Array, ShardResult, Task
from instep._tree import flatten
from instep._values import Marker, marked
from instep.tensorflow._private import Method, Private
from instep.tensorflow._random import states, variable_name
from instep.tensorflow._state import fold

Gradient = str | tuple[str, str] | None
"""A dense tensor, (values, indices) of IndexedSlices, or none."""

TraceKey = tuple[int, int | None]
"""A trace's number, and the rows it is for; None: any number of rows."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the graph, given its value from `params`.

    Attributes:
        node: the VarHandleOp or VariableV2 of the graph.
        is_written: the graph writes it, so every shard starts from its own copy.
        is_generator: the state of a random generator, different in every shard.
    """

    node: str
    dtype: tf.DType
    shape: tuple[int | None, ...] | None
    is_reference: bool = False
    is_written: bool = False
    is_generator: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """A graph and where to find things in it; names of tensors are `node:0`.

    Attributes:
        graph: a serialized GraphDef.
        inputs: one tensor per leaf of the batch; None for a leaf without one.
        variables: in the order of `params`.
        loss: a scalar tensor.
        weight: a scalar tensor; None: a shard counts for its rows.
        gradients: dense ones, sparse ones and None, in the caller's order.
        dense: indices of the variables that have a dense gradient.
        state: indices of the variables whose new value comes back, averaged.
        counters: indices of those whose new value is shard 0's.
        effects: ops that have to run too: assertions, writes to variables.
        aux: one tensor per value, and how it is combined.
        random_keys: one key per random op.
    """

    graph: bytes
    inputs: tuple[str | None, ...]
    variables: tuple[Variable, ...]
    loss: str
    weight: str | None = None
    gradients: tuple[Gradient, ...] = ()
    dense: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    counters: tuple[int, ...] = ()
    effects: tuple[str, ...] = ()
    aux: tuple[tuple[str, Marker], ...] = ()
    random_keys: tuple[int, ...] = ()


class Extras(NamedTuple):
    """What a shard sends beside its loss and dense gradients; None if all are empty.

    Attributes:
        aux: the user's values.
        slices: (values, indices) per sparse gradient.
        counters: new values of integer variables; from shard 0 only.
    """

    aux: tuple[Any, ...] = ()
    slices: tuple[tuple[Array, Array], ...] = ()
    counters: tuple[Array, ...] = ()

    @classmethod
    def of(cls, shard: ShardAnswer) -> Extras:
        """The extras of a shard's answer."""
        return shard.aux or cls()


@dataclass
class TensorFlowProgram:
    """All graphs of a pool. The batch's last argument says which one to compute."""

    traces: dict[TraceKey, Trace]
    _threads: int = field(default=1, repr=False)
    _runners: dict[TraceKey, _Runner] = field(default_factory=dict, repr=False)

    @property
    def modules(self) -> tuple[str, ...]:
        return ("tensorflow",)

    def start(self, threads: int) -> None:
        self._threads = threads
        self._runners = {}

    def preserved(self) -> AbstractContextManager[None]:
        return nullcontext()  # a session of its own touches nothing global

    def compute(self, params: Any, batch: tuple[Any, ...], task: Task) -> ShardResult:
        *arguments, number = batch
        key = self._key(number, task.rows)
        if key not in self._runners:
            self._runners[key] = _Runner(self.traces[key], self._threads)
        return self._runners[key].compute(params, flatten(arguments)[0], task)

    def private(self, params: Any, arguments: tuple[Any, ...]) -> Private:
        """A copy of the variables, for steps of the worker's own."""
        keys = [key for key in self.traces if key[0] == int(arguments[-1])]
        return Private(params, self.traces[keys[0]])

    def optimizer(self, optimizer: Any, private: Private) -> Method:
        """The optimizer of Keras's that `optimizer()` gives, for the copy."""
        return Method(optimizer, private)

    def _key(self, number: Any, rows: int) -> TraceKey:
        key: TraceKey = (int(number), rows)
        return key if key in self.traces else (int(number), None)

    def __getstate__(self) -> dict[str, Any]:
        return {"traces": self.traces, "_threads": 1, "_runners": {}}


class _Runner:
    """One graph in one session."""

    def __init__(self, trace: Trace, threads: int) -> None:
        self._trace = trace
        graph = tf.Graph()
        with graph.as_default():
            definition = tf.compat.v1.GraphDef.FromString(trace.graph)
            tf.import_graph_def(definition, name="")
            self._feeds = [_assignment(v) for v in trace.variables]
            self._generators = _generators(len(trace.random_keys))
            news = [_new_value(trace, k) for k in trace.state + trace.counters]
        self._session = tf.compat.v1.Session(graph=graph, config=_config(threads))
        self._assign_all = self._assignments(lambda variable: True)
        self._assign_written = self._assignments(lambda variable: variable.is_written)
        self._seed = self._callable(*self._generators, [])
        loss = self._loss_fetches()
        self._run = {
            False: self._callable(self._inputs(), trace.effects, loss),
            True: self._callable(
                self._inputs(),
                trace.effects,
                [*loss, *_gradient_fetches(trace), *news],
            ),
        }
        self._version: int | None = None

    def compute(
        self, params: Sequence[Array], leaves: Sequence[Any], task: Task
    ) -> ShardResult:
        self._set_variables(params, task)
        if self._trace.random_keys:
            self._seed(states(self._trace.random_keys, task.seed))
        pairs = zip(leaves, self._trace.inputs, strict=True)
        feeds = [np.asarray(leaf) for leaf, name in pairs if name is not None]
        return _result(self._trace, self._run[task.gradient](*feeds), task)

    def _set_variables(self, params: Sequence[Array], task: Task) -> None:
        """Gives every variable its value; written ones anew before every shard."""
        whole = task.version != self._version
        assign, is_wanted = self._assign_all if whole else self._assign_written
        pairs = zip(self._trace.variables, params, strict=True)
        assign(*(_value(v, array, task) for v, array in pairs if is_wanted(v)))
        self._version = task.version

    def _assignments(
        self, is_wanted: Callable[[Variable], bool]
    ) -> tuple[Callable[..., Any], Callable[[Variable], bool]]:
        pairs = zip(self._trace.variables, self._feeds, strict=True)
        wanted = [names for variable, names in pairs if is_wanted(variable)]
        feeds, targets = [n for n, _ in wanted], [n for _, n in wanted]
        return self._callable(feeds, targets, []), is_wanted

    def _inputs(self) -> list[str]:
        return [name for name in self._trace.inputs if name is not None]

    def _loss_fetches(self) -> list[str]:
        weight = [self._trace.weight] if self._trace.weight else []
        return [self._trace.loss, *weight, *(name for name, _ in self._trace.aux)]

    def _callable(
        self, feeds: Sequence[str], targets: Sequence[str], fetches: Sequence[str]
    ) -> Callable[..., Any]:
        """A compiled call."""
        if not (targets or fetches):
            return lambda *values: None
        # Session.make_callable with a feed list goes through the slow Session.run.
        options = config_pb2.CallableOptions(feed=feeds, fetch=fetches)
        # In the calling thread: a pool's thread would cost two wake-ups a call.
        options.run_options.inter_op_thread_pool = -1
        options.target.extend(targets)
        return self._session._make_callable_from_options(options)  # type: ignore[no-any-return]


def threads_of_this_process() -> list[int]:
    """How many threads an op of this process uses: fixed before the first one."""
    given = tf.config.threading.get_intra_op_parallelism_threads()
    return [given or usable_cores()]


def _config(threads: int) -> Any:
    """One thread runs ops in a fixed order; `threads` work inside an op."""
    return tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads,
        inter_op_parallelism_threads=1,
        use_per_session_threads=True,
        device_count={"GPU": 0},
    )


def _assignment(variable: Variable) -> tuple[str, str]:
    """Names of a placeholder and of the op that writes it to the variable."""
    graph = tf.compat.v1.get_default_graph()
    handle = graph.get_tensor_by_name(f"{variable.node}:0")
    new = tf.compat.v1.placeholder(variable.dtype, variable.shape)
    if variable.is_reference:
        op = tf.raw_ops.Assign(ref=handle, value=new, validate_shape=False).op
    else:
        op = tf.raw_ops.AssignVariableOp(resource=handle, value=new)
    return new.name, op.name


def _generators(count: int) -> tuple[list[str], list[str]]:
    """Names of a placeholder (count, 3) and of the ops that set all generators."""
    if not count:
        return [], []
    new = tf.compat.v1.placeholder(tf.int64, (count, 3))
    ops = []
    for index, row in enumerate(tf.unstack(new)):
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.int64, shape=[3], shared_name=variable_name(index)
        )
        ops.append(tf.raw_ops.AssignVariableOp(resource=handle, value=row))
    return [new.name], [op.name for op in ops]


def _new_value(trace: Trace, index: int) -> str:
    """Name of a tensor that reads a variable after the graph has written it."""
    graph = tf.compat.v1.get_default_graph()
    variable = trace.variables[index]
    effects = [graph.get_operation_by_name(name) for name in trace.effects]
    with tf.control_dependencies(effects):
        handle = graph.get_tensor_by_name(f"{variable.node}:0")
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
    return str(read.name)


def _gradient_fetches(trace: Trace) -> list[str]:
    dense = [g for g in trace.gradients if isinstance(g, str)]
    sparse = [g for g in trace.gradients if isinstance(g, tuple)]
    return [*dense, *(name for pair in sparse for name in pair)]


def _value(variable: Variable, array: Array, task: Task) -> Array:
    """What a variable is set to before a shard.

    TensorFlow may keep the array itself, not a copy: a variable that the graph
    writes must not lie in the shared memory of all workers.
    """
    if variable.is_generator:
        return fold(array, task.shard)
    return np.array(array) if variable.is_written else np.asarray(array)


def _result(trace: Trace, fetched: list[Any], task: Task) -> ShardResult:
    """Takes the fetched arrays apart, in the order in which they were asked for."""
    values = iter(fetched)
    loss = next(values)
    weight = float(next(values)) if trace.weight else None
    aux = tuple(marked(marker, next(values)) for _, marker in trace.aux)
    if not task.gradient:
        return ShardResult(loss, weight, [], _extras(aux, (), ()))
    dense = [next(values) for g in trace.gradients if isinstance(g, str)]
    sparse = [g for g in trace.gradients if isinstance(g, tuple)]
    slices = tuple((next(values), next(values)) for _ in sparse)
    state = [next(values) for _ in trace.state]
    counters = tuple(values) if task.shard == 0 else ()
    return ShardResult(loss, weight, [*dense, *state], _extras(aux, slices, counters))


def _extras(*parts: Any) -> Extras | None:
    return Extras(*parts) if any(parts) else None
