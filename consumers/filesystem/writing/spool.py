"""Rows of one running request: in memory, and in a temporary file once they are many."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.sites import Site

Bytes2D = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Chunk:
    """Some rows of one request, as bytes.

    Attributes:
        sites: ``S`` sites.
        positions: int64 ``[N]``.
        data: uint8 ``[S, N, row_bytes]``; None while it is in the spool's file.
        offset: Where it starts in that file.
    """

    sites: tuple[Site, ...]
    positions: Int64Array
    data: npt.NDArray[np.uint8] | None
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory that the rows take; 0 while they are in the spool's file."""
        return 0 if self.data is None else self.data.nbytes


@dataclass(frozen=True, slots=True)
class WholeRequest:
    """All valid rows of one request, ready to be written.

    Attributes:
        positions: int64 ``[rows]``, ascending; the same for every site.
        pieces: For each site its rows in order, uint8 ``[n, row_bytes]`` each.
    """

    positions: Int64Array
    pieces: Mapping[Site, Sequence[Bytes2D]]

    @property
    def num_rows(self) -> int:
        """Rows per site."""
        return len(self.positions)

    def buffers(self, site: Site) -> Iterator[memoryview]:
        """The bytes of `site`'s rows, row after row."""
        for piece in self.pieces[site]:
            yield bytes_of(np.ascontiguousarray(piece))


class Spool:
    """Rows of one request until it ends. Used by one thread.

    Attributes:
        held_bytes: Memory that its rows take.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self._chunks: list[Chunk] = []
        self._path: Path | None = None
        self._file: int | None = None
        self._file_bytes = 0

    def append(self, chunk: Chunk) -> None:
        """Take rows; a site's rows come in ascending order of position."""
        self._chunks.append(chunk)
        self.held_bytes += chunk.num_bytes

    def spill(self, path: Path) -> None:
        """Move every row from memory to a file: a new one at `path`, or the one that an earlier call made.

        Raises:
            OSError: If the disk takes no more; the rows that did not fit are still in memory.
        """
        if self._file is None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._path = path
        for chunk in self._chunks:
            if chunk.data is not None:
                write_all(self._file, [bytes_of(np.ascontiguousarray(chunk.data))], self._file_bytes)
                chunk.offset = self._file_bytes
                self._file_bytes += chunk.num_bytes
                self.held_bytes -= chunk.num_bytes
                chunk.data = None

    def assemble(self, sites: Sequence[Site], *, num_rows: int, row_bytes: int, has_gaps: bool) -> WholeRequest:
        """Put the rows in order, without copying them.

        Args:
            sites: The sites that were asked for.
            num_rows: Rows at positions from here on were computed in vain and are left out.
            row_bytes: Bytes of one row.
            has_gaps: Rows were lost on their way, so a site may lack some: only positions that all sites have are kept.

        Raises:
            ConsumerError: If positions do not ascend, or differ between sites without `has_gaps`.
        """
        mapped = self._map()
        pieces: dict[Site, list[Bytes2D]] = {site: [] for site in sites}
        spans: dict[Site, list[Int64Array]] = {site: [] for site in sites}
        for chunk in self._chunks:
            keep = int(np.searchsorted(chunk.positions, num_rows))
            if keep:
                kept = chunk.positions[:keep]
                data = _data_of(chunk, mapped, row_bytes)
                for index, site in enumerate(chunk.sites):
                    if site in pieces:
                        pieces[site].append(data[index, :keep])
                        spans[site].append(kept)
        return _even(pieces, spans, has_gaps)

    def discard(self) -> None:
        """Give up memory and file. May be called again."""
        self._chunks.clear()
        self.held_bytes = 0
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def _map(self) -> npt.NDArray[np.uint8]:
        """What is in the file; stays readable after the file was closed and unlinked."""
        if self._file is None or self._file_bytes == 0:
            return np.empty(0, dtype=np.uint8)
        return np.frombuffer(mmap.mmap(self._file, self._file_bytes, access=mmap.ACCESS_READ), dtype=np.uint8)


def _data_of(chunk: Chunk, mapped: npt.NDArray[np.uint8], row_bytes: int) -> npt.NDArray[np.uint8]:
    """A chunk's rows, uint8 ``[S, N, row_bytes]``, from memory or from the spool's file."""
    if chunk.data is not None:
        return chunk.data
    shape = (len(chunk.sites), len(chunk.positions), row_bytes)
    num_bytes = shape[0] * shape[1] * shape[2]
    return mapped[chunk.offset : chunk.offset + num_bytes].reshape(shape)


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


_MAX_BUFFERS = 512
"""Buffers in one system call; the usual limit is 1024."""


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, row after row."""
    return array.data.cast("B") if array.size else memoryview(b"")


def _unwritten(views: Sequence[memoryview], written: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if written < view.nbytes:
            return [view[written:], *views[index + 1 :]]
        written -= view.nbytes
    return []


def _even(pieces: Mapping[Site, list[Bytes2D]], spans: Mapping[Site, list[Int64Array]], has_gaps: bool) -> WholeRequest:
    """Check that every site has the same positions or, where rows were lost, cut all of them back to those."""
    by_blocks: dict[tuple[int, ...], Int64Array] = {}
    positions: dict[Site, Int64Array] = {}
    for site, chunks in spans.items():
        blocks = tuple(map(id, chunks))  # sites of the same blocks share their position arrays
        if blocks not in by_blocks:
            by_blocks[blocks] = _positions_of(chunks, site)
        positions[site] = by_blocks[blocks]
    common = reduce(partial(np.intersect1d, assume_unique=True), by_blocks.values())
    if all(len(each) == len(common) for each in by_blocks.values()):
        return WholeRequest(common, pieces)
    if not has_gaps:
        counts = ", ".join(f"{site.name}: {len(each)}" for site, each in positions.items())
        raise ConsumerError(f"the sites differ in their positions although no row was dropped: {counts}; none is kept")
    return WholeRequest(common, {site: _only(pieces[site], np.isin(positions[site], common)) for site in pieces})


def _only(pieces: list[Bytes2D], keep: npt.NDArray[np.bool_]) -> list[Bytes2D]:
    return [np.concatenate(pieces)[keep]] if pieces else []


def _positions_of(chunks: Sequence[Int64Array], site: Site) -> Int64Array:
    positions = np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int64)
    if (np.diff(positions) <= 0).any():
        raise ConsumerError(f"rows of site {site.name} came out of order or twice; none of them is kept")
    return positions
