"""GGUF control vectors: the files of llama.cpp and repeng. Writing one needs the extra ``headgate[gguf]``.

Such a file has the architecture ``controlvector`` and one tensor ``direction.N`` of ``[hidden]`` for each layer. Both
tools add ``direction.N`` to the output of layer N, counted from 0, after its MLP was added: that is our site
``N.post_mlp``, and files are read and written so. Three consequences of how the tools differ:

* llama.cpp refuses ``direction.0`` and types other than float32, so neither is written; repeng may write
  ``direction.0``, so it is read.
* llama.cpp's own ``cvector-generator`` gives the direction at the output of layer N the name ``direction.N+1``.
  llama.cpp adds it at layer N+1 all the same, and so do we: a file acts here as it acts there.
* A strength is no part of the file: the scale of a request or module gives it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headgate.capture.files.reading import StoredFile
from headgate.capture.files.tensors import LazyTensor
from headgate.capture.schema.errors import shown
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.vectors.phase_vectors import PhaseVectors

ARCHITECTURE = "controlvector"

_HINT = f"{ARCHITECTURE}.model_hint"
_NOTE = "headgate."
_KNOWN = {_HINT, f"{ARCHITECTURE}.layer_count"}
_MAX_HEADER, _MAX_RANK, _MAX_ALIGNMENT, _ALIGNMENT = 16 << 20, 4, 1 << 16, 32
_TEXT, _ARRAY = 8, 9
_CODES = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), (f"<{code}" for code in "BbHhIif?Qqd"), strict=True))
_BFLOAT16 = 30
_TYPES = {0: "<f4", 1: "<f2", _BFLOAT16: "<u2"}
_DIRECTION = re.compile(r"direction\.([0-9]{1,6})")


def write(path: Path, vectors: PhaseVectors, metadata: Mapping[str, str]) -> None:
    """Write a control vector; ``metadata["model"]`` becomes its model hint.

    Raises:
        ValueError: If there are vectors at other sites than ``post_mlp`` of layer 1 and above, or gguf is missing.
    """
    other = [site.name for site in vectors.sites if site.hook is not HookPoint.POST_MLP or site.layer == 0]
    if other:
        raise ValueError(f"a control vector holds post_mlp of layer 1 and above only, not {', '.join(other[:5])}")
    writer = _gguf().GGUFWriter(path, ARCHITECTURE)
    try:
        writer.add_string(_HINT, metadata.get("model", ""))
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(vectors.sites))
        for key, value in metadata.items():
            if key != "model":
                writer.add_string(_NOTE + key, value)
        for site, row in zip(vectors.sites, vectors.float32(), strict=True):
            writer.add_tensor(f"direction.{site.layer}", np.ascontiguousarray(row))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def read(path: Path) -> tuple[PhaseVectors | None, dict[str, str]]:
    """Read the vectors of a control vector, None if all are zero, and its notes, the model hint as ``"model"``.

    The header is read here: the package gguf maps files, and takes hours over a count that is damaged.

    Raises:
        ValueError: If the file is damaged or no control vector, or says something that may change what it does.
        OSError: If it cannot be read.
    """
    file = StoredFile(path, ValueError)
    header = _GgufHeader(file.read(0, _MAX_HEADER))
    fields = header.fields()
    if fields.get("general.architecture") != ARCHITECTURE:
        raise ValueError(f"expected a GGUF file of {ARCHITECTURE}, got {shown(fields.get('general.architecture'))}")
    if unknown := sorted(key for key in fields if key.startswith(f"{ARCHITECTURE}.") and key not in _KNOWN):
        raise ValueError(
            f"says {', '.join(f'{key} = {shown(fields[key])}' for key in unknown[:5])}, which may change what the "
            f"vector does; headgate adds directions, and knows {', '.join(sorted(_KNOWN))}"
        )
    tensors = header.tensors(file, fields.get("general.alignment", _ALIGNMENT))
    if not tensors:
        raise ValueError("there is no tensor direction.N in it")
    metadata = {key.removeprefix(_NOTE): str(text) for key, text in fields.items() if key.startswith(_NOTE)}
    if fields.get(_HINT):
        metadata["model"] = str(fields[_HINT])
    return PhaseVectors.from_rows({site: tensor.read(np.float32) for site, tensor in tensors.items()}), metadata


class _GgufHeader:
    """The beginning of a GGUF file, read from front to back; whatever is cut off raises `ValueError`."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0
        magic, version, self._num_tensors, self._num_fields = self._unpack("<4sIQQ")
        if magic != b"GGUF":
            raise ValueError(f"no GGUF file: its magic is {magic!r}")
        if version not in (2, 3):
            raise ValueError(f"GGUF of version {version}; versions 2 and 3 are read, of little-endian machines")

    def fields(self) -> dict[str, Any]:
        """Read the fields; those of arrays are left out."""
        found: dict[str, Any] = {}
        for _ in range(self._num_fields):
            key = self._text()
            (kind,) = self._unpack("<I")
            found[key] = self._value(kind)
        return found

    def tensors(self, file: StoredFile, alignment: Any) -> dict[Site, LazyTensor]:
        """Read where the tensors are: after the fields."""
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"general.alignment is {shown(alignment)}")
        found = [self._tensor() for _ in range(self._num_tensors)]
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in found:
            match = _DIRECTION.fullmatch(name)
            if match is None:
                raise ValueError(f"expected tensors direction.N only, got {shown(name)}")
            if kind not in _TYPES:
                raise ValueError(f"{name} is of the type {kind}; expected F32 (0), F16 (1) or BF16 (30)")
            if len(shape) != 1:
                raise ValueError(f"{name} has the shape {list(shape[::-1])}, expected [hidden]")
            dtype = np.dtype(_TYPES[kind])
            if start + offset + shape[0] * dtype.itemsize > file.size:
                raise ValueError(f"{name} is cut off")
            site = Site(int(match[1]), HookPoint.POST_MLP)
            if site in tensors:
                raise ValueError(f"{name} is given twice")
            is_bfloat16 = kind == _BFLOAT16
            tensors[site] = LazyTensor.contiguous(
                name, file, ValueError, dtype, shape, offset=start + offset, is_bfloat16=is_bfloat16
            )
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        (rank,) = self._unpack("<I")
        if rank > _MAX_RANK:
            raise ValueError(f"{shown(name)} has {rank} axes")
        shape = self._unpack(f"<{rank}Q")
        kind, offset = self._unpack("<IQ")
        return name, shape, kind, offset

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            each, count = self._unpack("<IQ")
            for _ in range(count if each in (_TEXT, _ARRAY) else 0):
                self._value(each)
            if each not in (_TEXT, _ARRAY):
                self._skip(count * struct.calcsize(self._code(each)))
            return None
        return self._unpack(self._code(kind))[0]

    def _code(self, kind: int) -> str:
        if kind not in _CODES:
            raise ValueError(f"a field of the type {kind}, which GGUF has not")
        return _CODES[kind]

    def _text(self) -> str:
        (length,) = self._unpack("<Q")
        return self._skip(length).decode("utf-8", "replace")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._skip(struct.calcsize(form)))

    def _skip(self, length: int) -> bytes:
        if self._at + length > len(self._content):
            raise ValueError(f"the GGUF file is cut off or damaged: {length} bytes are expected at {self._at}")
        self._at += length
        return self._content[self._at - length : self._at]


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ValueError("writing GGUF files needs the package gguf: pip install 'headgate[gguf]'") from error
    return gguf
