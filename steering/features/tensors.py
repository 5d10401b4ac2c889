"""Tensors of safetensors, NumPy and PyTorch files, without running code from them and without reading them whole.

A tensor of several gigabytes is read by blocks. Of PyTorch files, only zip archives that hold tensors and plain values
are read.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import finalize

import numpy as np

from headgate.capture.files.reading import Bytes, ReadInto, StoredFile, read_whole, refusing
from headgate.capture.files.tensors import (
    MAX_NPY_HEADER,
    SAFETENSORS,
    Array,
    LazyTensor,
    TensorFile,
    array_of,
    open_npy,
    open_safetensors,
)
from headgate.capture.schema.errors import HeadgateError, shown

__all__ = ["SUFFIXES", "TORCH", "Array", "FeatureFileError", "LazyTensor", "TensorFile", "open_tensors"]

NUMPY, ARRAY, TORCH = ".npz", ".npy", (".pt", ".pth")
SUFFIXES = (SAFETENSORS, NUMPY, ARRAY, *TORCH)

_MAX_REPEATED = 1 << 28
"""Bytes of a tensor whose elements are the same few over and over, at most."""
_MAX_SETTING, _MAX_ALIGNMENT = 16, 1 << 20
_UNPACKED_BYTES = 1 << 20
"""Bytes that are unpacked at a time."""


class FeatureFileError(HeadgateError, ValueError):
    """A file of an SAE or transcoder cannot be used; the message names it and says why, and what to do."""


class PickledObjectsError(FeatureFileError):
    """A file of PyTorch is not loaded, because that could run code.

    Attributes:
        reason: Why, without the file's name and without what to do.
    """

    def __init__(self, path: Path, reason: str, advice: str) -> None:
        self.reason = reason
        super().__init__(f"{path}: {reason}. {advice}")


def open_tensors(path: Path) -> TensorFile:
    """Open a file of tensors, in the format of its suffix; a file of one array has it under the empty name.

    Raises:
        FeatureFileError: If it is not there, damaged, cut off, or would have to be run as code.
    """
    if not path.is_file():
        raise FeatureFileError(f"{path}: no such file")
    if path.suffix == SAFETENSORS:
        return open_safetensors(path, FeatureFileError)
    if path.suffix == NUMPY:
        return _open_npz(path)
    if path.suffix == ARRAY:
        return TensorFile(path, {"": open_npy(path, FeatureFileError)}, {}, FeatureFileError)
    if path.suffix in TORCH:
        return _open_torch(path)
    raise FeatureFileError(f"{path}: unknown suffix {path.suffix!r}; known: {', '.join(SUFFIXES)}")


def _open_npz(path: Path) -> TensorFile:
    file = StoredFile(path, FeatureFileError)
    with (
        refusing(path, FeatureFileError, "not an NPZ file, or it is cut off or damaged"),
        zipfile.ZipFile(path) as archive,
    ):
        tensors = dict(_member(file, archive, info) for info in archive.infolist())
    file.check()
    return TensorFile(path, tensors, {}, FeatureFileError)


def _member(file: StoredFile, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[str, LazyTensor]:
    """Read the header of a member. Its elements are read, and unpacked, on first use."""
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as packed:
        header = io.BytesIO(packed.read(MAX_NPY_HEADER))
    source = _Unpacked(file, info) if info.compress_type else file
    start = 0 if info.compress_type else _data_start(file, info)
    return name, array_of(f"{file.path}: array {name!r}", FeatureFileError, header, source, start, info.file_size)


def _data_start(file: StoredFile, info: zipfile.ZipInfo) -> int:
    """Return where a stored member's data begins: after its local header, whose lengths are its own."""
    header = file.read(info.header_offset, 30)
    if header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no member {info.filename} at {info.header_offset}")
    return info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


class _Unpacked:
    """A packed member of an archive, unpacked into a file without a name when it is first read.

    Args:
        file: The archive.
        info: The member. `size` bytes of it are unpacked at most, as its directory says.
    """

    def __init__(self, file: StoredFile, info: zipfile.ZipInfo) -> None:
        self._file = file
        self._info = info
        self._lock = Lock()  # guards _content
        self._content: int | None = None

    @contextmanager
    def opened(self) -> Iterator[ReadInto]:
        """See `ByteSource.opened`."""
        with self._lock, refusing(f"{self._file.path}: {self._info.filename}", FeatureFileError, "cannot be unpacked"):
            if self._content is None:
                self._content = self._unpacked()
        content = self._content

        def read_into(offset: int, memory: Bytes) -> None:
            read_whole(content, offset, memory)

        yield read_into

    def _unpacked(self) -> int:
        self._file.check()
        with (
            tempfile.TemporaryFile() as content,
            zipfile.ZipFile(self._file.path) as archive,
            archive.open(self._info) as packed,
        ):
            while block := packed.read(_UNPACKED_BYTES):
                content.write(block)
            content.flush()
            self._file.check()
            kept = os.dup(content.fileno())
        finalize(self, os.close, kept)
        return kept


