"""The selected rows of some sites as one long array ``[rows]``, which is read in ranges and never held; and batches.

Row number 0 is the first row of the first request. A row has a value at every site of the view; requests that lack one
of them are not in it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import ITEM_SIZES, Site
from headgate.consumers.datasets.index import EntryTable, IndexedRoot, StoredUnit
from headgate.consumers.filesystem.formats.layout import POSITIONS, TOKEN_IDS
from headgate.consumers.filesystem.formats.raw_layout import DATA_SUFFIX, SIDECAR_SUFFIX
from headgate.consumers.filesystem.formats.shard_layout import COLUMN_SUFFIX
from headgate.consumers.filesystem.storage.object_store import open_files
from headgate.consumers.filesystem.storage.store import site_file

if TYPE_CHECKING:
    from torch import Tensor


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
        """Copy the bytes of all rows, one after the other."""
        self.memory[self.chosen] = data.reshape(-1, self.memory.shape[1])

    def part(self, start: int, stop: int) -> Slots:
        """The bytes ``start : stop`` of the rows; both lie between rows."""
        width = self.memory.shape[1]
        return Slots(self.memory, self.chosen[start // width : stop // width])

    def views(self) -> list[memoryview]:
        """The memory of each row."""
        flat, width = self.memory.reshape(-1).data, self.memory.shape[1]
        return [flat[at : at + width] for at in (self.chosen * width).tolist()]


class FileRange(NamedTuple):
    """A part of a file, and the memory that it is read into.

    Attributes:
        unit: The file, or the folder that it is in.
        name: Of the file; empty where the unit is the file.
        offset: Its first byte.
        out: Filled whole.
    """

    unit: StoredUnit
    name: str
    offset: int
    out: Bytes | Slots


class RangeReader:
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

    def path(self, unit: StoredUnit, name: str) -> str:
        """Where a file of a unit lies; `name` is empty where the unit is the file."""
        return f"{self._path}/{unit.name}/{name}" if name else f"{self._path}/{unit.name}"

    def read(self, pieces: Sequence[FileRange]) -> None:
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

    def _read_local(self, piece: FileRange) -> None:
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

    def _read_slots(self, piece: FileRange, out: Slots) -> None:
        file, width = self._file(piece.unit, piece.name), out.memory.shape[1]
        for start in range(0, out.nbytes, _VECTORS * width):
            part = out.part(start, min(start + _VECTORS * width, out.nbytes))
            if os.preadv(file, part.views(), piece.offset + start) < part.nbytes:  # cut off, by a signal or for good
                whole = np.empty(part.nbytes, dtype=np.uint8)
                self._read_local(piece._replace(offset=piece.offset + start, out=whole))
                part.put(whole)

    def read_all(self, unit: StoredUnit, name: str) -> bytes:
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

    def _file(self, unit: StoredUnit, name: str) -> int:
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


def _fill(piece: FileRange, data: bytes | Exception, files: Any, path: str) -> None:
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


Numbers = npt.NDArray[np.int64]

_MAX_GAP, _MAX_READ = 64, 4096


class Files:
    """Tensors of entries in the files of several roots.

    Args:
        table: The entries of all roots.
        readers: One for each root.
        root_of_unit: ``[units]``: the root of each.
    """

    def __init__(self, table: EntryTable, readers: Sequence[RangeReader], root_of_unit: Numbers) -> None:
        self.table = table
        self._readers = list(readers)
        self._root_of_unit = root_of_unit

    def positions(self, entry: int) -> Numbers:
        """int64 ``[rows]`` of one entry."""
        columns = self.table.columns
        rows, step = int(columns["rows"][entry]), int(columns["step"][entry])
        if step > 0:
            return int(columns["first"][entry]) + step * np.arange(rows, dtype=np.int64)
        return self.column(entry, POSITIONS, 0, rows)

    def column(self, entry: int, name: str, start: int, stop: int) -> Numbers:
        """Rows ``start : stop`` of ``positions`` or ``token_ids``."""
        if self.table.groups[self.table.columns["group"][entry]].layout == "raw":
            return self._document(entry, name)[start:stop]
        out = np.empty((stop - start) * ITEM_SIZES["int64"], dtype=np.uint8)
        self.read(np.array([entry]), np.array([start]), np.array([stop]), name, out)
        return out.view(np.int64)

    def copy(self) -> Files:
        """A copy for another thread, which opens the files itself."""
        return Files(self.table, [copy(reader) for reader in self._readers], self._root_of_unit)

    def read(self, entries: Numbers, starts: Numbers, stops: Numbers, tensor: str, out: Bytes | Slots) -> None:
        """Fill `out` with a tensor's rows of several ranges; ranges that touch in a file are read at once."""
        if not len(entries):
            return
        columns = self.table.columns
        units, groups = columns["unit"][entries], columns["group"][entries]
        begins, ends = self._bytes(entries, starts, stops, tensor)
        first = np.flatnonzero(np.concatenate(([True], (units[1:] != units[:-1]) | (begins[1:] != ends[:-1]))))
        last = np.append(first[1:], len(units)) - 1
        pieces: dict[int, list[FileRange]] = {}
        done = 0
        spans = (units[first], groups[first], begins[first], ends[last])
        for unit, group, begin, end in zip(*(column.tolist() for column in spans), strict=True):
            name = _file_name(self.table.groups[group].layout, tensor)
            stop = done + end - begin
            memory = out.part(done, stop) if isinstance(out, Slots) else out[done:stop]
            piece = FileRange(self.table.units[unit], name, begin, memory)
            pieces.setdefault(int(self._root_of_unit[unit]), []).append(piece)
            done = stop
        for root, of_root in pieces.items():
            self._readers[root].read(of_root)

    def _bytes(self, entries: Numbers, starts: Numbers, stops: Numbers, tensor: str) -> tuple[Numbers, Numbers]:
        """The first byte of each range of a tensor's rows in its file, and its end."""
        columns = self.table.columns
        at, rows = columns["at"][entries].astype(np.int64), columns["rows"][entries].astype(np.int64)
        kinds, kind = np.unique(columns["group"][entries], return_inverse=True)
        groups = [self.table.groups[number] for number in kinds.tolist()]
        by_start, by_rows = np.array([group.place(tensor) for group in groups], dtype=np.int64)[kind].T
        widths = np.array([group.width(tensor) for group in groups], dtype=np.int64)[kind]
        base = by_start * at + by_rows * rows
        return base + widths * starts, base + widths * stops

    def _document(self, entry: int, name: str) -> Numbers:
        """A column of a raw folder, which its sidecars hold."""
        unit = int(self.table.columns["unit"][entry])
        site = self.table.groups[self.table.columns["group"][entry]].sites[0]
        file = f"{site_file(Site.parse(site))}{SIDECAR_SUFFIX}"
        text = self._readers[self._root_of_unit[unit]].read_all(self.table.units[unit], file)
        try:
            return np.array(msgspec.json.decode(text)[name], dtype=np.int64)
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            raise CaptureFileError(f"{self.table.units[unit].name}/{file}: damaged: {error!r}") from error

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers:
            reader.close()


