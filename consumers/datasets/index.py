"""The index of a root: which files there are, which requests in them, and where each one's rows lie.

A root's index is one file: ``magic, length of the header, CRC-32 of header and of the columns, header (JSON),
columns``. It lies beside the root, appears whole, and is valid for the files whose names, sizes and times it lists; the
others are looked into anew. Requests are columns of numbers, so ten million of them open by mapping the file.

One *entry* is one request as it lies in the files of one pipeline stage; one *unit* is a file of the layout
``request``, or a folder of ``raw`` or ``shards``; one *group* is all that many entries share.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.files.reading import refusing
from headgate.capture.schema.errors import CaptureFileError, NewerFormatError
from headgate.capture.schema.sites import ITEM_SIZES, Columns, SiteShape
from headgate.consumers.filesystem.formats.layout import (
    POSITIONS,
    SHARD_FOLDER,
    TOKEN_IDS,
    LayoutName,
    MessagePlace,
    Sidecar,
    StoredStage,
    TensorRef,
)
from headgate.consumers.filesystem.formats.raw_layout import read_raw_folder
from headgate.consumers.filesystem.formats.request_layout import read_request_file
from headgate.consumers.filesystem.formats.shard_layout import SHARD, read_shard
from headgate.consumers.filesystem.storage.object_store import open_files
from headgate.consumers.filesystem.storage.source import HeadSource, LocalSource, Source, open_source
from headgate.consumers.filesystem.storage.store import FILE_SUFFIX

Column = npt.NDArray[Any]

COLUMNS: dict[str, str] = {
    "unit": "<i4",
    "group": "<i4",
    "tag": "<i4",
    "at": "<i8",
    "rows": "<i4",
    "prefill": "<i4",
    "first": "<i4",
    "step": "<i4",
    "num_prompt": "<i4",
    "sample": "<i4",
    "dropped": "<i4",
    "written": "<i8",
    "key": "<u8",
    "join": "<u8",
    "id_stop": "<i8",
    "message_stop": "<i8",
}
"""Columns with one number for each entry.

``at`` is where its data begin: a byte of the file (``request``), the row in its shard (``shards``), 0 (``raw``).
``first`` and ``step`` give its positions if they are evenly spaced; ``step`` is 0 if they are not. ``written`` is in
milliseconds since 1970. ``key`` hashes tag, request id and sample; ``join`` what the stages of one request share, 0
where one stage wrote it all. ``id_stop`` is the end of its request id in the text of all of them, ``message_stop`` that
of its messages among those of all.
"""


class StoredUnit(NamedTuple):
    """A file, or a folder that belongs together.

    Attributes:
        name: Its path below the root.
        layout: Its layout.
        size: Bytes of its files.
        stamp: ``mtime_ns`` of a file; of a folder a hash of names, sizes and times of its files.
    """

    name: str
    layout: LayoutName
    size: int
    stamp: int


class EntryGroup(msgspec.Struct, frozen=True):
    """All that many entries share.

    Attributes:
        layout: ``request``, ``shards`` or ``raw``.
        tensors: Names of the tensors in the order of the data: sites, and the two columns in files of ``request``.
        dtype: Of the rows.
        hidden_size: Their width.
        model: Its name.
        num_layers: Of the model.
        versions: Of headgate, vllm and torch.
        pp_rank: The stage that wrote it, of `pp_size`.
        shapes: Width and dtype of the sites whose rows have others.
        columns: What the rows are of the sites', where that is not all.
        readout: Whose outputs they are, a `StoredReadout` as JSON; empty if they are rows of the sites.
    """

    layout: LayoutName
    tensors: tuple[str, ...]
    dtype: str
    hidden_size: int
    model: str
    num_layers: int
    versions: tuple[tuple[str, str], ...]
    pp_rank: int
    pp_size: int
    shapes: tuple[tuple[str, tuple[int, str]], ...] = ()
    columns: tuple[tuple[str, Columns], ...] = ()
    readout: str = ""

    @property
    def sites(self) -> tuple[str, ...]:
        """The tensors that are sites."""
        return tuple(name for name in self.tensors if name not in (POSITIONS, TOKEN_IDS))

    def shape(self, site: str) -> SiteShape:
        """The shape of the rows of a site."""
        width, dtype = dict(self.shapes).get(site, (self.hidden_size, self.dtype))
        return SiteShape(width, dtype)

    def width(self, tensor: str) -> int:
        """Bytes for each row in `tensor`."""
        return ITEM_SIZES["int64"] if tensor in (POSITIONS, TOKEN_IDS) else self.shape(tensor).row_bytes

    def place(self, tensor: str) -> tuple[int, int]:
        """``(a, b)``, so that the rows of `tensor` begin at byte ``a * at + b * rows`` of their file."""
        if self.layout == "request":
            before = self.tensors[: self.tensors.index(tensor)]
            return 1, sum(self.width(name) for name in before)
        return (self.width(tensor), 0) if self.layout == "shards" else (0, 0)


@dataclass
class EntryTable:
    """Entries as columns.

    Attributes:
        columns: Those of `COLUMNS`, each ``[entries]``.
        ids: uint8, the request ids one after the other in UTF-8.
        units: By number.
        groups: By number.
        tags: By number.
        messages: int32 ``[messages, 3]``: role, first position and end of each message of the first entry, then of the
            next. An entry without any does not say where its messages are, or is no chat.
        roles: By number.
    """

    columns: dict[str, Column]
    ids: npt.NDArray[np.uint8]
    units: list[StoredUnit]
    groups: list[EntryGroup]
    tags: list[str]
    messages: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 3), dtype=np.int32))
    roles: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.columns["unit"])

    def request_id(self, entry: int) -> str:
        """The id that the client gave, or the request's own."""
        stop = self.columns["id_stop"]
        start = int(stop[entry - 1]) if entry else 0
        text: bytes = self.ids[start : int(stop[entry])].tobytes()
        return text.decode("utf-8", "surrogatepass")

    def tag(self, entry: int) -> str:
        """The entry's tag."""
        return self.tags[int(self.columns["tag"][entry])]

    def messages_of(self, entries: npt.NDArray[np.int64]) -> tuple[Column, Column]:
        """The messages of each of `entries` as ``(first, end)``, int64 numbers in `messages`."""
        stops = self.columns["message_stop"]
        ends = stops[entries]
        return np.where(entries > 0, stops[entries - 1], 0) if len(entries) else ends, ends

    @classmethod
    def merged(cls, tables: Sequence[tuple[EntryTable, npt.NDArray[np.intp] | None]]) -> EntryTable:
        """Entries of several tables, one table after the other; of each those with the given numbers, or all."""
        if len(tables) == 1 and tables[0][1] is None:
            return tables[0][0]
        builder = TableBuilder()
        for table, chosen in tables:
            builder.add_table(table, chosen)
        return builder.build()


