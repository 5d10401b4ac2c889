"""Locks that the kernel drops with the process that holds them: they tell who is alive, whatever its process id."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

LOCK_TIMEOUT_S = 10.0
"""Patience with another process that starts in the same root."""
LOCK_PAUSE_S = 0.02
"""Between two attempts to lock."""


class Lock(Enum):
    """The outcome of an attempt."""

    TAKEN = 0
    HELD_BY_ANOTHER = 1
    UNSUPPORTED = 2


def try_lock(file: int) -> Lock:
    """Lock an open file, without waiting."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            return Lock.HELD_BY_ANOTHER
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            return Lock.UNSUPPORTED
        raise
    return Lock.TAKEN


def open_lock(path: Path) -> int:
    """Open a lock file, made if it is missing, that no other user can open: whoever can, can hold the lock for ever.

    Raises:
        OSError: If it cannot be opened, or is a symbolic link.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if os.fstat(file).st_uid == os.geteuid():
        os.fchmod(file, 0o600)  # an earlier version made it for everybody to read
    return file


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, made if it is missing, unless the file system has no locks.

    Raises:
        TimeoutError: If somebody else holds it for `LOCK_TIMEOUT_S`.
        OSError: If it cannot be opened, or is a symbolic link.
    """
    file = open_lock(path)
    try:
        _wait_for_lock(file, path)
        yield
    finally:
        os.close(file)


def _wait_for_lock(file: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while try_lock(file) is Lock.HELD_BY_ANOTHER:
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"another process has held the lock {path} for {LOCK_TIMEOUT_S:g} s. It is held for moments only, "
                f"while a process starts: `fuser -v {path}` tells who holds it. End that process, or use another root"
            )
        time.sleep(LOCK_PAUSE_S)
