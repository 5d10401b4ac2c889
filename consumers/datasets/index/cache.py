"""The index of a root as one file.

``magic, length of the header, CRC-32 of header and of the columns, header (JSON), columns``. It lies beside the root,
appears whole, and is valid for the files whose names, sizes and times it lists; the others are looked into anew.
"""

from __future__ import annotations

import json
import logging
import secrets
import struct
import zlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.files.reading import refusing
from headgate.capture.schema.errors import CaptureFileError, NewerFormatError
from headgate.consumers.datasets.index.scan import Problem
from headgate.consumers.datasets.index.table import COLUMNS, Group, Table, Unit

logger = logging.getLogger(__name__)

MAGIC = b"headgate-index\0\0"
VERSION = 2
_FIXED = struct.Struct("<16sIIQQI4x")  # magic, version, CRC of the header, its bytes, bytes of the columns, their CRC
_ALIGN = 64
_CHUNK = 16 << 20


class _Header(msgspec.Struct):
    """All of an index but its columns; units are columns too, their names one text with a NUL after each."""

    root: str
    num_entries: int
    num_units: int
    groups: list[Group]
    tags: list[str]
    roles: list[str]
    problems: list[tuple[str, str, str]]
    places: dict[str, tuple[int, int, str]]
    """Name of an array -> its first byte, its bytes and its dtype."""


class ForeignIndexError(CaptureFileError):
    """A file lies where the index should be, and is none."""


def write_index(root: str, table: Table, problems: list[Problem]) -> Iterator[bytes]:
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
        _Header(
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
    yield _FIXED.pack(MAGIC, VERSION, zlib.crc32(header), len(header), end, check)
    yield header
    yield from _blocks(arrays)


def _blocks(arrays: dict[str, npt.NDArray[Any]]) -> Iterator[bytes]:
    for array in arrays.values():
        data = np.ascontiguousarray(array).view(np.uint8).data if array.nbytes else memoryview(b"")
        for start in range(0, len(data), _CHUNK):
            yield bytes(data[start : start + _CHUNK])
        yield b"\0" * (-array.nbytes % _ALIGN)


def read_index(data: npt.NDArray[np.uint8], path: str) -> tuple[Table, list[Problem], str]:
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
    if version < VERSION:
        raise CaptureFileError(f"{path}: index of version {version}, which lacks columns of version {VERSION}")
    start = _FIXED.size + header_bytes
    if len(data) != start + column_bytes:
        raise CaptureFileError(f"{path}: partial: {len(data)} bytes of {start + column_bytes}")
    text = data[_FIXED.size : start].tobytes()
    if zlib.crc32(text) != header_check or _checksum(data[start:]) != check:
        raise CaptureFileError(f"{path}: damaged: its check does not agree")
    with refusing(path, CaptureFileError, "damaged"):
        header = msgspec.json.decode(text, type=_Header)
        arrays = {
            name: data[start + at : start + at + size].view(dtype) for name, (at, size, dtype) in header.places.items()
        }
        table = Table(
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


def _units(arrays: dict[str, npt.NDArray[Any]], header: _Header) -> list[Unit]:
    if not header.num_units:
        return []
    names = arrays["unit_names"].tobytes().decode().split("\0")
    kinds = [_LAYOUTS[letter] for letter in arrays["unit_layouts"].tobytes()]
    sizes, stamps = arrays["unit_sizes"].tolist(), arrays["unit_stamps"].tolist()
    return [Unit(*fields) for fields in zip(names, kinds, sizes, stamps, strict=True)]


_LAYOUTS: dict[int, Any] = {ord(name[1]): name for name in ("request", "shards", "raw")}


def digest_of(table: Table) -> str:
    """SHA-256 of an index's content, whichever root it is of."""
    groups = [msgspec.to_builtins(group) for group in table.groups]
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