@dataclass
class TableBuilder:
    """Collects entries; `build` makes the table."""

    units: list[StoredUnit] = field(default_factory=list)
    _groups: dict[EntryGroup, int] = field(default_factory=dict)
    _tags: dict[str, int] = field(default_factory=dict)
    _chunks: list[dict[str, Column]] = field(default_factory=list)
    _ids: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    _id_bytes: int = 0
    _messages: list[npt.NDArray[np.int32]] = field(default_factory=list)
    _num_messages: int = 0
    _roles: dict[str, int] = field(default_factory=dict)

    def add_unit(self, unit: StoredUnit, parts: Sequence[tuple[StoredStage, tuple[int, int]]]) -> None:
        """Add the entries of one unit.

        Args:
            unit: Where they lie.
            parts: Each with the first position and the distance between positions, 0 if they are not evenly spaced.
        """
        number = len(self.units)
        self.units.append(unit)
        if not parts:
            return
        rows = [self._row(number, part, spacing) for part, spacing in parts]
        values = np.array(rows, dtype=np.int64).T
        hashes = np.array([_hashes(part.sidecar) for part, _ in parts], dtype=np.uint64).T
        texts = [part.sidecar.request_id.encode("utf-8", "surrogatepass") for part, _ in parts]
        lengths = np.cumsum([len(text) for text in texts]) + self._id_bytes
        self._id_bytes = int(lengths[-1])
        self._ids.append(np.frombuffer(b"".join(texts), dtype=np.uint8))
        columns = dict(zip(list(COLUMNS)[:12], values, strict=True))
        stops = self._add_messages([part.sidecar.messages or () for part, _ in parts])
        columns |= {"key": hashes[0], "join": hashes[1], "id_stop": lengths, "message_stop": stops}
        self._chunks.append({name: columns[name].astype(kind) for name, kind in COLUMNS.items()})

    def add_table(self, table: EntryTable, chosen: npt.NDArray[np.intp] | None) -> None:
        """Add entries of `table`, and all of its units."""
        columns = {name: values if chosen is None else values[chosen] for name, values in table.columns.items()}
        ids, stops = _ranges(table.ids, table.columns["id_stop"], chosen)
        messages, message_stops = _ranges(table.messages, table.columns["message_stop"], chosen)
        tags = np.array([self._tags.setdefault(tag, len(self._tags)) for tag in table.tags], dtype=np.int32)
        groups = np.array([self._groups.setdefault(group, len(self._groups)) for group in table.groups], dtype=np.int32)
        columns["unit"] = columns["unit"] + np.int32(len(self.units))
        columns["tag"] = tags[columns["tag"]] if len(tags) else columns["tag"]
        columns["group"] = groups[columns["group"]] if len(groups) else columns["group"]
        columns["id_stop"] = stops + self._id_bytes
        self._id_bytes += len(ids)
        columns["message_stop"] = message_stops + self._num_messages
        self._num_messages += len(messages)
        self._messages.append(self._with_roles(messages, table.roles))
        self.units.extend(table.units)
        self._ids.append(ids)
        self._chunks.append(columns)

    def build(self) -> EntryTable:
        """The table of all that was added, in that order."""
        columns = {
            name: np.concatenate([chunk[name] for chunk in self._chunks]) if self._chunks else np.empty(0, dtype=kind)
            for name, kind in COLUMNS.items()
        }
        ids = np.concatenate(self._ids) if self._ids else np.empty(0, dtype=np.uint8)
        messages = np.concatenate(self._messages) if self._messages else np.empty((0, 3), dtype=np.int32)
        return EntryTable(columns, ids, self.units, list(self._groups), list(self._tags), messages, list(self._roles))

    def _add_messages(self, of_parts: Sequence[Sequence[MessagePlace]]) -> Column:
        """Add the messages of some entries; return each one's ``message_stop``."""
        rows = [
            (self._roles.setdefault(message.role, len(self._roles)), message.start, message.stop)
            for messages in of_parts
            for message in messages
        ]
        self._messages.append(np.array(rows, dtype=np.int32).reshape(-1, 3))
        stops = np.cumsum([len(messages) for messages in of_parts]) + self._num_messages
        self._num_messages += len(rows)
        return stops

    def _with_roles(self, messages: npt.NDArray[np.int32], roles: Sequence[str]) -> npt.NDArray[np.int32]:
        """Messages of another table, with the numbers that their roles have here."""
        numbers = np.array([self._roles.setdefault(role, len(self._roles)) for role in roles], dtype=np.int32)
        if not len(messages):
            return messages
        return np.concatenate([numbers[messages[:, :1]], messages[:, 1:]], axis=1)

    def _row(self, unit: int, part: StoredStage, spacing: tuple[int, int]) -> tuple[int, ...]:
        sidecar = part.sidecar
        tensors, at = _order(part)
        group = _group(part, tensors)
        return (
            unit,
            self._groups.setdefault(group, len(self._groups)),
            self._tags.setdefault(sidecar.tag, len(self._tags)),
            at,
            sidecar.num_rows,
            sidecar.phases["prefill"][1],
            *spacing,
            sidecar.num_prompt_tokens,
            sidecar.sample_index,
            sidecar.dropped_rows,
            _milliseconds(sidecar, part.paths[0]),
        )


