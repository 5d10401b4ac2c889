"""Layout ``shards``: many small requests, one after the other in few files that only grow.

``{root}/{tag}/_shards/{shard}/`` holds, for requests that wanted the same sites,

* ``shard.json``: the fields of `Sidecar` that its requests share, above all ``sites``, ``dtype`` and ``hidden_size``;
* ``{layer}_{hook}.bin``: one flat array ``[all rows, width]`` per site, in the site's dtype;
* ``positions.bin`` and ``token_ids.bin``: int64 ``[all rows]``;
* ``index.jsonl``: one line per request: ``rows``, its range ``[start, stop]`` in those arrays, and the other fields of
  `Sidecar`; ``check`` is the CRC-32 of the rest of the line.

A line is appended once the rows it speaks of are on the disk, so the index shows what is whole: whatever a killed
process wrote after that is not there. No shard is ever appended to by a second process.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from headgate.capture.files.reading import refusing
from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import ITEM_SIZES, Site
from headgate.consumers.filesystem.formats.layout import (
    FORMAT,
    POSITIONS,
    SHARD_FOLDER,
    TOKEN_IDS,
    Finished,
    Sidecar,
    StoredStage,
    TensorRef,
    payload_of,
    read_sidecar,
)
from headgate.consumers.filesystem.storage.local_store import LocalStore, bytes_of, sync_folder, write_all, write_file
from headgate.consumers.filesystem.storage.source import LocalSource, Source
from headgate.consumers.filesystem.storage.store import Published, Target, site_file

logger = logging.getLogger(__name__)

INDEX = "index.jsonl"
SHARD = "shard.json"
COLUMN_SUFFIX = ".bin"

SHARED_FIELDS = frozenset(
    {
        "format",
        "format_version",
        "tag",
        "model",
        "num_layers",
        "hidden_size",
        "dtype",
        "shapes",
        "columns",
        "readout",
        "versions",
        "sites",
        "pp_rank",
        "pp_size",
    }
)
"""Fields of `Sidecar` that all requests of a shard share."""

_CHECK_START = b'{"check":"'
_CHECK_END = b'",'
_CHECK_BYTES = len(_CHECK_START) + 8 + len(_CHECK_END)

_MAX_SHARDS = 256
"""Shards that can still grow, per writer thread; beyond that the one used longest ago is left as it is."""


class ShardLayout:
    """Appends requests to shards of their tag and sites; see `Layout`.

    Args:
        store: A local root.
        shard_bytes: Size at which a shard is full; one request is never cut, so a shard can be larger.
        max_age_s: Time after which a shard is left as it is when the next request comes; None for no limit.
        left: Called with the folder of each shard that will not change any more.
    """

    def __init__(
        self,
        store: LocalStore,
        *,
        shard_bytes: int,
        max_age_s: float | None = None,
        left: Callable[[Path], None] | None = None,
    ) -> None:
        self._store = store
        self._shard_bytes = shard_bytes
        self._max_age_s = max_age_s
        self._left = left
        self._growing: OrderedDict[tuple[object, ...], Shard] = OrderedDict()

    def check_free(self, target: Target) -> None:
        """Every request has room: equal names are entries of their own."""

    def store(self, finished: Finished) -> tuple[dict[str, Any], Published]:
        sidecar = finished.sidecar
        key = (sidecar.tag, *sidecar.sites, *sorted(sidecar.columns.items()), msgspec.json.encode(sidecar.readout))
        for known in [known for known, shard in self._growing.items() if self._is_full(shard)]:
            self._growing.pop(known).leave()
        shard = self._growing.get(key)
        if shard is None:
            shard = self._growing[key] = Shard(self._store, finished.sidecar, self._left)
        self._growing.move_to_end(key)
        if len(self._growing) > _MAX_SHARDS:
            self._growing.popitem(last=False)[1].leave()
        return shard.add(finished)

    def close(self) -> None:
        """Leave all shards as they are; the next request would begin a new one."""
        while self._growing:
            self._growing.popitem()[1].leave()

    def _is_full(self, shard: Shard) -> bool:
        is_old = self._max_age_s is not None and time.monotonic() - shard.begun >= self._max_age_s
        return is_old or shard.num_bytes >= self._shard_bytes or shard.is_damaged


class Shard:
    """One shard while it grows. Used by one thread.

    Attributes:
        num_bytes: Bytes of rows, including rows that `sync` has yet to write.
        is_damaged: After a failure that left the index in doubt; such a shard is not appended to again.
        begun: When, on the monotonic clock.

    Raises:
        OSError: If its folder cannot be made.
    """

    def __init__(self, store: LocalStore, sidecar: Sidecar, left: Callable[[Path], None] | None = None) -> None:
        name = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{secrets.token_hex(6)}"
        folder = (sidecar.tag, SHARD_FOLDER)
        sites = [site_file(Site.parse(site)) for site in sidecar.sites]
        columns = [f"{column}{COLUMN_SUFFIX}" for column in (*sites, POSITIONS, TOKEN_IDS)]
        shared = {key: value for key, value in sidecar.document().items() if key in SHARED_FIELDS}
        files: dict[str, Iterable[memoryview]] = dict.fromkeys((*columns, INDEX), ())
        store.publish_folder(
            Target(folder, name), files | {SHARD: [memoryview(msgspec.json.encode(shared))]}
        ).pending_sync.sync()
        self.num_bytes = 0
        self.is_damaged = False
        self.begun = time.monotonic()
        self._left = left
        self._is_left = False
        self._store = store
        self._folder = (*folder, name)
        self._path = str(store.root.joinpath(*self._folder))
        self._sites = sidecar.sites
        self._row_bytes = {site: sidecar.shape(site).row_bytes for site in self._sites}
        self._position_bytes = sum(self._row_bytes.values()) + 2 * ITEM_SIZES["int64"]
        self._num_rows = 0  # on the disk
        self._index_bytes = 0  # on the disk
        self._pending: list[Finished] = []
        self._pending_rows = 0

    def add(self, finished: Finished) -> tuple[dict[str, Any], Published]:
        """Add a request; `sync` writes it."""
        start = self._num_rows + self._pending_rows
        num_rows = finished.num_rows
        self._pending.append(finished)
        self._pending_rows += num_rows
        num_bytes = num_rows * self._position_bytes
        self.num_bytes += num_bytes
        published = Published((self._path,), num_bytes, self)
        payload = payload_of("shards", finished, published, durable=self._store.fsync)
        return payload | {"rows": [start, start + num_rows]}, published

    def leave(self) -> None:
        """Add nothing any more. Once the rest is written, the shard's folder is passed to `left`."""
        self._is_left = True
        self._report_if_left()

    def sync(self) -> None:
        """Write what was added since the last call: rows, then the index.

        Raises:
            OSError: If the disk takes no more: none of it is in the shard then.
        """
        if not self._pending:
            return
        lines = b"".join(self._lines())
        try:
            with self._store.folders.open(*self._folder, make=False) as folder:
                for name, buffers, width in self._columns():
                    self._write(folder.number, name, buffers, self._num_rows * width)
                self._write(folder.number, INDEX, [memoryview(lines)], self._index_bytes)
        except OSError:
            self._roll_back()
            raise
        else:
            self._num_rows += self._pending_rows
            self._index_bytes += len(lines)
        finally:
            self._pending.clear()
            self._pending_rows = 0
            self._report_if_left()

    def _report_if_left(self) -> None:
        if self._is_left and not self._pending and self._left is not None:
            self._left(Path(self._path))

    def _columns(self) -> Iterator[tuple[str, Iterable[memoryview], int]]:
        """Yield each file's name, the buffers to append to it, and its bytes per row."""
        for name in self._sites:
            site = Site.parse(name)
            buffers = (buffer for finished in self._pending for buffer in finished.pieces[site])
            yield f"{site_file(site)}{COLUMN_SUFFIX}", buffers, self._row_bytes[name]
        width = ITEM_SIZES["int64"]
        positions = [bytes_of(finished.positions) for finished in self._pending]
        yield f"{POSITIONS}{COLUMN_SUFFIX}", positions, width
        yield f"{TOKEN_IDS}{COLUMN_SUFFIX}", [bytes_of(finished.token_ids) for finished in self._pending], width

    def _lines(self) -> Iterator[bytes]:
        start = self._num_rows
        for finished in self._pending:
            stop = start + finished.num_rows
            yield index_line(finished.sidecar, start, stop)
            start = stop

    def _write(self, folder: int, name: str, buffers: Iterable[memoryview], offset: int) -> None:
        file = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            write_all(file, buffers, offset)
            if self._store.fsync:
                os.fsync(file)
        finally:
            os.close(file)

    def _roll_back(self) -> None:
        """Truncate the files to what the index lists: space becomes free, and no half line stays."""
        self.num_bytes = self._num_rows * self._position_bytes
        try:
            os.truncate(f"{self._path}/{INDEX}", self._index_bytes)
        except OSError as error:
            logger.warning("%s is not appended to again: %s", self._path, error)
            self.is_damaged = True
        for name, _, width in self._columns():
            with suppress(OSError):  # rows beyond the index belong to no request; the next ones overwrite them
                os.truncate(f"{self._path}/{name}", self._num_rows * width)


