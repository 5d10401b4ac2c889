"""A process's own folder for files in the making, and the removal of what killed processes left."""

from __future__ import annotations

import itertools
import logging
import os
import re
import secrets
import shutil
import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

from headgate.capture.schema.errors import ConsumerError
from headgate.consumers.filesystem.storage.locks import Lock, exclusively, open_lock, try_lock
from headgate.consumers.filesystem.storage.store import TEMP_FOLDER, slug

logger = logging.getLogger(__name__)

_OWN = re.compile(r"(?P<host>.+)\.(?P<pid>\d+)\.[0-9a-f]{8}")
_LOCK = "lock"
_UNNAMED = os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_TMPFILE", os.O_CREAT | os.O_EXCL)  # the latter: always refused


class TempFolder:
    """``{root}/.tmp/{host}.{pid}.{token}``, locked as long as its process lives.

    Opening one removes the folders of processes of this host that are gone: the lock, which the kernel drops with the
    process, tells, so a reused process id does not matter. Without locks (some network file systems) nothing is
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
        """A path that nobody else uses, on the file system of the root.

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
