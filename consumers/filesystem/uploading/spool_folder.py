"""Files that wait on this machine for an object store, so that nothing is lost while it is down or when a process dies.

``{spool}/{root's name}/{host}.{pid}.{token}`` is a process's own folder, in the form of a root, and locked as long as
the process lives. A process that starts takes over the folders of those that are gone.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headgate.capture.schema.errors import ConfigError
from headgate.consumers.filesystem.storage.locks import Lock, exclusively, open_lock, try_lock
from headgate.consumers.filesystem.storage.store import slug

logger = logging.getLogger(__name__)

_LOCK = ".lock"
_SHARD_FOLDER = "_shards"


@dataclass(frozen=True)
class Unit:
    """A file, or a folder that belongs together, and its place below the root.

    Attributes:
        folder: The process's folder that it lies in.
        names: Its tag, the folders below that, and its own name.
    """

    folder: Path
    names: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.folder.joinpath(*self.names)

    def files(self) -> list[str]:
        """Names of the files of a folder in the order of their upload: those that vouch for others come last."""
        return sorted((path.name for path in self.path.iterdir() if not path.name.startswith(".")), key=_rank)

    def num_bytes(self) -> int:
        """Bytes of its files."""
        files = self.path.iterdir() if self.path.is_dir() else (self.path,)
        return sum(file.stat().st_size for file in files)

    def remove(self) -> None:
        """Remove it: it vanishes at once, whole. One that is gone already is no error."""
        gone = self.folder / f".{secrets.token_hex(6)}"
        with suppress(FileNotFoundError):
            self.path.rename(gone)
            if gone.is_dir():
                shutil.rmtree(gone)
            else:
                gone.unlink()


def _rank(name: str) -> tuple[int, str]:
    """A shard's description, data, the descriptions of data, and the index."""
    return (0 if name == "shard.json" else {".json": 2, ".jsonl": 3}.get(Path(name).suffix, 1)), name


class SpoolFolder:
    """A process's own folder of the spool, and those that it took over.

    Attributes:
        parent: Holds the folders of all processes that write to the same root.
        path: The process's own.
        left: Files that processes which are gone left in theirs.

    Args:
        spool: Made if it does not exist, for this user alone.
        url: The root that the files are for.

    Raises:
        ConfigError: If it cannot be made or written to, is somebody else's, or has no locks.
    """

    def __init__(self, spool: Path, url: str) -> None:
        self.parent = spool.expanduser().absolute() / slug(url)
        self._locks: dict[Path, int] = {}
        try:
            self.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.parent = self.parent.resolve()
            self.parent.mkdir(mode=0o700, exist_ok=True)
            _check_private(self.parent)
            with exclusively(self.parent / _LOCK):
                abandoned = [path for path in sorted(self.parent.iterdir()) if path.is_dir() and self._take(path)]
                self.path = self.parent / f"{slug(socket.gethostname())}.{os.getpid()}.{secrets.token_hex(4)}"
                self.path.mkdir(mode=0o700)
                self._take(self.path)
        except OSError as error:
            raise ConfigError(
                f"filesystem: files for {url} cannot wait in {self.parent}: {error}; set the parameter spool to a "
                "folder on a local disk"
            ) from error
        for path in abandoned:
            _remove_unfinished(path)
        self.left = [unit for path in abandoned for unit in units_of(path)]
        if self.left:
            logger.warning("%s: %d files and folders wait there; they are uploaded now", self.parent, len(self.left))

    def close(self) -> None:
        """Remove the folders that are empty, and let others take over the rest. May be called again."""
        while self._locks:
            path, lock = self._locks.popitem()
            if next(units_of(path), None) is None:
                shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    def _take(self, folder: Path) -> bool:
        """Lock a folder; False if a process holds it."""
        lock = open_lock(folder / _LOCK)
        outcome = try_lock(lock)
        if outcome is Lock.TAKEN:
            self._locks[folder] = lock
            return True
        os.close(lock)
        if outcome is Lock.UNSUPPORTED:
            raise ConfigError(
                f"filesystem: {self.parent} is on a file system without locks, which tell whose files wait there; set "
                "the parameter spool to a folder on a local disk"
            )
        return False


def default_spool() -> Path:
    """``$XDG_STATE_HOME/headgate/spool``, or the same under ``~/.local/state``."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "headgate" / "spool"


def is_waiting(parent: Path, tag: str) -> bool:
    """Whether files of `tag` wait in any process's folder of `parent`."""
    try:
        return any(unit.names[0] == tag for path in parent.iterdir() if path.is_dir() for unit in units_of(path))
    except FileNotFoundError:  # one went while they were looked at
        return True


def units_of(folder: Path) -> Iterator[Unit]:
    """Find the files in a process's folder that are whole, and folders of such files."""
    for tag in _entries(folder):
        for entry in _entries(tag):
            if entry.name == _SHARD_FOLDER:
                for shard in _entries(entry):
                    yield Unit(folder, (tag.name, _SHARD_FOLDER, shard.name))
            else:
                yield Unit(folder, (tag.name, entry.name))


def _entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _remove_unfinished(folder: Path) -> None:
    """Remove what a process that was killed had begun to write, or to remove."""
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name != _LOCK:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"filesystem: {folder} is not a folder that this user alone may write to; remove it, or set the parameter "
            "spool to a folder of your own"
        )
