"""Bytes of a file that others may change while a server uses it: read by calls of the system, never mapped.

A page of a mapped file that was cut off kills the process that touches it (SIGBUS). A read that comes short is an
error of the one request that needed it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headgate.capture.files.reading import Wrong

Bytes = npt.NDArray[np.uint8]
ReadInto = Callable[[int, Bytes], None]
"""Fills uint8 ``[n]``, contiguous, with the bytes from a position on."""


class ByteSource(Protocol):
    """Bytes that tensors are read from."""

    def opened(self) -> AbstractContextManager[ReadInto]:
        """Open them; what was read is valid if the context ends without an error."""
        ...


class StoredFile:
    """A file as it was when this object was made. Any thread; nothing is kept open between reads.

    Attributes:
        path: The file.
        size: Its bytes.

    Args:
        path: The file.
        wrong: Makes the errors of reads.

    Raises:
        HeadgateError: Made by `wrong`, if it is no regular file.
        OSError: If it is not there.
    """

    def __init__(self, path: Path, wrong: Wrong) -> None:
        self.path = path
        self._wrong = wrong
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise wrong(f"{path}: is no regular file")
        self.size = found.st_size
        self._version = _version(found)

    @contextmanager
    def opened(self) -> Iterator[ReadInto]:
        """Open the file; the context ends with an error if it is another file by then, or was written to.

        Raises:
            HeadgateError: Made by `wrong`: the file has changed, is gone, or ends before what is read.
        """
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise self._wrong(f"{self.path}: the file is gone; register it again") from error
        try:
            yield lambda offset, memory: self._read(file, offset, memory)
            self._check(file)
        finally:
            os.close(file)

    def read(self, offset: int, size: int) -> bytes:
        """Read a part; shorter than asked for where the file ends before.

        Raises:
            HeadgateError: As `opened`.
        """
        memory = np.empty(max(0, min(size, self.size - offset)), np.uint8)
        with self.opened() as read_into:
            read_into(offset, memory)
        return memory.tobytes()

    def check(self) -> None:
        """Raise the error of `opened` if the file has changed."""
        with self.opened():
            pass

    def _read(self, file: int, offset: int, memory: Bytes) -> None:
        if missing := len(memory) - read_whole(file, offset, memory):
            self._check(file)
            raise self._wrong(f"{self.path}: ends {missing} bytes before what is read of it; it is cut off")

    def _check(self, file: int) -> None:
        if _version(os.fstat(file)) != self._version:
            raise self._wrong(f"{self.path}: the file has changed since it was opened; register it again")


def read_whole(file: int, offset: int, memory: Bytes) -> int:
    """Fill memory with the bytes of an open file; return how many, fewer if it ends before."""
    view, done = memory.data, 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def _version(found: os.stat_result) -> tuple[int, int, int, int]:
    """Return what distinguishes a file from another, and from its state before a write."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class StoredBytes:
    """Bytes in memory that are read as a file is.

    Args:
        content: uint8 ``[n]``, contiguous.
    """

    def __init__(self, content: Bytes) -> None:
        self._content = content

    @contextmanager
    def opened(self) -> Iterator[ReadInto]:
        """See `ByteSource.opened`."""
        yield self._read

    def _read(self, offset: int, memory: Bytes) -> None:
        memory[:] = self._content[offset : offset + len(memory)]