def identity_hash(*words: object) -> int:
    """64 bits of a hash of words, never 0."""
    text = "\0".join(str(word) for word in words).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") or 1


def _hashes(sidecar: Sidecar) -> tuple[int, int]:
    key = identity_hash(sidecar.tag, sidecar.request_id, sidecar.sample_index)
    if sidecar.pp_size == 1:
        return key, 0
    return key, identity_hash(sidecar.tag, sidecar.name, sidecar.engine_request_id, sidecar.client_request_id)


def _group(part: StoredStage, tensors: tuple[str, ...]) -> EntryGroup:
    sidecar = part.sidecar
    return EntryGroup(
        layout=part.layout,
        tensors=tensors,
        dtype=sidecar.dtype,
        hidden_size=sidecar.hidden_size,
        model=sidecar.model,
        num_layers=sidecar.num_layers,
        versions=tuple(sorted(sidecar.versions.items())),
        pp_rank=sidecar.pp_rank,
        pp_size=sidecar.pp_size,
        shapes=tuple(sorted(sidecar.shapes.items())),
        columns=tuple(sorted(sidecar.columns.items())),
        readout="" if sidecar.readout is None else msgspec.json.encode(sidecar.readout).decode(),
    )


def _order(part: StoredStage) -> tuple[tuple[str, ...], int]:
    """Tensors in the order of the data, and the entry's ``at``."""
    if part.layout == "raw":
        return tuple(part.tensors), 0
    if part.layout == "shards" and isinstance(part.positions, TensorRef):
        return tuple(part.tensors), part.positions.offset // ITEM_SIZES["int64"]
    refs: Mapping[str, Any] = {POSITIONS: part.positions, TOKEN_IDS: part.token_ids, **part.tensors}
    # A file without rows has all its tensors at one place; its own order is as good as any.
    ordered = sorted(refs, key=lambda name: refs[name].offset) if part.sidecar.num_rows else list(refs)
    end = start = refs[ordered[0]].offset
    for name in ordered:
        if refs[name].offset != end:
            raise CaptureFileError(f"{part.paths[0]}: damaged: {name} begins at byte {refs[name].offset}, not at {end}")
        end += refs[name].num_bytes
    return tuple(ordered), start


