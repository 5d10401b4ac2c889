"""The safetensors format, written from a stream of buffers and read without loading: a header, then the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headgate.capture.schema.errors import CaptureFileError
from headgate.consumers.filesystem.formats.sidecar import ITEM_SIZES, SAFETENSORS_DTYPES
from headgate.consumers.filesystem.storage.source import Source

_DTYPES = {code: dtype for dtype, code in SAFETENSORS_DTYPES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER = 100 << 20  # as the safetensors library has it


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that lies in a file, row after row.

    Attributes:
        path: The file.
        offset: Its first byte there.
        dtype: ``bfloat16``, ``float16``, ``float32`` or ``int64``.
        shape: Its sizes.
    """

    path: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes it takes in the file."""
        size = ITEM_SIZES[self.dtype]
        for length in self.shape:
            size *= length
        return size


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
    try:
        entries = msgspec.json.decode(source.read(path, _LENGTH_BYTES, length), type=dict[str, Any])
        metadata = msgspec.convert(entries.pop("__metadata__", {}), dict[str, str])
        refs = {name: _tensor_ref(path, _LENGTH_BYTES + length, entry) for name, entry in entries.items()}
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise CaptureFileError(f"{path}: damaged safetensors header: {error}") from error
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