def index_line(sidecar: Sidecar, start: int, stop: int) -> bytes:
    """The line of a request whose rows are ``start : stop``: a JSON object that begins with its own check."""
    own = {key: value for key, value in sidecar.document().items() if key not in SHARED_FIELDS}
    rest = msgspec.json.encode({"rows": [start, stop], **own})[1:]
    return _CHECK_START + f"{zlib.crc32(rest):08x}".encode() + _CHECK_END + rest + b"\n"


def read_shard(source: Source, folder: str) -> Iterator[StoredStage]:
    """Read the requests of a shard, those of a shard that still grows included; none of one that is being uploaded.

    Raises:
        CaptureFileError: If the index speaks of rows that are not there, or is damaged before its last line.
    """
    shared = _read_shared(source, f"{folder}/{SHARD}")
    if shared is None:
        return
    index = f"{folder}/{INDEX}"
    if INDEX not in (name for name, _ in source.names(folder)):
        return  # it comes last
    lines = source.read(index, 0, source.size(index)).split(b"\n")
    sizes: dict[str, int] = {}
    for number, line in enumerate(lines[:-1], start=1):
        entry = _checked(line)
        if entry is None and number == len(lines) - 1:
            logger.warning(
                "%s: its last line is partial and is left out: its process was killed or still writes", index
            )
        elif entry is None:
            raise CaptureFileError(f"{index}: line {number} is damaged")
        else:
            yield _part(source, folder, shared, entry, sizes)


