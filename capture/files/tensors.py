"""Tensors of files, read by parts when they are needed; and the safetensors format, which most of them have."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.files.reading import ByteSource, ReadInto, StoredBytes, StoredFile, Wrong, refusing
from headgate.capture.schema.errors import HeadgateError

Array = npt.NDArray[Any]
Index = slice | npt.NDArray[np.int64]

SAFETENSORS = ".safetensors"
_CODES: dict[str, str] = {
    **{"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1"},
}
"""Element types of the safetensors format that are read, with the numpy type that holds them."""
MAX_NPY_HEADER = 1 << 16
"""Bytes of a file of NumPy that its header is in."""
_LENGTH_BYTES = 8
_MAX_HEADER = 100 << 20  # as the safetensors library has it

_NEAR_BYTES = 16 << 10
"""A part of a file that is read at once, although most of it is not wanted: a call of the system costs as much."""
_COLUMN_BYTES = 1 << 20
"""A part of a file that columns are taken out of at a time, about."""
_MOST_BYTES = 64 << 20
"""A part of a file that is read at once, at most, where elements have to change their order."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor in a file, or in memory.

    Attributes:
        where: File and name, for errors.
        data: The bytes that it is in.
        wrong: Makes its errors.
        dtype: Of its elements; of bfloat16 uint16, their bits.
        shape: Its shape.
        strides: Bytes from one element to the next along each axis, none below 0.
        offset: Where its first element is in `data`.
        is_bfloat16: Whether elements are the bits of bfloat16.
    """

    where: str
    data: ByteSource
    wrong: Wrong
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    is_bfloat16: bool = False

    @classmethod
    def contiguous(
        cls,
        where: str,
        data: ByteSource,
        wrong: Wrong,
        dtype: npt.DTypeLike,
        shape: tuple[int, ...],
        *,
        offset: int = 0,
        is_bfloat16: bool = False,
    ) -> LazyTensor:
        """Return a tensor whose elements lie in the order of its axes, those of the last one beside each other."""
        kind = np.dtype(dtype)
        strides = tuple(kind.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return cls(where, data, wrong, kind, shape, strides, offset, is_bfloat16)

    @classmethod
    def of(cls, where: str, values: Array, wrong: Wrong, *, is_bfloat16: bool = False) -> LazyTensor:
        """Return an array in memory as a tensor."""
        content = StoredBytes(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return cls.contiguous(where, content, wrong, values.dtype, values.shape, is_bfloat16=is_bfloat16)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def num_bits(self) -> int:
        """Bits of one element."""
        return self.dtype.itemsize * 8

    @property
    def transposed(self) -> LazyTensor:
        """This tensor's elements with the order of axes reversed; nothing is read."""
        return replace(self, shape=self.shape[::-1], strides=self.strides[::-1])

    @property
    def is_scattered(self) -> bool:
        """Whether the elements of a row of a matrix lie far from one another, as in a transposed one."""
        return len(self.shape) == 2 and self.strides[1] != self.dtype.itemsize

    def gathered(self) -> LazyTensor:
        """Return a matrix in memory whose rows are contiguous."""
        return LazyTensor.of(self.where, self._elements(self.dtype), self.wrong, is_bfloat16=self.is_bfloat16)

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> LazyTensor:
        """Return a part, by whole numbers from 0 and slices with a step of 1; nothing is read."""
        indices = index if isinstance(index, tuple) else (index,)
        offset, shape, strides = self.offset, list(self.shape[len(indices) :]), list(self.strides[len(indices) :])
        kept: list[tuple[int, int]] = []
        for length, stride, one in zip(self.shape, self.strides, indices, strict=False):
            start, stop, _ = one.indices(length) if isinstance(one, slice) else (one, one + 1, 1)
            if not 0 <= start <= stop <= length:
                raise IndexError(f"{self.where}: {one} of {length}")
            offset += start * stride
            kept += [(stop - start, stride)] if isinstance(one, slice) else []
        return replace(
            self,
            offset=offset,
            shape=(*(length for length, _ in kept), *shape),
            strides=(*(stride for _, stride in kept), *strides),
        )

    def read(self, dtype: npt.DTypeLike = np.float64) -> Array:
        """Read the elements into an array of their own, contiguous.

        Raises:
            HeadgateError: Made by `wrong`, if the file has changed or is cut off.
        """
        return self._widened(self._elements(dtype), dtype)

    def rows(self, index: Index, dtype: npt.DTypeLike = np.float64) -> Array:
        """Read the parts at some places of the first axis, as `read`: a slice, or int64 ``[n]`` from 0."""
        if isinstance(index, slice):
            return self[index].read(dtype)
        found: Array = np.empty((len(index), *self.shape[1:]), self.dtype if self.is_bfloat16 else dtype)
        with self.data.opened() as read_into:
            if self.is_scattered and len(index) > 1 and self.strides[0] == self.dtype.itemsize:
                self._fill_columns(read_into, found, index)
            else:
                for out, place in zip(found, index.tolist(), strict=True):
                    self._fill(read_into, out, self.offset + place * self.strides[0], self.strides[1:])
        return self._widened(found, dtype)

    def expect(self, shape: tuple[int, ...], why: str) -> LazyTensor:
        """Return itself if it has the shape.

        Raises:
            HeadgateError: Made by `wrong`, if not; `why` says where the expected shape comes from.
        """
        if self.shape != shape:
            hint = "; it is the other way round" if self.shape == shape[::-1] else ""
            raise self.wrong(f"{self.where}: expected the shape {list(shape)} ({why}), got {list(self.shape)}{hint}")
        return self

    def _elements(self, dtype: npt.DTypeLike) -> Array:
        found: Array = np.empty(self.shape, self.dtype if self.is_bfloat16 else dtype)
        with self.data.opened() as read_into:
            self._fill(read_into, found, self.offset, self.strides)
        return found

    def _widened(self, found: Array, dtype: npt.DTypeLike) -> Array:
        if not self.is_bfloat16:
            return found
        wide = np.left_shift(found, 16, dtype=np.uint32).view(np.float32)
        return np.asarray(wide.astype(dtype, copy=False)).reshape(found.shape)

    def _fill(self, read_into: ReadInto, out: Array, offset: int, strides: tuple[int, ...]) -> None:
        """Read elements into `out`: by halves of the widest axis, until little that is not wanted is read with them."""
        if not out.size:
            return
        item = self.dtype.itemsize
        extent = item + sum((length - 1) * stride for length, stride in zip(out.shape, strides, strict=True))
        if extent <= min(max(2 * out.size * item, _NEAR_BYTES), _MOST_BYTES):
            memory = np.empty(extent, np.uint8)
            read_into(offset, memory)
            out[...] = np.ndarray(out.shape, self.dtype, memory.data, strides=strides)
            return
        if out.ndim == 1 and strides[0] > _NEAR_BYTES:
            self._fill_apart(read_into, out, offset, strides[0])
            return
        axis = max(range(out.ndim), key=lambda each: (out.shape[each] > 1) * strides[each])
        half = out.shape[axis] // 2
        before = (slice(None),) * axis
        self._fill(read_into, out[(*before, slice(None, half))], offset, strides)
        self._fill(read_into, out[(*before, slice(half, None))], offset + half * strides[axis], strides)

    def _fill_apart(self, read_into: ReadInto, out: Array, offset: int, stride: int) -> None:
        """Read elements that lie far from one another."""
        item = self.dtype.itemsize
        memory = np.empty(item * len(out), np.uint8)
        for number in range(len(out)):
            read_into(offset + number * stride, memory[number * item : (number + 1) * item])
        out[...] = memory.view(self.dtype)

    def _fill_columns(self, read_into: ReadInto, out: Array, index: npt.NDArray[np.int64]) -> None:
        """Read several rows of a scattered matrix, which are columns in the file, with all between them."""
        item, stride, count = self.dtype.itemsize, self.strides[1], self.shape[1]
        first = int(index.min())
        width = int(index.max()) + 1 - first
        if width * item > _NEAR_BYTES * len(index):
            for row, place in zip(out, index.tolist(), strict=True):
                self._fill(read_into, row, self.offset + place * item, (stride,))
            return
        step = max(1, _COLUMN_BYTES // stride)
        memory = np.empty((step - 1) * stride + width * item, np.uint8)
        for start in range(0, count, step):
            height = min(step, count - start)
            part = memory[: (height - 1) * stride + width * item]
            read_into(self.offset + start * stride + first * item, part)
            block: Array = np.ndarray((height, width), self.dtype, part.data, strides=(stride, item))
            out[:, start : start + height] = block[:, index - first].T


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The content of a file.

    Attributes:
        path: The file.
        tensors: By name.
        texts: Metadata, and strings between the tensors.
        wrong: Makes its errors.
    """

    path: Path
    tensors: Mapping[str, LazyTensor]
    texts: Mapping[str, str]
    wrong: Wrong

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> LazyTensor:
        """Return the tensor.

        Raises:
            HeadgateError: Made by `wrong`, if there is none of that name; the message lists those there are.
        """
        if name not in self.tensors:
            there = ", ".join(list(self.tensors)[:20]) or "none"
            raise self.wrong(f"{self.path}: expected a tensor {name!r}, found {there}")
        return self.tensors[name]

    def get(self, name: str) -> LazyTensor | None:
        """Return the tensor, or None if there is none of that name."""
        return self.tensors.get(name)

    def number(self, name: str) -> float:
        """Return the one element of a tensor of any shape."""
        tensor = self[name]
        if tensor.size != 1:
            raise self.wrong(f"{tensor.where}: expected one number, got the shape {list(tensor.shape)}")
        return float(tensor.read().reshape(()))


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@contextmanager
def reading_safetensors(path: str | os.PathLike[str], wrong: type[HeadgateError], what: str) -> Iterator[TensorFile]:
    """Open a file of safetensors that headgate wrote; whatever is wrong with it is an error that names it.

    Args:
        path: The file.
        wrong: The error.
        what: Names what is in it, such as ``probe``.

    Raises:
        HeadgateError: `wrong`, if it is not there, cannot be read, or is damaged, and on any error of the block.
    """
    place = Path(path)
    if not place.is_file():
        raise wrong(f"{place}: no such file")
    try:
        file = open_safetensors(place, wrong)
    except OSError as error:
        raise wrong(f"{place}: cannot be read: {error}") from error
    with refusing(place, wrong, f"not a file of a {what}, or damaged"):
        yield file


def open_safetensors(path: Path, wrong: Wrong) -> TensorFile:
    """Open a file of safetensors. Tensors of types that numpy has not, such as flags and float8, are left out.

    Raises:
        HeadgateError: Made by `wrong`, if it is of another format, damaged or cut off.
        OSError: If it cannot be read.
    """
    file = StoredFile(path, wrong)
    what = "not a safetensors file, or it is cut off or damaged"
    length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    if not 0 < length <= min(file.size - _LENGTH_BYTES, _MAX_HEADER):
        raise wrong(f"{path}: {what}: {file.size} bytes, and a header of {length}")
    with refusing(path, wrong, what):
        header = msgspec.json.decode(file.read(_LENGTH_BYTES, length), type=dict[str, Any])
        texts = msgspec.convert(header.pop("__metadata__", None) or {}, dict[str, str])
        entries = msgspec.convert(header, dict[str, _Entry])
        _check_places(entries, file.size - _LENGTH_BYTES - length)
    tensors = {
        name: LazyTensor.contiguous(
            f"{path}: tensor {name!r}",
            file,
            wrong,
            _CODES[entry.dtype],
            entry.shape,
            offset=_LENGTH_BYTES + length + entry.data_offsets[0],
            is_bfloat16=entry.dtype == "BF16",
        )
        for name, entry in entries.items()
        if entry.dtype in _CODES
    }
    return TensorFile(path, tensors, texts, wrong)


def _check_places(entries: Mapping[str, _Entry], num_bytes: int) -> None:
    """Check that tensors lie side by side, without gaps, up to the end of the file, and are as large as they say."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].data_offsets):
        start, stop = entry.data_offsets
        if start != end or stop < start or min(entry.shape, default=0) < 0:
            raise ValueError(f"tensor {name!r} of the shape {list(entry.shape)} lies at {start} to {stop}")
        size = (
            np.dtype(_CODES[entry.dtype]).itemsize * math.prod(entry.shape) if entry.dtype in _CODES else stop - start
        )
        if size != stop - start:
            raise ValueError(f"tensor {name!r} of the shape {list(entry.shape)} has {stop - start} bytes, not {size}")
        end = stop
    if end != num_bytes:
        raise ValueError(f"{num_bytes} bytes of {end}")


def open_npy(path: Path, wrong: Wrong) -> LazyTensor:
    """Open a file of one array of NumPy.

    Raises:
        HeadgateError: Made by `wrong`, if it is damaged, cut off, or holds anything but numbers.
        OSError: If it cannot be read.
    """
    file = StoredFile(path, wrong)
    with refusing(path, wrong, "not an array of NumPy, or it is cut off or damaged"):
        header = io.BytesIO(file.read(0, MAX_NPY_HEADER))
        return array_of(str(path), wrong, header, file, 0, file.size)


def array_of(where: str, wrong: Wrong, header: IO[bytes], source: ByteSource, start: int, size: int) -> LazyTensor:
    """Return the array that NumPy wrote at `start` of a source, in `size` bytes, as its header says; nothing is read.

    Raises:
        HeadgateError: Made by `wrong`, if the header says another size, or the elements are not numbers.
        Exception: Nearly any other, for a header that is damaged; see `refusing`.
    """
    npy: Any = np.lib.format  # (whose functions have no types)
    read = npy.read_array_header_1_0 if npy.read_magic(header) == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, dtype = read(header)
    if dtype.hasobject:
        raise wrong(f"{where}: holds pickled objects, which are not loaded; save plain arrays by numpy.savez")
    if dtype.kind not in "fiu":
        raise wrong(f"{where}: expected numbers, got elements of type {dtype}")
    if min(shape, default=0) < 0 or header.tell() + dtype.itemsize * math.prod(shape) != size:
        raise wrong(
            f"{where}: cut off or damaged: {size} bytes, and its header says {dtype} of the shape {list(shape)}"
        )
    order = tuple(shape[::-1] if is_fortran else shape)
    found = LazyTensor.contiguous(where, source, wrong, dtype, order, offset=start + header.tell())
    return found.transposed if is_fortran else found
