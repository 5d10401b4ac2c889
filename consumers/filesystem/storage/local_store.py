"""A root on a file system of this machine: files and folders appear whole or not at all, and replace nothing.

Folders below the root are opened one by one, never through a symbolic link, and kept open for the next file.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import mmap
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from errno import ELOOP, ENOTDIR
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.consumers.filesystem.storage.store import TAKEN, TEMP_FOLDER, Published, Target, numbered, slug

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
    """Open a lock file, made if it is missing, that no other user can open: a user that can could hold the lock for
    ever.

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
        TimeoutError: If another process holds it for `LOCK_TIMEOUT_S`.
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
                f"while a process starts: `fuser -v {path}` shows who holds it. End that process, or use another root"
            )
        time.sleep(LOCK_PAUSE_S)


logger = logging.getLogger(__name__)

_OWN = re.compile(r"(?P<host>.+)\.(?P<pid>\d+)\.[0-9a-f]{8}")
_LOCK = "lock"
_UNNAMED = os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_TMPFILE", os.O_CREAT | os.O_EXCL)  # the latter: always refused


class TempFolder:
    """``{root}/.tmp/{host}.{pid}.{token}``, locked as long as its process lives.

    Opening one removes the folders of processes of this host that are gone: the lock, which the kernel drops with the
    process, shows it, so a reused process id does not matter. Without locks (some network file systems) nothing is
    removed. Any thread may call.

    Attributes:
        takes_unnamed: Files without a name can be made here and be linked later: `open_unnamed` and `link_unnamed`
            work.

    Raises:
        OSError: If the root cannot be written to.
    """

    def __init__(self, root: Path) -> None:
        self._parent = root / TEMP_FOLDER
        _make_private(self._parent)
        self._host = slug(socket.gethostname())
        self._path = self._parent / f"{self._host}.{os.getpid()}.{secrets.token_hex(4)}"
        self._count = itertools.count()
        self._lock_file: int | None = None
        self._opening = threading.Lock()  # guards _lock_file and the making of _path
        with exclusively(self._parent / _LOCK):
            self._remove_stale()
            self._make()
        self.takes_unnamed = self._probe()

    def open_unnamed(self) -> int:
        """A new file without a name, for writing; nothing is left of one that is closed before it is linked.

        Raises:
            ConsumerError: If the root is gone.
            OSError: If there is no room, or `takes_unnamed` is False.
        """
        try:
            return os.open(self._path, _UNNAMED, 0o666)
        except FileNotFoundError:
            return os.open(self.new_path().parent, _UNNAMED, 0o666)

    def new_path(self) -> Path:
        """A path that no other process uses, on the file system of the root.

        Raises:
            ConsumerError: If the root is gone.
        """
        with self._opening:
            if not self._path.is_dir():
                # `.tmp` vouches for the root: a folder without it is not the one that was opened, but for instance the
                # empty mount point of a volume that went away.
                if not self._parent.is_dir():
                    raise ConsumerError(
                        f"{self._parent.parent} is gone or is not mounted; bring it back, or make {self._parent} to go "
                        "on in an empty folder"
                    )
                with exclusively(self._parent / _LOCK):
                    self._make()
        return self._path / str(next(self._count))

    def close(self) -> None:
        """Remove the folder with everything in it. May be called again."""
        with self._opening:
            if self._lock_file is not None:
                _remove(self._path)
                os.close(self._lock_file)
                self._lock_file = None

    def _make(self) -> None:
        if self._lock_file is not None:
            os.close(self._lock_file)
        self._path.mkdir(mode=0o700)
        self._lock_file = open_lock(self._path / _LOCK)
        try_lock(self._lock_file)

    def _probe(self) -> bool:
        path = self.new_path()
        with ExitStack() as stack:
            try:
                folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, folder)
                file = os.open(path.parent, _UNNAMED, 0o600)
                stack.callback(os.close, file)
                link_unnamed(file, path.name, folder)
            except OSError as error:
                logger.info("%s: files get a name there before they are whole, as it takes no others: %s", path, error)
                return False
        path.unlink()
        return True

    def _remove_stale(self) -> None:
        for path in sorted(self._parent.iterdir()):
            match = _OWN.fullmatch(path.name)
            if match and match["host"] == self._host and not path.is_symlink() and _is_abandoned(path):
                logger.info("removing %s, left by process %s, which is gone", path, match["pid"])
                _remove(path)


def link_unnamed(file: int, name: str, folder: int) -> None:
    """Give an open file that has no name one in `folder`, which must be free."""
    os.link(f"/proc/self/fd/{file}", name, dst_dir_fd=folder, follow_symlinks=True)


def _is_abandoned(path: Path) -> bool:
    try:
        file = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # its process was killed before it could lock
    except PermissionError:
        return False  # another user's
    try:
        return try_lock(file) is Lock.TAKEN
    finally:
        os.close(file)