def forget_requests(folder: Path, is_kept: Callable[[Sidecar], bool]) -> int:
    """Take requests out of the index of a shard that no process writes to any more; return how many.

    The index is replaced as a whole, so a process that is killed here has changed it or not. Rows stay, belonging to no
    request.

    Raises:
        CaptureFileError: If the shard is damaged.
        OSError: If the index cannot be written.
    """
    path = folder / INDEX
    parts = list(read_shard(LocalSource(), str(folder)))
    lines = path.read_bytes().split(b"\n")[: len(parts)]  # those of `parts`: a partial one is the last
    kept = [line for line, part in zip(lines, parts, strict=True) if is_kept(part.sidecar)]
    if len(kept) < len(parts):
        temp = folder / f".{INDEX}.{secrets.token_hex(6)}"
        try:
            write_file(temp, [memoryview(line + b"\n") for line in kept], fsync=True)
            temp.replace(path)
            sync_folder(folder)
        finally:
            temp.unlink(missing_ok=True)
    return len(parts) - len(kept)


def _read_shared(source: Source, path: str) -> dict[str, Any] | None:
    text = source.read(path, 0, source.size(path))
    with refusing(path, CaptureFileError, "damaged"):
        shared: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    return shared if shared.get("format") == FORMAT else None


def _checked(line: bytes) -> dict[str, Any] | None:
    """The entry of a whole line; None for a partial or damaged one."""
    rest = line[_CHECK_BYTES:]
    head = _CHECK_START + f"{zlib.crc32(rest):08x}".encode() + _CHECK_END
    if not rest or not line.startswith(head):
        return None
    try:
        return msgspec.json.decode(b"{" + rest, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None  # its check agrees, but headgate did not write it


def _part(
    source: Source, folder: str, shared: Mapping[str, Any], entry: dict[str, Any], sizes: dict[str, int]
) -> StoredStage:
    with refusing(folder, CaptureFileError, "damaged: the index has no rows of a request"):
        start, stop = msgspec.convert(entry.pop("rows"), tuple[int, int])
        if not 0 <= start <= stop:
            raise ValueError(f"rows {start} to {stop}")
    sidecar = read_sidecar({**shared, **entry}, folder)
    if stop - start != sidecar.num_rows:
        raise CaptureFileError(f"{folder}: damaged: rows {start} to {stop} of a request with {sidecar.num_rows}")

    def column(name: str, dtype: str, *width: int) -> TensorRef:
        path = f"{folder}/{name}{COLUMN_SUFFIX}"
        whole = TensorRef(path, 0, dtype, (start, *width))
        ref = TensorRef(path, whole.num_bytes, dtype, (stop - start, *width))
        if path not in sizes:
            sizes[path] = source.size(path)
        if sizes[path] < ref.offset + ref.num_bytes:
            raise CaptureFileError(f"{path}: partial: {sizes[path]} bytes, the index speaks of more")
        return ref

    return StoredStage(
        layout="shards",
        sidecar=sidecar,
        paths=(folder,),
        tensors={
            name: column(site_file(Site.parse(name)), shape.dtype, shape.width)
            for name in sidecar.sites
            for shape in (sidecar.shape(name),)
        },
        positions=column(POSITIONS, "int64"),
        token_ids=column(TOKEN_IDS, "int64"),
    )
