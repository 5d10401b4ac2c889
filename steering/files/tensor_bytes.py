"""Tensors as the bytes of a safetensors file, by the library, without torch.

The library's own numpy side has no bfloat16; its `serialize` and `deserialize` have it, since they work on raw bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import safetensors

from headgate.steering.vectors.dtypes import StoredType

FORMAT_NAMES: dict[str, StoredType] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Element types of vectors by the names of the format."""

_LIBRARY_NAMES = {**FORMAT_NAMES, "F64": "float64", "I64": "int64"}
"""Names that the library's `serialize` has for types of the format."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file: its type as the format names it (``"BF16"``), its shape and its bytes, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the content of a file; the library orders the tensors by the size of their types and by name."""
    specs = {name: _spec(tensor) for name, tensor in tensors.items()}
    return bytes(safetensors.serialize(specs, dict(metadata) or None))


def decode(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file's content.

    The library checks the header against the content before it copies anything: its length (100 MB at most), each
    tensor's shape, size and place, and that tensors neither overlap nor leave gaps.

    Raises:
        ValueError: If it is not of this format, or cut off.
    """
    try:
        found = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise ValueError(f"not a safetensors file, or it is cut off or damaged: {error}") from error
    tensors = {name: Tensor(info["dtype"], tuple(info["shape"]), info["data"]) for name, info in found}
    return tensors, _metadata(content)


def _spec(tensor: Tensor) -> Any:
    """Return a tensor in the form that this version of the library serializes."""
    dtype = _LIBRARY_NAMES[tensor.dtype]
    if not hasattr(safetensors, "TensorSpec"):  # below 0.8
        return {"dtype": dtype, "shape": list(tensor.shape), "data": bytes(tensor.data)}
    address = np.frombuffer(tensor.data, np.uint8).ctypes.data if tensor.data else 0  # `tensor` outlives the spec
    return safetensors.TensorSpec(dtype=dtype, shape=list(tensor.shape), data_ptr=address, data_len=len(tensor.data))


def _metadata(content: bytes) -> dict[str, str]:
    """Return the metadata of a content that `deserialize` accepted, since it does not hand the metadata out itself."""
    length = int.from_bytes(content[:8], "little")
    return msgspec.json.decode(content[8 : 8 + length], type=_FileMetadata).metadata or {}


class _FileMetadata(msgspec.Struct):
    metadata: dict[str, str] | None = msgspec.field(default=None, name="__metadata__")