class TorchFile:
    """A file of PyTorch, whose tensors have no values until they are read.

    No code of the file is run: anything in it but tensors, numbers, texts and containers, such as an object or a numpy
    array, is refused.

    Attributes:
        path: The file.
        content: What was saved, with tensors on the device ``meta``; `tensor` makes them ones that can be read.

    Raises:
        PickledObjectsError: If it holds anything else, or is a plain pickle, which may.
    """

    def __init__(self, path: Path) -> None:
        import torch  # a gigabyte of memory that only PyTorch's own files need

        self.path = path
        self._file = StoredFile(path, FeatureFileError)
        if not zipfile.is_zipfile(path):
            raise PickledObjectsError(
                path,
                "not a zip archive of PyTorch, or cut off. Older files are plain pickles, which can run code",
                "Load it where it was made, and save its tensors with safetensors.torch.save_file",
            )
        try:
            self._sizes = self._storages()
            self.content: Any = torch.load(path, map_location="meta", weights_only=True)
        except Exception as error:  # (torch raises errors of many kinds for what it does not load)
            raise PickledObjectsError(
                path,
                "holds more than tensors (pickled objects, numpy arrays) or is damaged, so it is not loaded: "
                f"{_why(error)}",
                "Convert it where it was made: safetensors.torch.save_file({name: tensor.contiguous()}, FILE)",
            ) from error
        self._file.check()

    def _storages(self) -> dict[int, int]:
        """Return the bytes of each storage, by where it begins in the file."""
        with zipfile.ZipFile(self.path) as archive:
            found = archive.infolist()
            for info in found:
                _check_setting(archive, info)
        stored = [info for info in found if "/data/" in info.filename and not info.compress_type]
        return {_data_start(self._file, info): info.file_size for info in stored}

    def tensor(self, name: str, value: Any) -> LazyTensor:
        """Return a value of `content` as a tensor; a number is one without axes.

        Raises:
            FeatureFileError: If it is neither a dense tensor nor a number, or claims to be larger than its storage.
        """
        import torch

        where = f"{self.path}: tensor {name!r}"
        if isinstance(value, int | float):
            with refusing(where, FeatureFileError, "a number out of range"):
                number = np.asarray(value, np.int64 if isinstance(value, int) else np.float64)
            return LazyTensor.of(where, number, FeatureFileError)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise FeatureFileError(f"{where}: expected a dense tensor or a number, got {type(value).__name__}")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in _TORCH_CODES:
            raise FeatureFileError(f"{where}: elements of type {value.dtype} are not read; expected real numbers")
        num_bytes, item = value.untyped_storage().nbytes(), value.element_size()
        start: int = getattr(value.untyped_storage(), "_checkpoint_offset", -1)
        skipped, shape = item * int(value.storage_offset()), tuple(map(int, value.shape))
        strides = tuple(item * int(stride) for stride in value.stride())
        extent = item + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if value.numel() else 0
        if self._sizes.get(start) != num_bytes or skipped + extent > num_bytes or min(strides, default=0) < 0:
            raise FeatureFileError(f"{where}: damaged: its values are not in the file as it describes them")
        if value.numel() * item > max(num_bytes, _MAX_REPEATED):  # by strides of 0 a few bytes can say anything
            raise FeatureFileError(f"{where}: claims {value.numel() * item:,} bytes and stores {num_bytes:,}")
        code = np.dtype(_TORCH_CODES[dtype])
        at = start + skipped
        return LazyTensor(where, self._file, FeatureFileError, code, shape, strides, at, dtype == "bfloat16")


def _check_setting(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    """Check what a file of PyTorch says of its numbers. PyTorch divides by the alignment: 0 ends the process.

    Raises:
        ValueError: If it cannot be read so.
    """
    name = info.filename.rpartition("/")[2].lower()  # as PyTorch finds it, in any case
    if name not in ("byteorder", ".storage_alignment"):
        return
    text = archive.read(info) if info.file_size <= _MAX_SETTING else b"too long"
    if name == "byteorder" and text != b"little":
        raise ValueError(f"its numbers are in the byte order {shown(text)}")
    if name == ".storage_alignment" and not (text.isdigit() and 0 < int(text) <= _MAX_ALIGNMENT):
        raise ValueError(f"its storages are aligned to {shown(text)}")


_TORCH_CODES = {
    **{"bfloat16": "<u2", "float16": "<f2", "float32": "<f4", "float64": "<f8"},
    **{"int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "<i1", "uint8": "<u1"},
}


def _why(error: Exception) -> str:
    """Return what torch did not load, without its hints to load it all the same."""
    text = str(error)
    found = re.search(r"GLOBAL ([\w.]+)", text)
    return f"it names {found[1]}" if found else text.partition("\n")[0].partition(". ")[0][:200]


def _open_torch(path: Path) -> TensorFile:
    file = TorchFile(path)
    loaded = file.content
    if not isinstance(loaded, dict):
        raise FeatureFileError(f"{path}: expected a dictionary of tensors, got {type(loaded).__name__}")
    if isinstance(loaded.get("ae"), dict):  # a checkpoint in mid-training
        loaded = loaded["ae"]
    tensors: dict[str, LazyTensor] = {}
    texts: dict[str, str] = {}
    for name, value in _flat(loaded):
        if isinstance(value, str):
            texts[name] = value
        else:
            tensors[name] = file.tensor(name, value)
    return TensorFile(path, tensors, texts, FeatureFileError)


def _flat(loaded: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in loaded.items():
        if name == "activation_state_dict" and isinstance(value, dict):  # OpenAI's
            yield from ((f"{name}.{inner}", found) for inner, found in value.items())
        else:
            yield str(name), value
