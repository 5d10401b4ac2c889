"""Tensors of safetensors, NPZ and PyTorch files, without running code from them and without reading them whole.

Files are mapped: a tensor of several gigabytes is read by blocks. Of PyTorch files, only zip archives that hold tensors
and plain values are read.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors

from headgate.capture.schema.errors import HeadgateError

Array = npt.NDArray[Any]

_CODES: dict[str, str] = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4"}
"""Element types of the safetensors format that are read, with the numpy type that holds them."""

SAFETENSORS, NUMPY, TORCH = (".safetensors",), (".npz",), (".pt", ".pth")
_MAX_REPEATED = 1 << 28
"""Bytes of a tensor whose elements are the same few over and over, at most."""

_BLOCK = (512, 64)
"""Rows and columns that are copied together, which stay in a processor's cache."""

SUFFIXES = (*SAFETENSORS, *NUMPY, *TORCH)


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


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor in a mapped file.

    Attributes:
        where: File and name, for errors.
        values: The mapped elements; of bfloat16 their bits as uint16.
        is_bfloat16: Whether `values` are such bits.
    """

    where: str
    values: Array
    is_bfloat16: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.values.shape

    @property
    def num_bits(self) -> int:
        """Bits of one element."""
        return self.values.dtype.itemsize * 8

    @property
    def transposed(self) -> LazyTensor:
        """The same elements with the order of axes reversed; nothing is read."""
        return LazyTensor(self.where, self.values.T, self.is_bfloat16)

    @property
    def is_scattered(self) -> bool:
        """Whether the elements of a row of a matrix lie far from one another, as in a transposed one."""
        return self.values.ndim == 2 and self.values.strides[1] != self.values.itemsize

    def gathered(self) -> LazyTensor:
        """Return a matrix in memory whose rows are contiguous, by small blocks: four times as fast as numpy's copy."""
        copy = np.empty(self.shape, self.values.dtype)
        height, width = _BLOCK
        for top in range(0, self.shape[0], height):
            for left in range(0, self.shape[1], width):
                block = slice(top, top + height), slice(left, left + width)
                copy[block] = self.values[block]
        return LazyTensor(self.where, copy, self.is_bfloat16)

    def __getitem__(self, index: Any) -> LazyTensor:
        """Return a part; nothing is read if the index has no lists."""
        return LazyTensor(self.where, self.values[index], self.is_bfloat16)

    def read(self, dtype: npt.DTypeLike = np.float64) -> Array:
        """Read the elements into an array of their own, contiguous."""
        if self.is_bfloat16:
            wide = np.left_shift(np.ascontiguousarray(self.values), 16, dtype=np.uint32).view(np.float32)
            return np.asarray(wide.astype(dtype, copy=False)).reshape(self.shape)
        found: Array = np.array(self.values, dtype=dtype, order="C")
        return found

    def expect(self, shape: tuple[int, ...], why: str) -> LazyTensor:
        """Return itself if it has the shape.

        Raises:
            FeatureFileError: If not; `why` says where the expected shape comes from.
        """
        if self.shape != shape:
            hint = "; it is the other way round" if self.shape == shape[::-1] else ""
            raise FeatureFileError(
                f"{self.where}: expected the shape {list(shape)} ({why}), got {list(self.shape)}{hint}"
            )
        return self


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The content of a file.

    Attributes:
        path: The file.
        tensors: By name.
        texts: Metadata, and strings between the tensors.
    """

    path: Path
    tensors: Mapping[str, LazyTensor]
    texts: Mapping[str, str]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> LazyTensor:
        """Return the tensor.

        Raises:
            FeatureFileError: If there is none of that name; the message lists those there are.
        """
        if name not in self.tensors:
            there = ", ".join(list(self.tensors)[:20]) or "none"
            raise FeatureFileError(f"{self.path}: expected a tensor {name!r}, found {there}")
        return self.tensors[name]

    def get(self, name: str) -> LazyTensor | None:
        """Return the tensor, or None if there is none of that name."""
        return self.tensors.get(name)

    def number(self, name: str) -> float:
        """Return the one element of a tensor of any shape."""
        tensor = self[name]
        if tensor.values.size != 1:
            raise FeatureFileError(f"{tensor.where}: expected one number, got the shape {list(tensor.shape)}")
        return float(tensor.read().reshape(()))


def open_tensors(path: Path) -> TensorFile:
    """Map a file of tensors, in the format of its suffix.

    Raises:
        FeatureFileError: If it is not there, damaged, cut off, or would have to be run as code.
    """
    if not path.is_file():
        raise FeatureFileError(f"{path}: no such file")
    if path.suffix in SAFETENSORS:
        return _open_safetensors(path)
    if path.suffix in NUMPY:
        return _open_npz(path)
    if path.suffix in TORCH:
        return _open_torch(path)
    raise FeatureFileError(f"{path}: unknown suffix {path.suffix!r}; known: {', '.join(SUFFIXES)}")


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _open_safetensors(path: Path) -> TensorFile:
    try:
        with safetensors.safe_open(str(path), framework="np"):  # the library checks header, sizes and places
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise FeatureFileError(f"{path}: not a safetensors file, or it is cut off or damaged: {error}") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = msgspec.json.decode(file.read(length), type=dict[str, Any])
    texts = msgspec.convert(header.pop("__metadata__", None) or {}, dict[str, str])
    data = np.memmap(path, np.uint8, "r")
    tensors = {}
    for name, value in header.items():
        entry = msgspec.convert(value, _Entry)
        if entry.dtype in _CODES:  # buffers of other types, such as flags, are left out
            start, stop = (8 + length + offset for offset in entry.data_offsets)
            values = data[start:stop].view(_CODES[entry.dtype]).reshape(entry.shape)
            tensors[name] = LazyTensor(f"{path}: tensor {name!r}", values, entry.dtype == "BF16")
    return TensorFile(path, tensors, texts)


def _open_npz(path: Path) -> TensorFile:
    try:
        with zipfile.ZipFile(path) as archive:
            tensors = dict(_members(path, archive))
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise FeatureFileError(f"{path}: not an NPZ file, or it is cut off or damaged: {error}") from error
    return TensorFile(path, tensors, {})


def _members(path: Path, archive: zipfile.ZipFile) -> Iterator[tuple[str, LazyTensor]]:
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        where = f"{path}: array {name!r}"
        with tempfile.TemporaryFile() if info.compress_type else path.open("rb") as file:
            if info.compress_type:
                with archive.open(info) as packed:
                    shutil.copyfileobj(packed, file)
                file.seek(0)
            else:
                file.seek(_data_start(path, info))
            yield name, LazyTensor(where, _map_npy(where, file))


def _data_start(path: Path, info: zipfile.ZipInfo) -> int:
    """Return where a stored member's data begins: after its local header, whose lengths are its own."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
    if header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no member {info.filename} at {info.header_offset}")
    return info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _map_npy(where: str, file: Any) -> Array:
    try:
        npy: Any = np.lib.format  # (whose functions have no types)
        read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except ValueError as error:
        raise FeatureFileError(f"{where}: not an array, or cut off: {error}") from error
    if dtype.hasobject:
        raise FeatureFileError(
            f"{where}: holds pickled objects, which are not loaded; save plain arrays by numpy.savez"
        )
    if dtype.kind not in "fiu":
        raise FeatureFileError(f"{where}: expected numbers, got elements of type {dtype}")
    if not np.prod(shape):
        return np.zeros(shape, dtype)
    return np.memmap(file, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")


def load_torch(path: Path) -> Any:
    """Return the content of a file of PyTorch: tensors, mapped, with numbers, texts and containers of them.

    No code of the file is run: anything else in it, such as an object or a numpy array, is refused.

    Raises:
        PickledObjectsError: If it holds anything else, or is a plain pickle, which may.
    """
    import torch  # a gigabyte of memory that only PyTorch's own files need

    if not zipfile.is_zipfile(path):
        raise PickledObjectsError(
            path,
            "not a zip archive of PyTorch, or cut off. Older files are plain pickles, which can run code",
            "Load it where it was made, and save its tensors with safetensors.torch.save_file",
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # (torch raises errors of many kinds for what it does not load)
        raise PickledObjectsError(
            path,
            "holds more than tensors (pickled objects, numpy arrays) or is damaged, so it is not loaded: "
            f"{_why(error)}",
            "Convert it where it was made: safetensors.torch.save_file({name: tensor.contiguous()}, FILE)",
        ) from error


def _why(error: Exception) -> str:
    """Return what torch did not load, without its hints to load it all the same."""
    text = str(error)
    found = re.search(r"GLOBAL ([\w.]+)", text)
    return f"it names {found[1]}" if found else text.partition("\n")[0].partition(". ")[0][:200]


def _open_torch(path: Path) -> TensorFile:
    loaded = load_torch(path)
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
            tensors[name] = tensor_of(path, name, value)
    return TensorFile(path, tensors, texts)


def _flat(loaded: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in loaded.items():
        if name == "activation_state_dict" and isinstance(value, dict):  # OpenAI's
            yield from ((f"{name}.{inner}", found) for inner, found in value.items())
        else:
            yield name, value


def tensor_of(path: Path, name: str, value: Any) -> LazyTensor:
    """Return a value that `load_torch` loaded as a tensor; a number is one without axes.

    Raises:
        FeatureFileError: If it is neither a dense tensor nor a number, or claims to be far larger than its storage.
    """
    import torch

    where = f"{path}: tensor {name!r}"
    if isinstance(value, int | float):
        return LazyTensor(where, np.asarray(value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise FeatureFileError(f"{where}: expected a dense tensor or a number, got {type(value).__name__}")
    value = value.detach()
    size = value.numel() * value.element_size()
    if size > max(value.untyped_storage().nbytes(), _MAX_REPEATED):  # with strides of 0 a few bytes can say anything
        raise FeatureFileError(f"{where}: claims {size:,} bytes and stores {value.untyped_storage().nbytes():,}")
    if value.dtype is torch.bfloat16:
        return LazyTensor(where, value.view(torch.uint16).numpy(), True)
    try:
        return LazyTensor(where, value.numpy())
    except (TypeError, RuntimeError) as error:
        raise FeatureFileError(f"{where}: elements of type {value.dtype} are not read") from error