def _make_private(folder: Path) -> None:
    """Make a folder that only this user may enter; narrow an existing one, unless it is another user's."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("cannot remove %s; delete it by hand", path)


Buffers = Iterable[memoryview]
Link = Callable[[str, int], None]
"""Gives a file a name in an open folder, which must be free."""
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
MAX_KEPT = 32
"""Folders kept open."""
_MAX_BUFFERS = 512
"""Buffers in one system call; the usual limit is 1024."""


class LocalStore:
    """A root on a file system of this machine.

    Everything is written without a name or, where the file system cannot do that, under ``.tmp``, and then linked or
    renamed into its place, which must be free. Any thread may call.

    Attributes:
        root: Absolute, without symbolic links.
        folders: Those below the root.
        fsync: As given.

    Args:
        root: Made if it does not exist.
        fsync: Put files on the disk before they appear.
        numbering: Whether a taken name is answered with the next number instead of an error.

    Raises:
        ConfigError: If the root cannot be made or written to.
    """

    def __init__(self, root: Path, *, fsync: bool, numbering: bool) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.root = root.resolve(strict=True)
            self._temp = TempFolder(self.root)
            self.folders = Folders(self.root)
        except OSError as error:
            raise ConfigError(f"filesystem: root {root} cannot be written to: {error}") from error
        self.fsync = fsync
        self._numbering = numbering

    def temp_path(self) -> Path:
        """A path for a file of one's own, on the file system of the root; removed at the latest when closing."""
        return self._temp.new_path()

    def close(self) -> None:
        """Remove temporary files. May be called again."""
        self.folders.close()
        self._temp.close()

    def check_free(self, target: Target, suffix: str) -> None:
        """Raise `ConsumerError` if the name is taken and numbering is off: early, before rows are collected."""
        path = self.root.joinpath(*target.folder) / f"{target.stem}{suffix}"
        if not self._numbering and os.path.lexists(path):
            raise _taken(path)

    def publish_file(self, target: Target, suffix: str, buffers: Buffers) -> Published:
        """Write ``{folder}/{stem}{suffix}``.

        Raises:
            OSError: If the disk takes no more.
            ConsumerError: If the name is taken, or the root is gone.
        """
        with self._written(buffers) as (num_bytes, link), self.folders.open(*target.folder) as folder:
            name = self._place(target, suffix, lambda name: link(name, folder.number))
        placed = self.root.joinpath(*target.folder) / name
        return Published(
            (str(placed),), num_bytes, FolderSync(self, target.folder), partial(self._take_back, target, name)
        )

    def publish_folder(self, target: Target, files: Mapping[str, Buffers]) -> Published:
        """Write ``{folder}/{stem}/`` with `files` in it; it appears with all of them. Raises as `publish_file` does."""
        temp = self._temp.new_path()
        try:
            num_bytes = self.write_folder(temp, files)
            with self.folders.open(*target.folder) as folder:
                name = self._place(target, "", lambda name: os.rename(temp, name, dst_dir_fd=folder.number))
        finally:
            shutil.rmtree(temp, ignore_errors=True)
        paths = tuple(str(self.root.joinpath(*target.folder) / name / file) for file in files)
        return Published(paths, num_bytes, FolderSync(self, target.folder), partial(self._take_back, target, name))

    def _take_back(self, target: Target, name: str) -> None:
        """Remove a published file or folder: it vanishes at once, whole."""
        temp = self._temp.new_path()
        with self.folders.open(*target.folder, make=False) as folder:
            os.rename(name, temp, src_dir_fd=folder.number)
        if temp.is_dir():
            shutil.rmtree(temp)
        else:
            temp.unlink()

    def write_folder(self, path: Path, files: Mapping[str, Buffers]) -> int:
        """Make a folder of `files` at `path`; return their bytes."""
        path.mkdir()
        num_bytes = sum(write_file(path / name, buffers, fsync=self.fsync) for name, buffers in files.items())
        if self.fsync:
            sync_folder(path)
        return num_bytes

    @contextmanager
    def _written(self, buffers: Buffers) -> Iterator[tuple[int, Link]]:
        """Write a file that has no name yet; yield its number of bytes and the call that names it.

        A file that was not named is removed.
        """
        if self._temp.takes_unnamed:
            file = self._temp.open_unnamed()
            try:
                yield _fill(file, buffers, fsync=self.fsync), partial(link_unnamed, file)
            finally:
                os.close(file)
        else:
            temp = self._temp.new_path()
            try:
                # Closed before it has its place: network file systems may say only then that there was no room.
                yield write_file(temp, buffers, fsync=self.fsync), partial(_link, temp)
            finally:
                temp.unlink(missing_ok=True)

    def _place(self, target: Target, suffix: str, place: Callable[[str], None]) -> str:
        """Give the file its name, the first free one if numbering is on; return it."""
        count = 1
        while True:
            name = f"{numbered(target.stem, count)}{suffix}"
            try:
                place(name)
            except OSError as error:
                if error.errno not in _TAKEN or not os.path.lexists(self.root.joinpath(*target.folder) / name):
                    raise
                if not self._numbering:
                    raise _taken(self.root.joinpath(*target.folder) / name) from error
                count += 1
            else:
                return name


