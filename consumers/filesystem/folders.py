"""Folders below a root: opened one by one, never through a symbolic link, and kept open for the next file."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ELOOP, ENOTDIR
from pathlib import Path

from headgate.capture.errors import ConsumerError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
MAX_KEPT = 32
"""Folders kept open."""


@dataclass(slots=True)
class Folder:
    """An open folder.

    Attributes:
        names: Where it is below the root.
        number: Its file descriptor.
        identity: Device and inode.
        are_parents_synced: Its own entry, and those of the folders above it, are on the disk.
        num_users: Who has it at the moment; it is not closed before they are done.
    """

    names: tuple[str, ...]
    number: int
    identity: tuple[int, int]
    are_parents_synced: bool = False
    num_users: int = 1


class Folders:
    """The folders below a root. Any thread may call.

    A folder stays open for those who come next, as every system call of a writer costs the engine's own thread a wait
    for the interpreter. Whether it still is what lies at its path is looked up each time.

    Args:
        root: An existing folder, without symbolic links in its path.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._kept: OrderedDict[tuple[str, ...], Folder] = OrderedDict()
        self._lock = threading.Lock()  # guards _kept, and num_users of every folder

    @contextmanager
    def open(self, *names: str, make: bool = True) -> Iterator[Folder]:
        """The folder `names`; it and those above it are made if need be and `make`.

        Raises:
            ConsumerError: If one of them is a symbolic link or no folder.
            FileNotFoundError: If it is not there and is not to be made.
        """
        folder = self._find(names) or self._add(names, self._walk(names, make=make))
        try:
            yield folder
        finally:
            self._give_back(folder)

    def sync(self, *names: str) -> None:
        """Put the entries of a folder on the disk, and once those of the folders above it.

        Raises:
            OSError: If that fails, or the folder is gone.
        """
        with self.open(*names, make=False) as folder:
            os.fsync(folder.number)
            if not folder.are_parents_synced:
                for depth in range(len(names) - 1, -1, -1):
                    with self.open(*names[:depth], make=False) as parent:
                        os.fsync(parent.number)
                folder.are_parents_synced = True

    def close(self) -> None:
        """Close every folder that nobody is using. May be called again."""
        with self._lock:
            while self._kept:
                self._close_unused(self._kept.popitem()[1])

    def _find(self, names: tuple[str, ...]) -> Folder | None:
        """The folder that is kept, if it still lies at its path."""
        with self._lock:
            folder = self._kept.get(names)
            if folder is None:
                return None
            self._kept.move_to_end(names)
            folder.num_users += 1
        if _identity(self._root.joinpath(*names)) == folder.identity:
            return folder
        with self._lock:
            if self._kept.get(names) is folder:
                del self._kept[names]
        self._give_back(folder)
        return None

    def _add(self, names: tuple[str, ...], number: int) -> Folder:
        status = os.fstat(number)
        folder = Folder(names, number, (status.st_dev, status.st_ino))
        with self._lock:
            if (other := self._kept.pop(names, None)) is not None:
                self._close_unused(other)
            self._kept[names] = folder
            if len(self._kept) > MAX_KEPT:
                self._close_unused(self._kept.popitem(last=False)[1])
        return folder

    def _give_back(self, folder: Folder) -> None:
        with self._lock:
            folder.num_users -= 1
            if self._kept.get(folder.names) is not folder:
                self._close_unused(folder)

    def _close_unused(self, folder: Folder) -> None:
        """Under the lock, of one that is not kept any more: close it, or leave that to the last who has it."""
        if folder.num_users == 0:
            os.close(folder.number)

    def _walk(self, names: tuple[str, ...], *, make: bool) -> int:
        folder = os.open(self._root, FOLDER)
        for depth, name in enumerate(names, start=1):
            try:
                child = _open_child(name, folder, make=make)
            except OSError as error:
                if error.errno not in (ELOOP, ENOTDIR):
                    raise
                path = self._root.joinpath(*names[:depth])
                raise ConsumerError(f"{path} is a symbolic link or no folder; nothing is written there") from error
            finally:
                os.close(folder)
            folder = child
        return folder


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None  # opening it says why
    return status.st_dev, status.st_ino


def _open_child(name: str, folder: int, *, make: bool) -> int:
    try:
        return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
    return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
