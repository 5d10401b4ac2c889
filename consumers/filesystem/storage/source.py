"""Reading files: of this machine, or of any file system of fsspec, fetched."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headgate.capture.files.reading import refusing
from headgate.capture.schema.errors import CaptureFileError
from headgate.consumers.filesystem.storage.object_store import open_files

logger = logging.getLogger(__name__)


HEAD_BYTES = 64 << 10
"""Bytes of a file in a store that are fetched to see what it is: its header and often its positions."""


class Source(Protocol):
    """A root to read from."""

    def names(self, path: str) -> Sequence[tuple[str, bool]]:
        """Entries of a folder by name, each with whether it is a folder itself; empty if there is no such folder."""
        ...

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a file.

        Raises:
            CaptureFileError: If there is no such file.
        """
        ...

    def read(self, path: str, offset: int, size: int) -> bytes:
        """A part of a file; shorter than asked for if the file ends before."""
        ...

    def array(self, path: str, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """A part of a file as writable memory whose changes never reach the file.

        Raises:
            CaptureFileError: If the file ends before.
        """
        ...


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Whatever a file system or the client of a store raises becomes a `CaptureFileError` with the path."""
    with refusing(path, CaptureFileError, "cannot be read"):
        try:
            yield
        except FileNotFoundError as error:
            raise CaptureFileError(f"{path}: missing") from error
        except OSError as error:
            raise CaptureFileError(f"{path}: cannot be read: {error.strerror or error}") from error


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


class LocalSource:
    """Files of this machine; symbolic links are neither listed nor followed.

    None is mapped: of one that is cut off meanwhile, a page would kill the process.
    """

    def names(self, path: str) -> Sequence[tuple[str, bool]]:
        with _reading(path):
            if os.path.islink(path):
                return []
            try:
                with os.scandir(path) as entries:
                    return sorted((entry.name, entry.is_dir()) for entry in entries if not entry.is_symlink())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path) and not os.path.islink(path)

    def size(self, path: str) -> int:
        with _reading(path):
            status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise CaptureFileError(f"{path}: not a file")
        return status.st_size

    def read(self, path: str, offset: int, size: int) -> bytes:
        with _reading(path), open(path, "rb", opener=_open_plain) as file:
            file.seek(offset)
            return file.read(size)

    def array(self, path: str, offset: int, size: int) -> npt.NDArray[np.uint8]:
        if size == 0:
            return np.empty(0, dtype=np.uint8)
        if offset + size > self.size(path):
            raise CaptureFileError(f"{path}: partial: {offset + size} bytes expected, {self.size(path)} found")
        with _reading(path), open(path, "rb", opener=_open_plain) as file:
            found = np.fromfile(file, np.uint8, size, offset=offset)
        if len(found) < size:
            raise CaptureFileError(f"{path}: partial: it was cut off while it was read")
        return found


class RemoteSource:
    """Files that fsspec reaches; `array` fetches the bytes it is asked for."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def names(self, path: str) -> Sequence[tuple[str, bool]]:
        with _reading(path):
            self._files.invalidate_cache(path)
            try:
                entries = self._files.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        found = ((entry["name"].rstrip("/").rpartition("/")[2], entry["type"] == "directory") for entry in entries)
        return sorted(found)

    def is_folder(self, path: str) -> bool:
        with _reading(path):
            return bool(self._files.isdir(path))

    def size(self, path: str) -> int:
        with _reading(path):
            return int(self._files.size(path))

    def read(self, path: str, offset: int, size: int) -> bytes:
        with _reading(path):
            # By name: s3fs has another argument in the second place.
            return bytes(self._files.cat_file(path, start=offset, end=offset + size)) if size else b""

    def array(self, path: str, offset: int, size: int) -> npt.NDArray[np.uint8]:
        fetched = self.read(path, offset, size)
        if len(fetched) != size:
            raise CaptureFileError(f"{path}: partial: {size} bytes expected at {offset}, {len(fetched)} found")
        return np.frombuffer(bytearray(fetched), dtype=np.uint8)


class HeadSource:
    """One file of a source, of known size, whose first bytes are fetched at once: a header is several reads."""

    def __init__(self, source: Source, path: str, size: int) -> None:
        self._source = source
        self._path = path
        self._size = size
        self._head = source.read(path, 0, min(size, HEAD_BYTES))

    def names(self, path: str) -> Sequence[tuple[str, bool]]:
        return self._source.names(path)

    def is_folder(self, path: str) -> bool:
        return self._source.is_folder(path)

    def size(self, path: str) -> int:
        return self._size if path == self._path else self._source.size(path)

    def read(self, path: str, offset: int, size: int) -> bytes:
        if path == self._path and offset + size <= len(self._head):
            return self._head[offset : offset + size]
        return self._source.read(path, offset, size)

    def array(self, path: str, offset: int, size: int) -> npt.NDArray[np.uint8]:
        return self._source.array(path, offset, size)


def open_source(root: str) -> tuple[Source, str]:
    """The source for a root, and the root's path in it.

    Raises:
        CaptureFileError: If a URL cannot be opened: see `open_files`.
    """
    if "://" not in root or root.startswith("file://"):
        with _reading(root):
            return LocalSource(), str(Path(root.removeprefix("file://")).expanduser().resolve())
    files, path = open_files(root, CaptureFileError)
    return RemoteSource(files), path
