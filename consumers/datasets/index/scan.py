"""Files in a root by name, size and time, and the requests in those that are new."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal, NamedTuple

import numpy as np

from headgate.capture.schema.errors import CaptureFileError, NewerFormatError
from headgate.consumers.datasets.index.table import TableBuilder, Unit, identity_hash
from headgate.consumers.filesystem.formats.layout import SHARD_FOLDER, StoredPart
from headgate.consumers.filesystem.formats.raw_layout import read_raw_folder
from headgate.consumers.filesystem.formats.request_layout import read_request_file
from headgate.consumers.filesystem.formats.shard_layout import SHARD, read_shard
from headgate.consumers.filesystem.storage.source import HeadSource, LocalSource, Source
from headgate.consumers.filesystem.storage.store import FILE_SUFFIX

_REMOTE_THREADS = 16
"""Files of a remote root that are opened at a time."""


class Problem(NamedTuple):
    """A file that gives no rows.

    Attributes:
        kind: ``torn``: partial or damaged; ``newer``: a newer headgate wrote it; ``foreign``: of somebody else.
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
    """The units of a root by name, and what is somebody else's."""

    units: list[Unit]
    problems: list[Problem]


def list_root(files: Any, root: str) -> Listing:
    """List a root without opening a file.

    Args:
        files: The same as fsspec has it; None for this machine.
        root: Its path.
    """
    units: list[Unit] = []
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
                units.append(Unit(path, "request", entry.size, entry.stamp))
            elif not entry.name.startswith("."):
                problems.append(_foreign(f"{root}/{path}"))
    return Listing(sorted(units), problems)


def read_units(source: Source, root: str, units: Sequence[Unit], builder: TableBuilder) -> list[Problem]:
    """Open units and add their requests to `builder`; return those that give none, with the reason.

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


Parts = list[tuple[StoredPart, tuple[int, int]]]


def _opened(source: Source, root: str, units: Sequence[Unit]) -> Iterable[Parts | Problem]:
    def opened(unit: Unit) -> Parts | Problem:
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


def _parts(source: Source, path: str, unit: Unit) -> Iterator[tuple[StoredPart, tuple[int, int]]]:
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


def _refs(parts: Sequence[StoredPart]) -> Iterator[Any]:
    return (part.positions for part in parts)


def spacing(positions: np.ndarray[Any, Any]) -> tuple[int, int]:
    """First position and the distance between them; the distance is 0 if there are several."""
    if len(positions) < 2:
        return (int(positions[0]) if len(positions) else 0), 1
    first, step = int(positions[0]), int(positions[1] - positions[0])
    is_even = step > 0 and int(positions[-1]) == first + step * (len(positions) - 1)
    is_even = is_even and bool((positions == np.arange(first, first + step * len(positions), step)).all())
    return first, step if is_even else 0


def _is_ours(source: Source, path: str, unit: Unit) -> bool:
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
            with suppress(FileNotFoundError):  # gone since
                status = entry.stat()
                found.append(Listed(entry.name, entry.is_dir(), status.st_size, status.st_mtime_ns))
        return sorted(found)

    return entries_of


def _remote_entries(files: Any, root: str) -> Callable[[str], list[Listed]]:
    """The same in a store, which lists all keys at once, a thousand in a request, and folders one by one."""
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


def _folder(name: str, layout: Literal["shards", "raw"], files: Sequence[Listed]) -> Unit:
    stamp = identity_hash(*(f"{entry.name}\0{entry.size}\0{entry.stamp}" for entry in files)) >> 1
    return Unit(name, layout, sum(entry.size for entry in files), stamp)


def _foreign(path: str) -> Problem:
    return Problem("foreign", path, f"{path}: not written by headgate's filesystem consumer")


def _problem(path: str, error: CaptureFileError) -> Problem:
    return Problem("newer" if isinstance(error, NewerFormatError) else "torn", path, str(error))