def _milliseconds(sidecar: Sidecar, path: str) -> int:
    try:
        return int(np.datetime64(sidecar.written_at.partition("+")[0].removesuffix("Z"), "ms").astype(np.int64))
    except ValueError as error:
        raise CaptureFileError(f"{path}: damaged metadata: written_at: {error}") from error


def _ranges(data: Column, stops: Column, chosen: npt.NDArray[np.intp] | None) -> tuple[Column, Column]:
    """The part of `data` that belongs to the entries `chosen`, or to all: entry after entry, and where each ends."""
    if chosen is None or not len(stops):
        return data, stops
    starts, ends = np.concatenate(([0], stops[:-1]))[chosen], stops[chosen]
    lengths = ends - starts
    total = int(lengths.sum())
    shifts = np.repeat(starts - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths) if total else 0
    return data[np.arange(total) + shifts], np.cumsum(lengths)


_REMOTE_THREADS = 16
"""Files of a remote root that are opened at a time."""


class Problem(NamedTuple):
    """A file that gives no rows.

    Attributes:
        kind: ``torn``: partial or damaged; ``newer``: a newer headgate wrote it; ``foreign``: of another program.
        path: The file, or the folder.
        message: The reason, with the path.
    """

    kind: Literal["torn", "newer", "foreign"]
    path: str
    message: str

    def error(self, more: str = "") -> CaptureFileError:
        """The problem as an exception, with `more` after its message."""
        kind = NewerFormatError if self.kind == "newer" else CaptureFileError
        return kind(f"{self.message}{more}")


class Listed(NamedTuple):
    """An entry of a folder: its name, whether it is a folder, and a file's bytes and time (`mtime_ns`, or a hash)."""

    name: str
    is_folder: bool
    size: int
    stamp: int


class Listing(NamedTuple):
    """The units of a root by name, and what other programs left there."""

    units: list[StoredUnit]
    problems: list[Problem]


def list_root(files: Any, root: str) -> Listing:
    """List a root without opening a file.

    Args:
        files: The same as fsspec has it; None for this machine.
        root: Its path.
    """
    units: list[StoredUnit] = []
    problems: list[Problem] = []
    entries = _local_entries(root) if files is None else _remote_entries(files, root)
    for tag in entries(""):
        if tag.name.startswith((".", "_")):
            continue
        if not tag.is_folder:
            problems.append(_foreign(f"{root}/{tag.name}"))
            continue
        for entry in entries(tag.name):
            path = f"{tag.name}/{entry.name}"
            if entry.name == SHARD_FOLDER and entry.is_folder:
                shards = (f"{path}/{shard.name}" for shard in entries(path))
                units += [_folder(shard, "shards", entries(shard)) for shard in shards]
            elif entry.is_folder and not entry.name.startswith("."):
                units.append(_folder(path, "raw", entries(path)))
            elif entry.name.endswith(FILE_SUFFIX) and not entry.name.startswith("."):
                units.append(StoredUnit(path, "request", entry.size, entry.stamp))
            elif not entry.name.startswith("."):
                problems.append(_foreign(f"{root}/{path}"))
    return Listing(sorted(units), problems)


def read_units(source: Source, root: str, units: Sequence[StoredUnit], builder: TableBuilder) -> list[Problem]:
    """Open units and add their requests to `builder`; return the ones that give none, with the reason.

    A unit with a problem is added without requests, so that an index knows it.
    """
    problems: list[Problem] = []
    for unit, found in zip(units, _opened(source, root, units), strict=True):
        if isinstance(found, Problem):
            problems.append(found)
            found = []
        try:
            builder.add_unit(unit, found)
        except CaptureFileError as error:
            problems.append(_problem(f"{root}/{unit.name}", error))
            builder.add_unit(unit, [])
    return problems


