"""The index of a shard: what its lines look like, and reading them."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headgate.capture.errors import CaptureFileError
from headgate.capture.sites import Site
from headgate.consumers.filesystem.layout import StoredPart
from headgate.consumers.filesystem.names import site_file
from headgate.consumers.filesystem.sidecar import FORMAT, POSITIONS, TOKEN_IDS, Sidecar, read_sidecar
from headgate.consumers.filesystem.source import Source
from headgate.consumers.filesystem.tensorfile import TensorRef

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


def index_line(sidecar: Sidecar, start: int, stop: int) -> bytes:
    """The line of a request whose rows are ``start : stop``: a JSON object that begins with its own check."""
    own = {key: value for key, value in msgspec.to_builtins(sidecar).items() if key not in SHARED_FIELDS}
    rest = msgspec.json.encode({"rows": [start, stop], **own})[1:]
    return _CHECK_START + f"{zlib.crc32(rest):08x}".encode() + _CHECK_END + rest + b"\n"


def read_shard(source: Source, folder: str) -> Iterator[StoredPart]:
    """Read the requests of a shard, those of a shard that still grows included.

    Raises:
        CaptureFileError: If the index speaks of rows that are not there, or is damaged before its last line.
    """
    shared = _read_shared(source, f"{folder}/{SHARD}")
    if shared is None:
        return
    index = f"{folder}/{INDEX}"
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


def _read_shared(source: Source, path: str) -> dict[str, Any] | None:
    try:
        shared = msgspec.json.decode(source.read(path, 0, source.size(path)), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise CaptureFileError(f"{path}: damaged: {error}") from error
    return shared if shared.get("format") == FORMAT else None


def _checked(line: bytes) -> dict[str, Any] | None:
    """The entry of a whole line; None for a partial or damaged one."""
    rest = line[_CHECK_BYTES:]
    head = _CHECK_START + f"{zlib.crc32(rest):08x}".encode() + _CHECK_END
    return msgspec.json.decode(b"{" + rest, type=dict[str, Any]) if rest and line.startswith(head) else None


def _part(
    source: Source, folder: str, shared: Mapping[str, Any], entry: dict[str, Any], sizes: dict[str, int]
) -> StoredPart:
    start, stop = entry.pop("rows")
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

    return StoredPart(
        layout="shards",
        sidecar=sidecar,
        paths=(folder,),
        tensors={
            name: column(site_file(Site.parse(name)), sidecar.dtype, sidecar.hidden_size) for name in sidecar.sites
        },
        positions=column(POSITIONS, "int64"),
        token_ids=column(TOKEN_IDS, "int64"),
    )
