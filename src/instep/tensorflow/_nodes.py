"""Nodes of a GraphDef: made, asked about, followed into functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

NodeDef = Any
GraphDef = Any
FunctionDef = Any


def node(op: str, name: str, inputs: list[str], **attributes: Any) -> NodeDef:
    """A NodeDef; attributes as Python values, dtypes and shapes."""
    made = tf.compat.v1.NodeDef(op=op, name=name, input=inputs)
    for key, value in attributes.items():
        made.attr[key].CopyFrom(_attribute(value))
    return made


def constant(name: str, value: Any) -> NodeDef:
    """A Const node that holds the array `value`."""
    tensor = tf.make_tensor_proto(value)
    made = node("Const", name, [], dtype=tf.dtypes.as_dtype(tensor.dtype))
    made.attr["value"].tensor.CopyFrom(tensor)
    return made


def placeholder(name: str, dtype: tf.DType, shape: tf.TensorShape) -> NodeDef:
    """A Placeholder node."""
    return node("Placeholder", name, [], dtype=dtype, shape=shape)


def is_stateful(op: str) -> bool:
    """Whether TensorFlow marks the op as one with state or side effects."""
    definition = op_def_registry.get(op)
    return bool(definition and definition.is_stateful)


def input_types(op: str) -> list[Any]:
    """The op's declared inputs (OpDef.ArgDef); empty for a function."""
    definition = op_def_registry.get(op)
    return list(definition.input_arg) if definition else []


def called_functions(caller: NodeDef, known: Collection[str]) -> Iterator[str]:
    """Names of the functions a node calls, directly or by an attribute."""
    if caller.op in known:
        yield caller.op
    for key in sorted(caller.attr):
        value = caller.attr[key]
        for function in [value.func, *value.list.func]:
            if function.name in known:
                yield function.name


def source(name: str) -> str:
    """The node that an input comes from: `^a`, `a:1` and `a:out:0` give `a`."""
    return name.lstrip("^").split(":")[0]


def _attribute(value: Any) -> Any:
    made = tf.compat.v1.AttrValue()
    if isinstance(value, tf.DType):
        made.type = value.as_datatype_enum
    elif isinstance(value, tf.TensorShape):
        made.shape.CopyFrom(value.as_proto())
    elif isinstance(value, bytes):
        made.s = value
    elif isinstance(value, str):
        made.s = value.encode()
    elif isinstance(value, bool):
        made.b = value
    else:
        made.i = value
    return made
