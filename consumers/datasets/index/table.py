"""Requests of captured files as columns of numbers: ten million of them open by mapping a file.

One *entry* is one request as it lies in the files of one pipeline stage; one *unit* is a file of the layout
``request``, or a folder of ``raw`` or ``shards``; one *group* is all that many entries share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import CaptureFileError
from headgate.consumers.filesystem.formats.layout import (
    ITEM_SIZES,
    POSITIONS,
    TOKEN_IDS,
    LayoutName,
    MessagePlace,
    Sidecar,
    StoredPart,
    TensorRef,
)

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

    @property
    def sites(self) -> tuple[str, ...]:
        """The tensors that are sites."""
        return tuple(name for name in self.tensors if name not in (POSITIONS, TOKEN_IDS))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one site."""
        return self.hidden_size * ITEM_SIZES[self.dtype]

    def width(self, tensor: str) -> int:
        """Bytes for each row in `tensor`."""
        return ITEM_SIZES["int64"] if tensor in (POSITIONS, TOKEN_IDS) else self.row_bytes

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

    def add_unit(self, unit: StoredUnit, parts: Sequence[tuple[StoredPart, tuple[int, int]]]) -> None:
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

    def _row(self, unit: int, part: StoredPart, spacing: tuple[int, int]) -> tuple[int, ...]:
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


def _group(part: StoredPart, tensors: tuple[str, ...]) -> EntryGroup:
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
    )


def _order(part: StoredPart) -> tuple[tuple[str, ...], int]:
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
