"""Publishing files and folders in a local root: whole or not at all, and never over something that is there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headgate.capture.errors import ConfigError, ConsumerError
from headgate.consumers.filesystem.names import Target, numbered
from headgate.consumers.filesystem.spool import write_all
from headgate.consumers.filesystem.store import Published
from headgate.consumers.filesystem.tempfolder import TempFolder

Buffers = Iterable[memoryview]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStore:
    """A root on a file system of this machine.

    Everything is written under ``.tmp`` and then linked or renamed into its place, which must be free. Folders below
    the root are opened one by one and never through a symbolic link. Any thread may call.

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
        except OSError as error:
            raise ConfigError(f"filesystem: root {root} cannot be written to: {error}") from error
        self.fsync = fsync
        self._numbering = numbering

    def temp_path(self) -> Path:
        """A path for a file of one's own, on the file system of the root; removed at the latest when closing."""
        return self._temp.new_path()

    def close(self) -> None:
        """Remove temporary files. May be called again."""
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
        temp = self._temp.new_path()
        try:
            num_bytes = write_file(temp, buffers, fsync=self.fsync)
            with self.open_folder(*target.folder) as folder:
                name = self._place(target, suffix, lambda name: _link(temp, name, folder))
        finally:
            temp.unlink(missing_ok=True)
        path = self.root.joinpath(*target.folder) / name
        return Published((str(path),), num_bytes, FolderSync(self, target.folder))

    def publish_folder(self, target: Target, files: Mapping[str, Buffers]) -> Published:
        """Write ``{folder}/{stem}/`` with `files` in it; it appears with all of them. Raises as `publish_file` does."""
        temp = self._temp.new_path()
        try:
            num_bytes = self.write_folder(temp, files)
            with self.open_folder(*target.folder) as folder:
                name = self._place(target, "", lambda name: os.rename(temp, name, dst_dir_fd=folder))
        finally:
            shutil.rmtree(temp, ignore_errors=True)
        paths = tuple(str(self.root.joinpath(*target.folder) / name / file) for file in files)
        return Published(paths, num_bytes, FolderSync(self, target.folder))

    def write_folder(self, path: Path, files: Mapping[str, Buffers]) -> int:
        """Make a folder of `files` at `path`; return their bytes."""
        path.mkdir()
        num_bytes = sum(write_file(path / name, buffers, fsync=self.fsync) for name, buffers in files.items())
        if self.fsync:
            sync_folder(path)
        return num_bytes

    @contextmanager
    def open_folder(self, *names: str, make: bool = True) -> Iterator[int]:
        """Open, and if need be and `make` make, the folder `names` below the root; yields its file descriptor.

        Raises:
            ConsumerError: If one of them is a symbolic link or no folder.
        """
        folder = os.open(self.root, _FOLDER)
        try:
            for depth, name in enumerate(names, start=1):
                try:
                    child = _open_child(name, folder, make=make)
                except OSError as error:
                    if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                        raise
                    path = self.root.joinpath(*names[:depth])
                    raise ConsumerError(f"{path} is a symbolic link or no folder; nothing is written there") from error
                os.close(folder)
                folder = child
            yield folder
        finally:
            os.close(folder)

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
    """The entries of a folder and of those above it, which are on the disk once `settle` returns."""

    store: LocalStore
    names: tuple[str, ...]

    def settle(self) -> None:
        """Put the entries on the disk; does nothing with fsync off."""
        if self.store.fsync:
            for depth in range(len(self.names), -1, -1):
                with self.store.open_folder(*self.names[:depth], make=False) as folder:
                    os.fsync(folder)


def write_file(path: Path, buffers: Buffers, *, fsync: bool) -> int:
    """Write a new file; return its bytes.

    Raises:
        OSError: If the disk takes no more; a partial file is then at `path`.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        num_bytes = write_all(file, buffers, 0)
        if fsync:
            os.fsync(file)
    finally:
        os.close(file)
    return num_bytes


def sync_folder(path: Path) -> None:
    """Put a folder's entries on the disk."""
    folder = os.open(path, _FOLDER)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _open_child(name: str, folder: int, *, make: bool) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


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
    return ConsumerError(
        f"{path} exists and is not overwritten; give another tag or request_id, or set the parameter if_exists=number"
    )
