"""A slot is used again only when nobody writes to it and nobody holds its arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from instep._memory import Block
from instep._slots import Slots

SIZES = [64, 128, 4096]


@pytest.fixture
def slots():
    block = Block.create()
    slots = Slots(block)
    slots.resize(64)
    yield slots
    block.close()


def test_slots_in_use_are_apart(slots):
    assert {slots.take() for _ in range(3)} == {0, 64, 128}


def test_a_slot_is_free_when_its_last_holder_gives_it_back(slots):
    offset = slots.take()
    slots.hold(offset)
    slots.give(offset)
    assert slots.take() != offset
    slots.give(offset)
    assert slots.take() == offset


def test_a_lent_slot_is_free_when_the_last_view_of_it_is_gone(slots):
    offset = slots.take()
    view = slots.lend(offset)[8:16].view(np.float64)
    view[0] = 1.0
    assert slots.take() != offset
    del view
    assert slots.take() == offset


def test_a_lent_slot_that_is_still_written_to_is_in_use(slots):
    offset = slots.take()
    slots.hold(offset)
    slots.lend(offset)  # and dropped at once
    assert slots.take() != offset
    slots.give(offset)
    assert slots.take() == offset


def test_slots_of_another_size_lie_above_all_that_are_in_use(slots):
    held = [slots.take() for _ in range(3)]
    slots.give(held[0])
    slots.resize(32)
    slots.resize(16)
    assert slots.take() >= 3 * 64


def test_the_memory_is_used_from_its_beginning_when_nobody_holds_any(slots):
    for size in (64, 32, 16):
        slots.resize(size)
        offset = slots.take()
        assert offset == 0
        slots.give(offset)


class AnyUse(RuleBasedStateMachine):
    """Slots taken, lent, given back and resized in any order never overlap."""

    @initialize()
    def begin(self):
        self.block = Block.create()
        self.slots = Slots(self.block)
        self.size = SIZES[0]
        self.slots.resize(self.size)
        self.held, self.lent, self.count = {}, [], 0

    @rule()
    def take(self):
        offset = self.slots.take()
        assert offset not in self.held
        self.held[offset] = self.size, 1
        self.mark(self.slots.array(offset))

    def mark(self, array):
        """Writes what nobody else writes, and looks whether it is undisturbed."""
        self.count = self.count % 250 + 1
        array[:] = self.count
        for other, value in self.lent:
            assert (other == value).all()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hold(self, data):
        offset = data.draw(st.sampled_from(sorted(self.held)))
        size, number = self.held[offset]
        self.held[offset] = size, number + 1
        self.slots.hold(offset)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data):
        offset = data.draw(st.sampled_from(sorted(self.held)))
        self.slots.give(offset)
        self.forget_one(offset)

    def forget_one(self, offset):
        size, number = self.held.pop(offset)
        if number > 1:
            self.held[offset] = size, number - 1

    @precondition(lambda self: any(s == self.size for s, _ in self.held.values()))
    @rule(data=st.data())
    def lend(self, data):
        current = [o for o, (size, _) in self.held.items() if size == self.size]
        offset = data.draw(st.sampled_from(sorted(current)))
        if any(
            array.size and np.shares_memory(array, self.slots.array(offset))
            for array, _ in self.lent
        ):
            return  # one result is lent once
        array = self.slots.lend(offset)
        self.forget_one(offset)
        if offset not in self.held:
            self.mark(array)
            self.lent.append((array, self.count))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def drop(self, data):
        self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))

    @rule(size=st.sampled_from(SIZES))
    def resize(self, size):
        self.size = size
        self.slots.resize(size)

    def teardown(self):
        if hasattr(self, "block"):
            self.block.close()


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=150, deadline=None)
