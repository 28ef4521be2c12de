"""Shared memory grows under live views, and its lack is said rather than suffered."""

from __future__ import annotations

import errno
import mmap
import os
import warnings

import numpy as np
import pytest

from helpers import bits, make
from instep import _memory
from instep._memory import Block
from losses import wide


@pytest.fixture
def block():
    block = Block.create()
    yield block
    block.close()


def test_a_new_block_is_zero_and_at_least_a_page(block):
    assert len(block.at_least(1)) == mmap.PAGESIZE
    assert not any(block.at_least(0))


def test_growing_keeps_old_views(block):
    old = np.frombuffer(block.at_least(8), np.float64, 1)
    old[0] = 1.0
    new = np.frombuffer(block.at_least(10 * mmap.PAGESIZE), np.float64)
    assert new[0] == 1.0
    new[0] = 2.0
    assert old[0] == 2.0


def test_a_block_never_shrinks(block):
    size = len(block.at_least(3 * mmap.PAGESIZE))
    assert len(block.at_least(1)) == size


def test_two_holders_see_the_same_bytes(block):
    other = Block(os.dup(block.fd))
    block.at_least(100)[:5] = b"hello"
    assert bytes(other.at_least(100)[:5]) == b"hello"
    other.at_least(mmap.PAGESIZE * 2)[mmap.PAGESIZE :][:5] = b"again"
    assert bytes(block.at_least(mmap.PAGESIZE * 2)[mmap.PAGESIZE :][:5]) == b"again"
    other.close()


def test_views_outlive_the_block():
    block = Block.create()
    view = np.frombuffer(block.at_least(8), np.float64, 1)
    block.close()
    block.close()
    view[0] = 1.0
    assert view[0] == 1.0


def refuse(code):
    def call(*arguments):
        raise OSError(code, os.strerror(code))

    return call


def test_without_shared_memory_a_file_gives_the_same_bits(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arguments = {"a": np.linspace(0, 1, 600_003)}, np.arange(1.0, 6.0)
    with make(wide, workers=2, shards=3) as pool:
        expected = bits(pool(*arguments))
    monkeypatch.setattr(os, "memfd_create", refuse(errno.ENOSPC))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # as in a script: each place warns once
        with make(wide, workers=2, shards=3) as pool:
            assert bits(pool(*arguments)) == expected
    (warning,) = caught
    assert "No space left" in str(warning.message)
    assert not list(tmp_path.iterdir())


def test_without_room_to_grow_the_error_says_how_much(monkeypatch, block):
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
    with pytest.raises(MemoryError, match=r"no room for 1,000,0\d\d,\d\d\d bytes"):
        block.at_least(1_000_000_001)


def test_a_pool_without_room_says_so_and_works_on(monkeypatch):
    grow = _memory._grow

    def grow_a_little(fd, nbytes):
        if nbytes > 1 << 20:
            raise MemoryError("no room")
        return grow(fd, nbytes)

    monkeypatch.setattr(_memory, "_grow", grow_a_little)
    small, large = {"a": np.ones(3)}, {"a": np.ones(1_000_000)}
    x = np.arange(1.0, 4.0)
    with make(wide, workers=2, shards=3) as pool:
        for _ in range(3):
            assert pool(small, x)[1]["a"].tolist() == [2.0, 2.0, 2.0]
            with pytest.raises(MemoryError, match="no room"):
                pool(large, x)
            with pytest.raises(MemoryError, match="no room"):
                pool(small, np.ones((1_000_000, 1)))
