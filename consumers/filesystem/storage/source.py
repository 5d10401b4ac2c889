"""Reading files: of this machine, mapped, or of any file system of fsspec, fetched."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import fsspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import CaptureFileError


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


class LocalSource:
    """Files of this machine; `array` maps them, so nothing is read before it is used."""

    def names(self, path: str) -> Sequence[tuple[str, bool]]:
        try:
            with os.scandir(path) as entries:
                return sorted((entry.name, entry.is_dir()) for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def size(self, path: str) -> int:
        try:
            status = Path(path).stat()
        except FileNotFoundError as error:
            raise CaptureFileError(f"{path}: missing") from error
        if not stat.S_ISREG(status.st_mode):
            raise CaptureFileError(f"{path}: not a file")
        return status.st_size

    def read(self, path: str, offset: int, size: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)

    def array(self, path: str, offset: int, size: int) -> npt.NDArray[np.uint8]:
        if size == 0:
            return np.empty(0, dtype=np.uint8)
        if offset + size > self.size(path):
            raise CaptureFileError(f"{path}: partial: {offset + size} bytes expected, {self.size(path)} found")
        return np.memmap(path, dtype=np.uint8, mode="c", offset=offset, shape=(size,))


class RemoteSource:
    """Files that fsspec reaches; `array` fetches the bytes it is asked for."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def names(self, path: str) -> Sequence[tuple[str, bool]]:
        self._files.invalidate_cache(path)
        if not self._files.isdir(path):
            return []
        entries = self._files.ls(path, detail=True)
        found = ((entry["name"].rstrip("/").rpartition("/")[2], entry["type"] == "directory") for entry in entries)
        return sorted(found)

    def is_folder(self, path: str) -> bool:
        return bool(self._files.isdir(path))

    def size(self, path: str) -> int:
        try:
            return int(self._files.size(path))
        except FileNotFoundError as error:
            raise CaptureFileError(f"{path}: missing") from error

    def read(self, path: str, offset: int, size: int) -> bytes:
        return bytes(self._files.cat_file(path, offset, offset + size)) if size else b""

    def array(self, path: str, offset: int, size: int) -> npt.NDArray[np.uint8]:
        fetched = self.read(path, offset, size)
        if len(fetched) != size:
            raise CaptureFileError(f"{path}: partial: {size} bytes expected at {offset}, {len(fetched)} found")
        return np.frombuffer(bytearray(fetched), dtype=np.uint8)


def open_source(root: str) -> tuple[Source, str]:
    """The source for a root, and the root's path in it."""
    if "://" not in root or root.startswith("file://"):
        return LocalSource(), str(Path(root.removeprefix("file://")).expanduser().resolve())
    files, path = fsspec.core.url_to_fs(root)
    return RemoteSource(files), str(path).rstrip("/")