@dataclass(frozen=True, slots=True)
class FolderSync:
    """The entries of a folder and of those above it, which are on the disk once `sync` returns."""

    store: LocalStore
    names: tuple[str, ...]

    def sync(self) -> None:
        """Put the entries on the disk; does nothing with fsync off."""
        if self.store.fsync:
            self.store.folders.sync(*self.names)


@dataclass(slots=True)
class Folder:
    """An open folder.

    Attributes:
        names: Where it is below the root.
        number: Its file descriptor.
        identity: Device and inode.
        are_parents_synced: Its own entry, and those of the folders above it, are on the disk.
        num_users: Number of users at the moment; it is closed after the last of them.
    """

    names: tuple[str, ...]
    number: int
    identity: tuple[int, int]
    are_parents_synced: bool = False
    num_users: int = 1


class Folders:
    """The folders below a root. Any thread may call.

    A folder stays open for its next users, as every system call of a writer costs the engine's own thread a wait
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
        """Open the folder `names`; with `make`, create it and those above it if they are missing.

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
        """Close every unused folder. May be called again."""
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
        """Close a folder that is no longer kept, or leave that to its last user. Under the lock."""
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


def _open_child(name: str, folder: int, *, make: bool) -> int:
    try:
        return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
    return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None  # opening it says why
    return status.st_dev, status.st_ino


def write_file(path: Path, buffers: Buffers, *, fsync: bool) -> int:
    """Write a new file; return its bytes.

    Raises:
        OSError: If the disk takes no more; a partial file is then at `path`.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        return _fill(file, buffers, fsync=fsync)
    finally:
        os.close(file)


def _fill(file: int, buffers: Buffers, *, fsync: bool) -> int:
    views = [*buffers]
    if fsync and sum(view.nbytes for view in views) >= BLOCK_BYTES and _is_on_disk(file):
        num_bytes = _write_past_cache(file, views)
    else:
        num_bytes = write_all(file, views, 0)
    if fsync:
        os.fsync(file)
    return num_bytes


BLOCK_BYTES = 4 << 20
"""Bytes that are written at once past the page cache; shorter files go through it."""
_SECTOR = 4096
"""Bytes in whose multiples disks are written to, at most."""


class _Block(threading.local):
    """Memory of a thread whose address is such a multiple."""

    def __init__(self) -> None:
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)


_BLOCK = _Block()


def _is_on_disk(file: int) -> bool:
    """Whether a file lies on a file system of a block device: others have no device, and are memory or a network."""
    return os.major(os.fstat(file).st_dev) != 0


def _write_past_cache(file: int, views: Iterable[memoryview]) -> int:
    """Write an empty file, past the page cache where its file system allows it; return its bytes.

    What is to be on the disk before its request's result gains nothing from the page cache, where a new page costs
    several times what copying its bytes here does. Positions and lengths must be multiples of a sector there, so the
    last block is longer than its bytes, and the file is cut afterwards.

    Raises:
        OSError: If the disk takes no more.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with suppress(OSError):  # EINVAL: this file system has only the page cache
        fcntl.fcntl(file, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
    offset = used = 0
    block = _BLOCK.bytes
    for view in views:
        rest = np.frombuffer(view, np.uint8)  # numpy copies without the GIL
        while len(rest):
            count = min(len(rest), BLOCK_BYTES - used)
            block[used : used + count] = rest[:count]
            used, rest = used + count, rest[count:]
            if used == BLOCK_BYTES:
                offset, used = _write_block(file, block, offset, flags), 0
    if used:
        _write_block(file, block[: -(-used // _SECTOR) * _SECTOR], offset, flags)
        os.ftruncate(file, offset + used)
    fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return offset + used


def _write_block(file: int, block: npt.NDArray[np.uint8], offset: int, flags: int) -> int:
    """Write a block; through the page cache, with the file's own `flags`, if it cannot be written past it after all."""
    try:
        return write_all(file, [block.data], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return write_all(file, [block.data], offset)


def write_all(file: int, buffers: Iterable[memoryview], offset: int) -> int:
    """Write `buffers` one after the other at `offset`; return where they end.

    Raises:
        OSError: If the disk takes no more.
    """
    remaining = (view for view in buffers if view.nbytes)
    while batch := list(islice(remaining, _MAX_BUFFERS)):
        while batch:
            written = os.pwritev(file, batch, offset)
            offset += written
            batch = _unwritten(batch, written)
    return offset


def _unwritten(views: Sequence[memoryview], written: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if written < view.nbytes:
            return [view[written:], *views[index + 1 :]]
        written -= view.nbytes
    return []


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, row after row."""
    return array.data.cast("B") if array.size else memoryview(b"")


def sync_folder(path: Path) -> None:
    """Put a folder's entries on the disk."""
    folder = os.open(path, FOLDER)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _link(temp: Path, name: str, folder: int) -> None:
    """Give `temp` a second name in `folder`, which must be free: unlike a rename, a link replaces nothing."""
    try:
        os.link(temp, name, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # No hard links here. Two processes that publish one name in the same instant could replace each other.
        if name in os.listdir(folder):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from error
        os.rename(temp, name, dst_dir_fd=folder)


def _taken(path: Path) -> ConsumerError:
    return ConsumerError(f"{path} {TAKEN}")