Parts = list[tuple[StoredStage, tuple[int, int]]]


def _opened(source: Source, root: str, units: Sequence[StoredUnit]) -> Iterable[Parts | Problem]:
    def opened(unit: StoredUnit) -> Parts | Problem:
        path = f"{root}/{unit.name}"
        try:
            parts = list(_parts(source, path, unit))
        except CaptureFileError as error:
            return _problem(path, error)
        return parts if parts or _is_ours(source, path, unit) else _foreign(path)

    if isinstance(source, LocalSource):
        return map(opened, units)
    with ThreadPoolExecutor(_REMOTE_THREADS) as threads:
        return list(threads.map(opened, units))


def _parts(source: Source, path: str, unit: StoredUnit) -> Iterator[tuple[StoredStage, tuple[int, int]]]:
    if unit.layout == "shards":
        positions: np.ndarray[Any, Any] | None = None
        parts = list(read_shard(source, path))
        for part in parts:
            ref = part.positions
            if isinstance(ref, np.ndarray):
                raise CaptureFileError(f"{path}: damaged: a shard's positions lie in a file of their own")
            if positions is None:
                size = max(other.offset + other.num_bytes for other in _refs(parts))
                positions = source.array(ref.path, 0, size).view(np.int64)
            start = ref.offset // 8
            yield part, spacing(positions[start : start + part.sidecar.num_rows])
        return
    if unit.layout == "request" and not isinstance(source, LocalSource):
        source = HeadSource(source, path, unit.size)
    found = read_request_file(source, path) if unit.layout == "request" else read_raw_folder(source, path)
    if found is not None:
        ref = found.positions
        if not isinstance(ref, np.ndarray):
            ref = np.frombuffer(source.read(ref.path, ref.offset, ref.num_bytes), dtype="<i8")
        yield found, spacing(ref)


def _refs(parts: Sequence[StoredStage]) -> Iterator[Any]:
    return (part.positions for part in parts)


def spacing(positions: np.ndarray[Any, Any]) -> tuple[int, int]:
    """First position and the distance between them; the distance is 0 if there are several."""
    if len(positions) < 2:
        return (int(positions[0]) if len(positions) else 0), 1
    first, step = int(positions[0]), int(positions[1] - positions[0])
    is_even = step > 0 and int(positions[-1]) == first + step * (len(positions) - 1)
    is_even = is_even and bool((positions == np.arange(first, first + step * len(positions), step)).all())
    return first, step if is_even else 0


def _is_ours(source: Source, path: str, unit: StoredUnit) -> bool:
    """Whether a unit without requests is headgate's all the same: a shard that has none yet."""
    if unit.layout != "shards":
        return False
    document = source.read(f"{path}/{SHARD}", 0, source.size(f"{path}/{SHARD}"))
    return b'"headgate-capture"' in document


def _local_entries(root: str) -> Callable[[str], list[Listed]]:
    """Entries of a folder below a root by name; empty if there is none."""

    def entries_of(folder: str) -> list[Listed]:
        try:
            entries = list(os.scandir(f"{root}/{folder}"))
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = []
        for entry in entries:
            if entry.is_symlink():
                continue  # as in `Source.names`
            with suppress(FileNotFoundError):  # gone since
                status = entry.stat()
                found.append(Listed(entry.name, entry.is_dir(), status.st_size, status.st_mtime_ns))
        return sorted(found)

    return entries_of


def _remote_entries(files: Any, root: str) -> Callable[[str], list[Listed]]:
    """Find the units of a store, which lists all keys at once, a thousand in a request, and folders one by one."""
    files.invalidate_cache()
    tree: dict[str, dict[str, Listed]] = {}
    for path, entry in files.find(root, detail=True).items():
        folder, _, name = str(path).removeprefix(root).strip("/").rpartition("/")
        tree.setdefault(folder, {})[name] = Listed(name, False, int(entry.get("size") or 0), _remote_stamp(entry))
        while folder:
            folder, _, name = folder.rpartition("/")
            tree.setdefault(folder, {}).setdefault(name, Listed(name, True, 0, 0))
    return lambda folder: sorted(tree.get(folder, {}).values())


