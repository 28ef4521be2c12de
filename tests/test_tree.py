"""Trees of dicts, tuples, lists, namedtuples and dataclasses come back as they were."""

from __future__ import annotations

import collections
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep._tree import flatten, leaf_names, unflatten
from losses import Pair, Position


@dataclasses.dataclass
class Settings:
    rate: object
    names: object
    derived: object = dataclasses.field(default=0, init=False)


leaves = st.integers() | st.text() | st.floats(allow_nan=False)
trees = st.recursive(
    leaves | st.none(),
    lambda below: (
        st.lists(below)
        | st.lists(below).map(tuple)
        | st.dictionaries(st.text() | st.integers(), below)
        | st.builds(Pair, below, below)
        | st.builds(Settings, below, below)
    ),
)


@given(trees)
def test_a_tree_is_rebuilt_from_its_leaves(tree):
    found, structure = flatten(tree)
    rebuilt = unflatten(structure, found)
    assert rebuilt == tree
    assert type(rebuilt) is type(tree)
    assert len(leaf_names(structure, "tree")) == len(found)


@given(trees)
def test_equal_trees_have_equal_structures(tree):
    assert flatten(tree)[1] == flatten(unflatten(flatten(tree)[1], flatten(tree)[0]))[1]


def test_leaves_are_taken_from_left_to_right():
    tree = {"w": 1, "b": (2, None), "more": [Position(3, 4), Settings(5, 6)]}
    assert flatten(tree)[0] == [1, 2, 3, 4, 5, 6]


def test_names_are_written_as_in_python():
    tree = {"w": 1, 2: (1, [1]), "at": Position(1, Settings(1, {}))}
    assert leaf_names(flatten(tree)[1], "tree") == [
        "tree['w']",
        "tree[2][0]",
        "tree[2][1][0]",
        "tree['at'].x",
        "tree['at'].y.rate",
    ]


def test_none_is_a_place_without_a_leaf():
    found, structure = flatten({"w": None, "b": (None,)})
    assert found == []
    assert unflatten(structure, []) == {"w": None, "b": (None,)}


@pytest.mark.parametrize(
    "tree",
    [
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, b=1, a=2),
        (),
        [],
        {},
    ],
)
def test_containers_of_other_kinds_keep_their_content(tree):
    found, structure = flatten(tree)
    assert unflatten(structure, found) == tree


def test_a_leaf_may_be_a_container():
    found, _ = flatten([(1, 2), [3]], is_leaf=lambda node: isinstance(node, tuple))
    assert found == [(1, 2), 3]
