"""Bytes of captured files, read straight into the caller's memory: on this machine, or by ranged requests of fsspec."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import CaptureFileError
from headgate.consumers.datasets.index.root import IndexedRoot
from headgate.consumers.datasets.index.table import Unit
from headgate.consumers.filesystem.storage.object_store import open_files

MAX_OPEN = 128
"""Files kept open."""

Bytes = npt.NDArray[np.uint8]


class Reader:
    """Reads ranges of the files of one root. One thread at a time; a copy in another process opens its own files.

    Nothing is kept but open files: memory grows with what the caller asks for alone.

    Args:
        root: The root.
    """

    def __init__(self, root: IndexedRoot) -> None:
        self._path = root.path
        self._given = root.given
        self._files = root.files
        self._open: OrderedDict[str, int] = OrderedDict()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def path(self, unit: Unit, name: str) -> str:
        """Where a file of a unit lies; `name` is empty where the unit is the file."""
        return f"{self._path}/{unit.name}/{name}" if name else f"{self._path}/{unit.name}"

    def read_into(self, unit: Unit, name: str, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes that begin at `offset`.

        Raises:
            CaptureFileError: If the file is gone, ends before, or is another one than the index speaks of.
        """
        if not out.nbytes:
            return
        if self._files is not None:
            fetched = self._fetch(self.path(unit, name), offset, out.nbytes)
            out[:] = np.frombuffer(fetched, dtype=np.uint8)
            return
        file = self._file(unit, name)
        view, done = out.data, 0
        while done < len(view):
            count = os.preadv(file, [view[done:]], offset + done)
            if not count:
                raise CaptureFileError(f"{self.path(unit, name)}: torn: ends {len(view) - done} bytes early")
            done += count

    def read_all(self, unit: Unit, name: str) -> bytes:
        """A whole small file."""
        path = self.path(unit, name)
        if self._files is not None:
            return bytes(self._own_files().cat_file(path))
        try:
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError as error:
            raise CaptureFileError(f"{path}: missing since the data set was opened") from error

    def close(self) -> None:
        """Close its files; they are opened again when they are needed."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        if self._process == os.getpid():
            self.close()

    def _fetch(self, path: str, offset: int, size: int) -> bytes:
        try:
            fetched = bytes(self._own_files().cat_file(path, start=offset, end=offset + size))
        except FileNotFoundError as error:
            raise CaptureFileError(f"{path}: missing since the data set was opened") from error
        if len(fetched) != size:
            raise CaptureFileError(f"{path}: torn: {size} bytes expected at {offset}, {len(fetched)} found")
        return fetched

    def _own_files(self) -> Any:
        """The file system of fsspec; a new one in a forked process, which has not the threads of its parent's."""
        if self._process != os.getpid():
            self._files, self._process = open_files(self._given, CaptureFileError)[0], os.getpid()
        return self._files

    def _file(self, unit: Unit, name: str) -> int:
        path = self.path(unit, name)
        if self._process != os.getpid():  # a forked copy: the numbers are good, but the parent's to close
            self._open, self._process = OrderedDict(), os.getpid()
        kept = self._open.get(path)
        if kept is not None:
            self._open.move_to_end(path)
            return kept
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise CaptureFileError(f"{path}: missing since the data set was opened") from error
        status = os.fstat(file)
        if unit.layout == "request" and (status.st_size, status.st_mtime_ns) != (unit.size, unit.stamp):
            os.close(file)
            raise CaptureFileError(f"{path}: changed since the data set was opened; open it anew")
        self._open[path] = file
        if len(self._open) > MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return file