@lru_cache
def _file_name(layout: str, tensor: str) -> str:
    if layout == "request":
        return ""
    if layout == "raw":
        return f"{site_file(Site.parse(tensor))}{DATA_SUFFIX}"
    return f"{tensor if tensor in (POSITIONS, TOKEN_IDS) else site_file(Site.parse(tensor))}{COLUMN_SUFFIX}"


@dataclass(frozen=True, eq=False)
class DatasetView:
    """Rows of one or several sites.

    Attributes:
        sites: Their names.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        hidden_size: Width of a row.
        files: Where they lie.
        entries: ``[ranges, sites]``: the entry that holds the range, for each site.
        starts: ``[ranges]``: the first row in its entry.
        stops: ``[ranges]``: the end.
        ends: ``[ranges]``: the rows of the view up to and with the range.
    """

    sites: tuple[str, ...]
    dtype: str
    hidden_size: int
    files: Files = field(repr=False)
    entries: Numbers = field(repr=False)
    starts: Numbers = field(repr=False)
    stops: Numbers = field(repr=False)
    ends: Numbers = field(repr=False)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one site."""
        return self.hidden_size * ITEM_SIZES[self.dtype]

    @property
    def num_requests(self) -> int:
        """Requests with rows."""
        return int(np.count_nonzero(np.diff(self.entries[:, 0], prepend=-1)))

    def read(self, start: int, stop: int) -> dict[str, Bytes]:
        """Rows ``start : stop``: uint8 ``[rows, row_bytes]`` by site, the caller's own.

        Raises:
            CaptureFileError: If a file is gone, torn or another one since the data set was opened.
        """
        out = {site: np.empty((stop - start, self.row_bytes), dtype=np.uint8) for site in self.sites}
        self.read_blocks(np.array([start]), np.array([stop]), out)
        return out

    def read_blocks(self, starts: Numbers, stops: Numbers, out: Mapping[str, Bytes | Slots]) -> None:
        """The rows of several blocks into memory by site: uint8 ``[rows, row_bytes]``, contiguous, or slots."""
        ranges, starts, stops = self._cut(starts, stops)
        for number, site in enumerate(self.sites):
            memory = out[site]
            flat = memory if isinstance(memory, Slots) else memory.reshape(-1)
            self.files.read(self.entries[ranges, number], starts, stops, site, flat)

    def gather(self, rows: Numbers) -> dict[str, Bytes]:
        """Rows by number, in any order: uint8 ``[rows, row_bytes]`` by site. Those between near ones are read too."""
        out = {site: np.empty((len(rows), self.row_bytes), dtype=np.uint8) for site in self.sites}
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        for run in _runs(ordered):
            start = int(ordered[run.start])
            found = self.read(start, int(ordered[run.stop - 1]) + 1)
            for site, values in found.items():
                out[site][order[run]] = values[ordered[run] - start]
        return out

    def positions(self, rows: Numbers) -> Numbers:
        """int64 ``[rows]``: the absolute position of each row."""
        table = self.files.table
        ranges, within = self._locate(rows)
        entries = self.entries[ranges, 0]
        out: Numbers = table.columns["first"][entries] + table.columns["step"][entries] * within
        for entry in np.unique(entries[table.columns["step"][entries] == 0]):
            mine = entries == entry
            out[mine] = self.files.positions(int(entry))[within[mine]]
        return out

    def token_ids(self, rows: Numbers) -> Numbers:
        """int64 ``[rows]``: the token whose forward gave each row."""
        ranges, within = self._locate(rows)
        entries = self.entries[ranges, 0]
        out = np.empty(len(rows), dtype=np.int64)
        for entry in np.unique(entries):
            mine = np.flatnonzero(entries == entry)
            low, high = int(within[mine].min()), int(within[mine].max()) + 1
            out[mine] = self.files.column(int(entry), TOKEN_IDS, low, high)[within[mine] - low]
        return out

    def requests(self, rows: Numbers) -> Numbers:
        """int64 ``[rows]``: a number for the request of each row; `request_id` gives its id."""
        found: Numbers = self.entries[self._locate(rows)[0], 0]
        return found

    def request_id(self, request: int) -> str:
        """The id of a request by its number."""
        return self.files.table.request_id(request)

    def tag(self, request: int) -> str:
        """The tag of a request by its number."""
        return self.files.table.tag(request)

    def request_ranges(self) -> Iterator[tuple[int, int, int]]:
        """``(request, first row, end)`` of every request, in their order."""
        first = np.flatnonzero(np.diff(self.entries[:, 0], prepend=-1))
        begins = (self.ends - (self.stops - self.starts))[first]
        finishes = np.append(begins[1:], len(self)) if len(first) else begins
        yield from zip(self.entries[first, 0].tolist(), begins.tolist(), finishes.tolist(), strict=True)

    def file_starts(self) -> Numbers:
        """The first row in each file or folder: where a reader moves on to the next one."""
        units = self.files.table.columns["unit"][self.entries[:, 0]]
        first = np.flatnonzero(np.diff(units, prepend=-1))
        begins: Numbers = (self.ends - (self.stops - self.starts))[first]
        return begins

    def _locate(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """The range of each row, and the row's number in its entry."""
        ranges = np.searchsorted(self.ends, rows, side="right")
        return ranges, self.stops[ranges] - (self.ends[ranges] - rows)

    def _cut(self, starts: Numbers, stops: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """The ranges that blocks of rows lie in, and the first row and the end of each, cut to its block."""
        first = np.searchsorted(self.ends, starts, side="right")
        counts = np.where(starts < stops, np.searchsorted(self.ends, stops, side="left") + 1 - first, 0)
        blocks = np.repeat(np.arange(len(starts)), counts)
        ranges = ascending(first, first + counts)
        shift = self.stops[ranges] - self.ends[ranges]  # from a row's number in the view to that in its entry
        begins = np.maximum(self.starts[ranges], starts[blocks] + shift)
        return ranges, begins, np.minimum(self.stops[ranges], stops[blocks] + shift)


def ascending(starts: Numbers, stops: Numbers) -> Numbers:
    """The numbers ``start : stop`` of several blocks, one after the other."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Numbers = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return numbers


def fingerprint_of(view: DatasetView) -> str:
    """A hash that identifies these rows, by request and place: a state fits the rows that it was saved with alone."""
    columns = view.files.table.columns
    digest = blake2b(repr((view.sites, view.dtype, view.hidden_size)).encode(), digest_size=16)
    for name in ("key", "written", "rows"):
        digest.update(np.ascontiguousarray(columns[name][view.entries[:, 0]]).data)
    digest.update(np.ascontiguousarray(view.starts).data)
    digest.update(np.ascontiguousarray(view.stops).data)
    return digest.hexdigest()


def _runs(ordered: Numbers) -> Iterator[slice]:
    """Slices of ascending numbers; each has no wide gap and reaches over `_MAX_READ` rows at most."""
    edges = np.flatnonzero(np.diff(ordered) > _MAX_GAP) + 1
    bounds = np.concatenate(([0], edges, [len(ordered)]))
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        while first < end:
            stop = first + int(np.searchsorted(ordered[first:end], ordered[first] + _MAX_READ))
            yield slice(first, stop)
            first = stop


def typed(rows: Bytes, dtype: str) -> npt.NDArray[Any]:
    """Rows as numpy has them: float16 and float32 as they are, bfloat16 as float32, which holds it exactly."""
    if dtype != "bfloat16":
        return rows.view(dtype)
    wide = rows.view(np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Some rows, with all that is known of them. The memory is the batch's own: it may be written to.

    Attributes:
        view: Where they are from.
        numbers: int64 ``[rows]``: their numbers in the view.
        data: uint8 ``[rows, row_bytes]`` by site.
    """

    view: DatasetView
    numbers: Numbers
    data: Mapping[str, Bytes]

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        view = self.view
        return f"<RowBatch: {len(self)} rows of {', '.join(self.data)}, {view.dtype} [{view.hidden_size}]>"

    def torch(self, site: str | None = None) -> Tensor:
        """``[rows, hidden]`` in the model's dtype; without a copy.

        Args:
            site: Its name; optional if there is only one.
        """
        import torch

        view = self.view
        data = torch.from_numpy(self.data[self._site(site)])
        return data.view(getattr(torch, view.dtype)).reshape(len(self), view.hidden_size)

    def numpy(self, site: str | None = None) -> npt.NDArray[Any]:
        """``[rows, hidden]``: float16 and float32 as they are, bfloat16 as float32, which holds it exactly."""
        return typed(self.data[self._site(site)], self.view.dtype)

    def float32(self, site: str | None = None) -> npt.NDArray[np.float32]:
        """float32 ``[rows, hidden]``, which holds every dtype of a model exactly."""
        return self.numpy(site).astype(np.float32, copy=False)

    @property
    def positions(self) -> Numbers:
        """int64 ``[rows]``: the absolute position of each row."""
        return self.view.positions(self.numbers)

    @property
    def token_ids(self) -> Numbers:
        """int64 ``[rows]``: the token whose forward gave each row; read from the files now."""
        return self.view.token_ids(self.numbers)

    @property
    def requests(self) -> Numbers:
        """int64 ``[rows]``: a number for the request of each row, such as groups of a cross-validation."""
        return self.view.requests(self.numbers)

    @property
    def request_ids(self) -> list[str]:
        """``[rows]``: the id of each row's request."""
        numbers, inverse = np.unique(self.requests, return_inverse=True)
        names = [self.view.request_id(int(number)) for number in numbers]
        return [names[place] for place in inverse]

    @property
    def tags(self) -> list[str]:
        """``[rows]``: the tag of each row's request."""
        return [self.view.tag(int(number)) for number in self.requests]

    def _site(self, site: str | None) -> str:
        if site is not None:
            return site
        if len(self.view.sites) > 1:
            raise ValueError(f"the batch has several sites: name one of {', '.join(self.view.sites)}")
        return self.view.sites[0]


def plain_batches(view: DatasetView, batch_size: int) -> Iterator[RowBatch]:
    """All rows in order; the last batch may be smaller.

    Raises:
        ValueError: If `batch_size` is not at least 1.
    """
    check_positive(batch_size, "batch_size")
    return (
        RowBatch(view, np.arange(start, stop, dtype=np.int64), view.read(start, stop))
        for start in range(0, len(view), batch_size)
        for stop in [min(start + batch_size, len(view))]
    )


def check_positive(value: int, field: str) -> None:
    """Raise `ValueError` if `value` is below 1."""
    if value < 1:
        raise ValueError(f"{field}: must be at least 1, got {value}")