def _remote_stamp(entry: dict[str, Any]) -> int:
    """A hash of what a store says of a file's version: its tag if it has one, else its times; 0 if neither."""
    known = [entry.get(key) for key in ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "created")]
    words = [word.isoformat() if isinstance(word, datetime) else word for word in known if word is not None]
    return identity_hash(*words) >> 1 if words else 0


def _folder(name: str, layout: Literal["shards", "raw"], files: Sequence[Listed]) -> StoredUnit:
    stamp = identity_hash(*(f"{entry.name}\0{entry.size}\0{entry.stamp}" for entry in files)) >> 1
    return StoredUnit(name, layout, sum(entry.size for entry in files), stamp)


def _foreign(path: str) -> Problem:
    return Problem("foreign", path, f"{path}: not written by headgate's filesystem consumer")


def _problem(path: str, error: CaptureFileError) -> Problem:
    return Problem("newer" if isinstance(error, NewerFormatError) else "torn", path, str(error))


logger = logging.getLogger(__name__)

MAGIC = b"headgate-index\0\0"
VERSION = 5
"""Version of an index of outputs of readouts. One of some columns of rows is written as `SOME_COLUMNS`, one of rows of
several shapes as `SEVERAL_SHAPES`, others as `ONE_SHAPE`, which earlier releases read."""
SOME_COLUMNS = 4
SEVERAL_SHAPES = 3
ONE_SHAPE = 2
_FIXED = struct.Struct("<16sIIQQI4x")  # magic, version, CRC of the header, its bytes, bytes of the columns, their CRC
_ALIGN = 64
_CHUNK = 16 << 20


class _IndexHeader(msgspec.Struct):
    """All of an index but its columns; units are columns too, their names one text with a NUL after each."""

    root: str
    num_entries: int
    num_units: int
    groups: list[EntryGroup]
    tags: list[str]
    roles: list[str]
    problems: list[tuple[str, str, str]]
    places: dict[str, tuple[int, int, str]]
    """Name of an array -> its first byte, its bytes and its dtype."""


class ForeignIndexError(CaptureFileError):
    """A file lies where the index should be, and is none."""


def write_index(root: str, table: EntryTable, problems: list[Problem]) -> Iterator[bytes]:
    """The bytes of an index of `table`."""
    arrays: dict[str, npt.NDArray[Any]] = {name: table.columns[name] for name in COLUMNS}
    arrays["ids"] = table.ids
    arrays["messages"] = table.messages.reshape(-1).astype("<i4")
    arrays["unit_names"] = np.frombuffer("\0".join(unit.name for unit in table.units).encode(), dtype=np.uint8)
    arrays["unit_layouts"] = np.frombuffer("".join(unit.layout[1] for unit in table.units).encode(), dtype=np.uint8)
    arrays["unit_sizes"] = np.array([unit.size for unit in table.units], dtype="<i8")
    arrays["unit_stamps"] = np.array([unit.stamp for unit in table.units], dtype="<i8")
    places, end = {}, 0
    for name, array in arrays.items():
        places[name] = (end, array.nbytes, array.dtype.str)
        end += array.nbytes + -array.nbytes % _ALIGN
    header = msgspec.json.encode(
        _IndexHeader(
            root=root,
            num_entries=len(table),
            num_units=len(table.units),
            groups=table.groups,
            tags=table.tags,
            roles=table.roles,
            problems=[(problem.kind, problem.path, problem.message) for problem in problems],
            places=places,
        )
    )
    header += b" " * (-(_FIXED.size + len(header)) % _ALIGN)
    check = 0
    for block in _blocks(arrays):
        check = zlib.crc32(block, check)
    version = SEVERAL_SHAPES if any(group.shapes for group in table.groups) else ONE_SHAPE
    version = SOME_COLUMNS if any(group.columns for group in table.groups) else version
    version = VERSION if any(group.readout for group in table.groups) else version
    yield _FIXED.pack(MAGIC, version, zlib.crc32(header), len(header), end, check)
    yield header
    yield from _blocks(arrays)


def _blocks(arrays: dict[str, npt.NDArray[Any]]) -> Iterator[bytes]:
    for array in arrays.values():
        data = np.ascontiguousarray(array).view(np.uint8).data if array.nbytes else memoryview(b"")
        for start in range(0, len(data), _CHUNK):
            yield bytes(data[start : start + _CHUNK])
        yield b"\0" * (-array.nbytes % _ALIGN)


