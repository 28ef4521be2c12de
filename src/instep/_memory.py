"""Shared memory without a name: passed by descriptor, gone with its last holder.

`memfd_create` has no entry in /dev/shm, so nothing is left behind by a crash, no
container limit on /dev/shm applies, and no other user can open it. Where it is
missing or refused, an unlinked temporary file does the same, through the disk
cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import warnings
from collections.abc import Iterator

_PAGE = mmap.PAGESIZE
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)


class Block:
    """A growing block of shared memory.

    Growing maps the file anew; arrays on an older mapping stay good, since both
    show the same pages.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None
        self._nbytes = 0

    @classmethod
    def create(cls) -> Block:
        """A new, empty block."""
        return cls(_anonymous_file())

    def at_least(self, nbytes: int) -> memoryview:
        """All bytes of the block, after growing it to `nbytes` where it is smaller.

        Raises:
            MemoryError: the system has no room for it.
        """
        if self._map is None or self._nbytes < nbytes:
            size = _grow(self.fd, max(nbytes, _PAGE))
            with _no_room(size):
                self._map = mmap.mmap(self.fd, size)
            self._nbytes = size
        return memoryview(self._map)

    def close(self) -> None:
        """Gives the block up; memory that arrays still use lives as long as they."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self._map = -1, None


def _anonymous_file() -> int:
    try:
        fd = os.memfd_create("instep", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError):
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # a file would need a descriptor, too
            warnings.warn(
                f"instep could not get shared memory ({error}); it uses an unlinked "
                f"file in {tempfile.gettempdir()} instead, which may be slower",
                RuntimeWarning,
                stacklevel=2,
            )
        return _unlinked_file()
    os.fchmod(fd, 0o600)  # it has no name to be opened by; this is to be tidy
    return fd


def _unlinked_file() -> int:
    with tempfile.TemporaryFile(prefix="instep") as file:
        return os.dup(file.fileno())


def _grow(fd: int, nbytes: int) -> int:
    """Makes the file that long, with its pages reserved; returns its length."""
    size = os.fstat(fd).st_size
    if size >= nbytes:
        return size
    nbytes = -(-nbytes // _PAGE) * _PAGE
    with _no_room(nbytes):
        # A page that is only promised would end the process by SIGBUS at its first
        # write; a reserved one fails here, where it can be said.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
    return nbytes


@contextlib.contextmanager
def _no_room(nbytes: int) -> Iterator[None]:
    """Makes a MemoryError that says how much was wanted of the system's."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise MemoryError(
            f"no room for {nbytes:,} bytes of shared memory ({error.strerror}); try "
            "smaller batches or fewer shards"
        ) from error
