"""Layout ``request``: ``{root}/{tag}/{request_id}.safetensors``, one file per request.

Tensors: ``positions`` and ``token_ids``, int64 ``[rows]``, and one per site, ``12.post_mlp`` or ``final_norm``,
``[rows, width]`` in the site's dtype. Metadata: the fields of `Sidecar`.

The header is written and read here, not by the safetensors library: that wants every tensor in memory to write a file,
and a path on this machine to read one. Rows are streamed into the file instead, from a temporary file where they are
many, and files are read from any file system of fsspec without loading them. Tests read the files with the library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headgate.capture.files.reading import refusing
from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import Site
from headgate.consumers.filesystem.formats.layout import (
    FORMAT,
    POSITIONS,
    TOKEN_IDS,
    Finished,
    StoredStage,
    TensorRef,
    payload_of,
    sidecar_from_strings,
)
from headgate.consumers.filesystem.storage.local_store import bytes_of
from headgate.consumers.filesystem.storage.source import Source
from headgate.consumers.filesystem.storage.store import FILE_SUFFIX, Published, Store, Target

SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int16": "I16", "int64": "I64"}
_DTYPES = {code: dtype for dtype, code in SAFETENSORS_DTYPES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER = 100 << 20  # as the safetensors library has it


class RequestLayout:
    """Writes one safetensors file per request; see `Layout`."""

    def __init__(self, store: Store, *, durable: bool | None) -> None:
        self._store = store
        self._durable = durable

    def check_free(self, target: Target) -> None:
        self._store.check_free(target, FILE_SUFFIX)

    def store(self, finished: Finished) -> tuple[dict[str, Any], Published]:
        published = self._store.publish_file(finished.target, FILE_SUFFIX, _buffers(finished))
        return payload_of("request", finished, published, durable=self._durable), published

    def close(self) -> None:
        """Nothing stays open."""


def _buffers(finished: Finished) -> Iterator[memoryview]:
    sidecar, num_rows = finished.sidecar, finished.num_rows
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        POSITIONS: ("int64", (num_rows,)),
        TOKEN_IDS: ("int64", (num_rows,)),
    }
    for site in sidecar.sites:
        shape = sidecar.shape(site)
        tensors[site] = shape.dtype, (num_rows, shape.width)
    yield memoryview(header(tensors, sidecar.to_strings()))
    yield bytes_of(finished.positions)
    yield bytes_of(finished.token_ids)
    for site in sidecar.sites:
        yield from finished.pieces[Site.parse(site)]


def read_request_file(source: Source, path: str) -> StoredStage | None:
    """Read a file of this layout; None if it is a whole safetensors file of another program.

    Raises:
        CaptureFileError: If it is partial or damaged.
    """
    tensors, metadata = read_header(source, path)
    if metadata.get("format") != FORMAT:
        return None
    sidecar = sidecar_from_strings(metadata, path)
    expected: dict[str, tuple[int, ...]]
    expected = {site: (sidecar.num_rows, sidecar.shape(site).width) for site in sidecar.sites}
    expected |= {POSITIONS: (sidecar.num_rows,), TOKEN_IDS: (sidecar.num_rows,)}
    found = {name: ref.shape for name, ref in tensors.items()}
    if found != expected:
        raise CaptureFileError(f"{path}: damaged: tensors {found}, metadata says {expected}")
    positions, token_ids = tensors.pop(POSITIONS), tensors.pop(TOKEN_IDS)
    return StoredStage(
        layout="request", sidecar=sidecar, paths=(path,), tensors=tensors, positions=positions, token_ids=token_ids
    )


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Everything of a safetensors file that comes before the data.

    Args:
        tensors: dtype and shape of each tensor, in the order of the data.
        metadata: Text by name.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, (dtype, shape) in tensors.items():
        stop = start + TensorRef("", 0, dtype, shape).num_bytes
        entries[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _LENGTH_BYTES)  # so that 8-byte tensors lie aligned in a mapped file
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(source: Source, path: str) -> tuple[dict[str, TensorRef], dict[str, str]]:
    """Read the tensors' places and the metadata.

    Raises:
        CaptureFileError: If the file is not a whole safetensors file.
    """
    size = source.size(path)
    length = int.from_bytes(source.read(path, 0, min(size, _LENGTH_BYTES)), "little")
    if not 0 < length <= min(size - _LENGTH_BYTES, _MAX_HEADER):
        raise CaptureFileError(f"{path}: partial or no safetensors file: {size} bytes, header of {length}")
    text = source.read(path, _LENGTH_BYTES, length)
    with refusing(path, CaptureFileError, "damaged safetensors header"):
        entries = msgspec.json.decode(text, type=dict[str, Any])
        metadata = msgspec.convert(entries.pop("__metadata__", {}), dict[str, str])
        refs = {name: _tensor_ref(path, _LENGTH_BYTES + length, entry) for name, entry in entries.items()}
    end = max((ref.offset + ref.num_bytes for ref in refs.values()), default=_LENGTH_BYTES + length)
    if end != size:
        raise CaptureFileError(f"{path}: partial: {size} bytes of {end}")
    return refs, metadata


def _tensor_ref(path: str, data_start: int, entry: Mapping[str, Any]) -> TensorRef:
    start, stop = entry["data_offsets"]
    ref = TensorRef(path, data_start + start, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    if min(ref.shape, default=0) < 0 or stop - start != ref.num_bytes:
        raise ValueError(f"a tensor of shape {list(ref.shape)} in {stop - start} bytes")
    return ref