def read_index(data: npt.NDArray[np.uint8], path: str) -> tuple[EntryTable, list[Problem], str]:
    """Read an index out of its bytes; its root comes with it.

    Raises:
        ForeignIndexError: If it is something else.
        NewerFormatError: If a newer headgate wrote it.
        CaptureFileError: If it is partial or damaged.
    """
    if len(data) < _FIXED.size or data[: len(MAGIC)].tobytes() != MAGIC:
        is_torn = len(data) < _FIXED.size and MAGIC.startswith(data[: len(MAGIC)].tobytes())
        kind, what = (CaptureFileError, "partial") if is_torn else (ForeignIndexError, "no index of headgate")
        raise kind(f"{path}: {what}")
    _, version, header_check, header_bytes, column_bytes, check = _FIXED.unpack(data[: _FIXED.size].tobytes())
    if version > VERSION:
        raise NewerFormatError(f"{path}: index of version {version}; this headgate reads version {VERSION}")
    if version < ONE_SHAPE:
        raise CaptureFileError(f"{path}: index of version {version}, which lacks columns of version {ONE_SHAPE}")
    start = _FIXED.size + header_bytes
    if len(data) != start + column_bytes:
        raise CaptureFileError(f"{path}: partial: {len(data)} bytes of {start + column_bytes}")
    text = data[_FIXED.size : start].tobytes()
    if zlib.crc32(text) != header_check or _checksum(data[start:]) != check:
        raise CaptureFileError(f"{path}: damaged: its check does not agree")
    with refusing(path, CaptureFileError, "damaged"):
        header = msgspec.json.decode(text, type=_IndexHeader)
        arrays = {
            name: data[start + at : start + at + size].view(dtype) for name, (at, size, dtype) in header.places.items()
        }
        table = EntryTable(
            columns={name: arrays[name] for name in COLUMNS},
            ids=arrays["ids"],
            units=_units(arrays, header),
            groups=header.groups,
            tags=header.tags,
            messages=arrays["messages"].reshape(-1, 3),
            roles=header.roles,
        )
        return table, [Problem(*fields) for fields in header.problems], header.root  # type: ignore[arg-type]


def _checksum(data: npt.NDArray[np.uint8]) -> int:
    check = 0
    for start in range(0, len(data), _CHUNK):
        check = zlib.crc32(data[start : start + _CHUNK].data, check)
    return check


def _units(arrays: dict[str, npt.NDArray[Any]], header: _IndexHeader) -> list[StoredUnit]:
    if not header.num_units:
        return []
    names = arrays["unit_names"].tobytes().decode().split("\0")
    kinds = [_LAYOUTS[letter] for letter in arrays["unit_layouts"].tobytes()]
    sizes, stamps = arrays["unit_sizes"].tolist(), arrays["unit_stamps"].tolist()
    return [StoredUnit(*fields) for fields in zip(names, kinds, sizes, stamps, strict=True)]


_LAYOUTS: dict[int, Any] = {ord(name[1]): name for name in ("request", "shards", "raw")}


def digest_of(table: EntryTable) -> str:
    """SHA-256 of an index's content, whichever root it is of."""
    groups = [msgspec.to_builtins(group) for group in table.groups]
    for group in groups:
        if not group["readout"]:
            del group["readout"]  # digests of roots without any stay as they were
    digest = sha256(json.dumps([table.tags, table.roles, groups]).encode())
    for name in COLUMNS:
        digest.update(np.ascontiguousarray(table.columns[name]).view(np.uint8).data)
    digest.update(np.ascontiguousarray(table.ids).data)
    digest.update(np.ascontiguousarray(table.messages).view(np.uint8).data)
    digest.update("\0".join(f"{unit.name}\0{unit.size}" for unit in table.units).encode())
    return digest.hexdigest()


def load_local(path: Path) -> npt.NDArray[np.uint8] | None:
    """The bytes of a file; None if it is not there."""
    try:
        return np.fromfile(path, np.uint8)
    except FileNotFoundError:
        return None


def store_local(path: Path, blocks: Iterator[bytes]) -> None:
    """Write a file so that it appears whole, in place of an older one.

    Raises:
        OSError: If it cannot be written.
    """
    temp = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with temp.open("xb") as file:
            for block in blocks:
                file.write(block)
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)


INDEX_SUFFIX = ".headgate-index"


@dataclass(frozen=True)
class IndexedRoot:
    """A root and its requests.

    Attributes:
        given: As the user named it.
        path: Its path in its file system.
        source: Its file system, for reading.
        files: The same as fsspec has it; None for this machine.
        table: Its requests.
        problems: Files that give no rows.
        num_opened: Units that had to be opened, as the index did not know them.
    """

    given: str
    path: str
    source: Source
    files: Any
    table: EntryTable
    problems: list[Problem]
    num_opened: int


