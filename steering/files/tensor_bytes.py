"""The safetensors format, read and written as bytes: it knows bfloat16, which the library's numpy side does not.

A file is the length of a JSON header (8 bytes, little-endian), the header, and the tensors one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file: its type as the format names it (``"BF16"``), its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The file's content. Tensors are kept in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        stop = start + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, stop)}
        start = stop
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(tensor.data for tensor in tensors.values())])


def decode(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file's content.

    Raises:
        ValueError: If it is not of this format, or cut off.
    """
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 0 < length <= min(MAX_HEADER_BYTES, len(content) - 8):
        raise ValueError("not a safetensors file, or cut off")
    header = msgspec.json.decode(content[8 : 8 + length], type=dict[str, Any])
    metadata = msgspec.convert(header.pop("__metadata__", {}), dict[str, str])
    found = msgspec.convert(header, dict[str, _Info])
    body = memoryview(content)[8 + length :]
    tensors = {}
    for name, info in found.items():
        start, stop = info.data_offsets
        if not 0 <= start <= stop <= len(body):
            raise ValueError(f"tensor {name!r} lies outside the file: it is cut off or damaged")
        tensors[name] = Tensor(info.dtype, info.shape, bytes(body[start:stop]))
    return tensors, metadata


class _Info(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
