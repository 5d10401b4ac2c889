"""Bytes of captured files, read straight into the caller's memory: on this machine, or by ranged requests of fsspec."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import CaptureFileError
from headgate.consumers.datasets.index.root import IndexedRoot
from headgate.consumers.datasets.index.table import Unit
from headgate.consumers.filesystem.storage.object_store import open_files

MAX_OPEN = 128
"""Files kept open."""
_VECTORS = 512
"""Rows that one call of the system reads to their places; it takes at most 1024."""

Bytes = npt.NDArray[np.uint8]


class Slots(NamedTuple):
    """Memory for rows, in any order: each is read to its place, without a copy of all in between.

    Attributes:
        memory: uint8 ``[slots, row_bytes]``, contiguous.
        chosen: int64 ``[rows]``: the slot of each row, in the order of the rows.
    """

    memory: Bytes
    chosen: npt.NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return len(self.chosen) * int(self.memory.shape[1])

    def put(self, data: Bytes) -> None:
        """Copy the bytes of all rows, one behind the other."""
        self.memory[self.chosen] = data.reshape(-1, self.memory.shape[1])

    def part(self, start: int, stop: int) -> Slots:
        """The bytes ``start : stop`` of the rows; both lie between rows."""
        width = self.memory.shape[1]
        return Slots(self.memory, self.chosen[start // width : stop // width])

    def views(self) -> list[memoryview]:
        """The memory of each row."""
        flat, width = self.memory.reshape(-1).data, self.memory.shape[1]
        return [flat[at : at + width] for at in (self.chosen * width).tolist()]


class Piece(NamedTuple):
    """A part of a file, and the memory that it is read into.

    Attributes:
        unit: The file, or the folder that it is in.
        name: Of the file; empty where the unit is the file.
        offset: Its first byte.
        out: Filled whole.
    """

    unit: Unit
    name: str
    offset: int
    out: Bytes | Slots


class Reader:
    """Reads ranges of the files of one root. One thread at a time; a copy, for another thread or process,
    opens files of its own.

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

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill the memory of each piece; those of a store are fetched side by side, as each takes a round trip.

        Raises:
            CaptureFileError: If a file is gone, ends before, or is another one than the index speaks of.
        """
        wanted = [piece for piece in pieces if piece.out.nbytes]
        if self._files is None:
            for piece in wanted:
                self._read_local(piece)
        elif wanted:
            paths = [self.path(piece.unit, piece.name) for piece in wanted]
            starts = [piece.offset for piece in wanted]
            stops = [piece.offset + piece.out.nbytes for piece in wanted]
            files = self._own_files()
            fetched = files.cat_ranges(paths, starts, stops, on_error="return")
            for path, piece, data in zip(paths, wanted, fetched, strict=True):
                _fill(piece, data, files, path)

    def _read_local(self, piece: Piece) -> None:
        if isinstance(piece.out, Slots):
            self._read_slots(piece, piece.out)
            return
        file = self._file(piece.unit, piece.name)
        view, done = piece.out.data, 0
        while done < len(view):
            count = os.preadv(file, [view[done:]], piece.offset + done)
            if not count:
                path = self.path(piece.unit, piece.name)
                raise CaptureFileError(f"{path}: torn: ends {len(view) - done} bytes early")
            done += count

    def _read_slots(self, piece: Piece, out: Slots) -> None:
        file, width = self._file(piece.unit, piece.name), out.memory.shape[1]
        for start in range(0, out.nbytes, _VECTORS * width):
            part = out.part(start, min(start + _VECTORS * width, out.nbytes))
            if os.preadv(file, part.views(), piece.offset + start) < part.nbytes:  # cut off, by a signal or for good
                whole = np.empty(part.nbytes, dtype=np.uint8)
                self._read_local(piece._replace(offset=piece.offset + start, out=whole))
                part.put(whole)

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


def _fill(piece: Piece, data: bytes | Exception, files: Any, path: str) -> None:
    """Copy the answer of a store into a piece; a store may answer a range beyond the end with an error of its own."""
    if isinstance(data, FileNotFoundError):
        raise CaptureFileError(f"{path}: missing since the data set was opened") from data
    if isinstance(data, Exception):
        files.invalidate_cache()
        size = files.info(path)["size"] - piece.offset
    else:
        size = len(data)
    if size < piece.out.nbytes:
        found = max(size, 0)
        raise CaptureFileError(f"{path}: torn: {piece.out.nbytes} bytes expected at {piece.offset}, {found} found")
    if isinstance(data, Exception):
        raise data
    found_bytes = np.frombuffer(data, dtype=np.uint8)
    if isinstance(piece.out, Slots):
        piece.out.put(found_bytes)
    else:
        piece.out[:] = found_bytes