def index_path(root: str) -> str:
    """Where the index of a root lies: beside it, or in it if nothing can lie beside it, as in a whole bucket."""
    parent = root.rpartition("/")[0]
    return f"{root}{INDEX_SUFFIX}" if parent else f"{root}/{INDEX_SUFFIX}"


def open_root(root: str | os.PathLike[str], *, caches: bool) -> IndexedRoot:
    """Open a root; with `caches`, read its index and write it anew if it was not up to date.

    Raises:
        CaptureFileError: If there is no such folder.
    """
    given = os.fspath(root)
    source, path = open_source(given)
    if not source.is_folder(path):
        raise CaptureFileError(f"{given}: no such folder")
    files = None if isinstance(source, LocalSource) else open_files(given, CaptureFileError)[0]
    listing = list_root(files, path)
    known, may_write = _cached(files, path) if caches else (None, False)
    if known is not None and known[0].units == listing.units:
        return IndexedRoot(given, path, source, files, known[0], [*listing.problems, *known[1]], 0)
    table, problems, num_opened = _updated(source, path, listing.units, known)
    if may_write:
        _store(files, path, table, problems)
    return IndexedRoot(given, path, source, files, table, [*listing.problems, *problems], num_opened)


Known = tuple[EntryTable, list[Problem]]


def _updated(
    source: Source, root: str, units: list[StoredUnit], known: Known | None
) -> tuple[EntryTable, list[Problem], int]:
    """A table of `units`: known ones from the index, the others from their files."""
    builder = TableBuilder()
    problems: list[Problem] = []
    old = set(known[0].units) if known else set()
    if known is not None and old:
        table, noted = known
        kept = {unit.name for unit in units if unit in old}
        chosen = np.array([unit.name in kept for unit in table.units], dtype=np.bool_)
        numbers = np.cumsum(chosen) - 1
        part = replace(table, columns=dict(table.columns), units=[u for u in table.units if u.name in kept])
        entries = np.flatnonzero(chosen[table.columns["unit"]])
        part.columns["unit"] = numbers[table.columns["unit"]].astype(np.int32)
        builder.add_table(part, entries)
        problems += [problem for problem in noted if problem.path.removeprefix(f"{root}/") in kept]
    new = [unit for unit in units if unit not in old]
    problems += read_units(source, root, new, builder)
    return _in_order(builder.build(), units), problems, len(new)


def _in_order(table: EntryTable, units: list[StoredUnit]) -> EntryTable:
    """The table with its units in the order of `units`, so that one set of files has one index."""
    if table.units == units:
        return table
    rank = {unit: number for number, unit in enumerate(units)}
    numbers = np.array([rank[unit] for unit in table.units], dtype=np.int32)
    columns = dict(table.columns)
    columns["unit"] = numbers[columns["unit"]]
    order = np.argsort(columns["unit"], kind="stable")
    builder = TableBuilder()
    builder.add_table(replace(table, columns=columns, units=units), order)
    return builder.build()


def _cached(files: Any, root: str) -> tuple[Known | None, bool]:
    """The index of a root, if there is a whole one, and whether it may be written anew."""
    path = index_path(root)
    if files is None:
        data = load_local(Path(path))
    else:
        data = np.frombuffer(files.cat_file(path), dtype=np.uint8) if files.exists(path) else None
    if data is None:
        return None, True
    try:
        table, problems, of_root = read_index(data, path)
    except (ForeignIndexError, NewerFormatError) as error:
        logger.warning("%s; it is left as it is, and the root is read without an index", error)
        return None, False
    except CaptureFileError as error:
        logger.warning("%s; the index is made anew", error)
        return None, True
    # Names are relative, so an index moves along with its root; problems name whole paths.
    moved = [
        problem._replace(path=problem.path.replace(of_root, root, 1), message=problem.message.replace(of_root, root))
        for problem in problems
    ]
    return (table, moved), True


def _store(files: Any, root: str, table: EntryTable, problems: list[Problem]) -> None:
    path = index_path(root)
    blocks = write_index(root, table, problems)
    try:
        if files is None:
            store_local(Path(path), blocks)
        else:
            files.pipe_file(path, b"".join(blocks))
    except OSError as error:
        logger.warning("%s: the index could not be kept, the next time opens every file again: %s", path, error)
