"""Copies of many runs of rows by one call of the CUDA driver, where the runs are as long and as far apart.

The rows of a step lie at the same slots of every site's ring. PyTorch copies what is not contiguous by a kernel, or a
run at a time: 34 sites take the step thread 34 calls.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.errors import UnsupportedError

MAX_PITCH = (1 << 31) - 1
"""Bytes from one run to the next that the driver takes."""

_HOST, _DEVICE = 1, 2


class Rectangle(NamedTuple):
    """Runs of rows, one behind the other in the target.

    Attributes:
        start: Row of the target at which the first run begins.
        row: Row of the source at which it begins.
        num_rows: Rows of each run.
        num_runs: How many there are.
        distance: Rows of the source from the beginning of one run to that of the next.
    """

    start: int
    row: int
    num_rows: int
    num_runs: int
    distance: int


def rectangles_of(
    index: Int64Array, starts: Int64Array, *, max_distance: int, most: int | None = None
) -> list[Rectangle] | None:
    """Put runs together that are as long and as far apart, each behind the one before it.

    Args:
        index: Rows of the source, int64 ``[N]``.
        starts: Where runs of consecutive numbers begin in it, int64, ascending from 0.
        max_distance: Rows that the runs of a rectangle are apart at most; 0: each run is one by itself.
        most: Rectangles that are wanted at most; any number if None.

    Returns:
        None if there are more.
    """
    begins, rows = starts.tolist(), index[starts].tolist()
    stops = [*begins[1:], len(index)]
    found: list[Rectangle] = []
    first = 0
    while first < len(rows):
        if len(found) == most:
            return None
        length, distance, stop = stops[first] - begins[first], 0, first + 1
        while stop < len(rows) and stops[stop] - begins[stop] == length:
            apart = rows[stop] - rows[stop - 1]
            if not length <= apart <= max_distance or apart != (distance or apart):
                break
            distance, stop = apart, stop + 1
        found.append(Rectangle(begins[first], rows[first], length, stop - first, distance))
        first = stop
    return found


class _Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of the driver's header."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_uint),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_void_p),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_uint),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_void_p),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


class PitchedCopier:
    """Starts copies of rectangles from the device into host memory. Step thread only.

    Attributes:
        max_distance: Rows that the runs of a rectangle may be apart.

    Args:
        source_FD: ``[F, D]`` on the device.
        stream: Where they run.

    Raises:
        UnsupportedError: If the driver has no such copies.
    """

    def __init__(self, source_FD: Tensor, stream: torch.cuda.Stream) -> None:
        # It only enqueues. With the lock of Python held: whoever got it meanwhile could keep it for milliseconds.
        try:
            self._copy = ctypes.PyDLL("libcuda.so.1").cuMemcpy2DAsync_v2
        except (OSError, AttributeError) as error:
            raise UnsupportedError(f"capture: needs cuMemcpy2DAsync_v2 of the CUDA driver: {error}") from error
        self._copy.argtypes = (ctypes.POINTER(_Copy2D), ctypes.c_void_p)
        self._source, self._stream = source_FD.data_ptr(), stream.cuda_stream
        self._row_bytes = source_FD.shape[1] * source_FD.element_size()
        self.max_distance = MAX_PITCH // self._row_bytes

    def start(self, rectangle: Rectangle, target_ND: Tensor) -> None:
        """Start the copy of a rectangle into its rows of `target_ND`, which is pinned.

        Raises:
            RuntimeError: If the driver refuses it.
        """
        row_bytes = self._row_bytes
        width = rectangle.num_rows * row_bytes
        about = _Copy2D(
            srcMemoryType=_DEVICE,
            srcDevice=self._source + rectangle.row * row_bytes,
            srcPitch=rectangle.distance * row_bytes,
            dstMemoryType=_HOST,
            dstHost=target_ND.data_ptr() + rectangle.start * row_bytes,
            dstPitch=width,
            WidthInBytes=width,
            Height=rectangle.num_runs,
        )
        if error := self._copy(ctypes.byref(about), self._stream):
            raise RuntimeError(f"capture: the CUDA driver refused to copy {rectangle} off the device: error {error}")
