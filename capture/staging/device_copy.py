"""Copies from the memory of the forward pass into host memory, for each kind of device.

Shapes: F rows of a flat block of the ring (the slots of all sites of one shape), D width of its rows.

On CUDA, many runs of rows that are as long and as far apart are copied by one call of the driver. The rows of a step
lie at the same slots of every site's ring. PyTorch copies what is not contiguous by a kernel, or a run at a time: 34
sites take the step thread 34 calls.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headgate.capture.planning.step_plan import changes
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.config import MIB
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.staging.readouts import OutputBuffers, ReadoutJob, RowReader

MAX_PITCH = (1 << 31) - 1
"""Bytes from one run to the next that the driver takes."""

_HOST, _DEVICE = 1, 2


class Rectangle(NamedTuple):
    """Runs of rows, consecutive in the target.

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
    """Put runs together that are as long and as far apart, each after the one before it.

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
        # It only enqueues. With the lock of Python held: a thread that got it meanwhile could keep it for milliseconds.
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


class RowRun(NamedTuple):
    """Rows of one block of the ring that are copied to consecutive host memory.

    Attributes:
        block: Of the ring.
        first: Where their indices begin among those of the part.
        target_ND: Host memory of their shape.
    """

    block: int
    first: int
    target_ND: Tensor

    @property
    def stop(self) -> int:
        """Where their indices end."""
        return self.first + len(self.target_ND)


PACK_BYTES = 32 * MIB
"""Size of each of the two buffers that rows are packed into."""
NUM_HOST_BUFFERS = 4
"""Steps that may be under way before the step thread has to wait for the oldest one's small copies."""
FEW_COPIES = 4
"""Number of copies that take the step thread as long as packing does."""
MOST_RUNS = 1024
"""Runs among which a few copies are looked for: more are packed at once."""
RUN_BYTES = MIB // 4
"""A run of this size takes the bus as long as its copy takes the step thread: shorter ones are packed, even if the
forward has to wait for a buffer."""


class Copied(Protocol):
    """A copy into host memory that may still be under way."""

    def wait(self) -> None:
        """Wait until the rows are there."""
        ...

    def release(self) -> None:
        """Give its event back. Nothing may wait for it afterwards."""
        ...


class DeviceCopier(Protocol):
    """Moves slots to the device and rows off it. Step thread only, except for `Copied`.

    Attributes:
        device_bytes: Memory that it has on the device.
    """

    device_bytes: int

    def slots_to_fill(self) -> Int64Array:
        """Host memory for the next slots, int64 ``[max_tokens]``."""
        ...

    def send_slots(self, count: int) -> None:
        """Bring the first `count` slots that were filled in to the device, before the next forward."""
        ...

    def reserve(self, start: int, stop: int) -> None:
        """Let the next forward wait until slots ``start : stop`` of the ring are free, if they are not yet."""
        ...

    def wait_for_forward(self) -> None:
        """Order all copies that follow after the forward that was launched."""
        ...

    def fetch(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` from the device into `target`, which is host memory, ahead of the next `gather`."""
        ...

    def index_to_fill(self) -> Int64Array:
        """Host memory for the next flat row indices, int64 ``[max_part_rows]``."""
        ...

    def gather(self, runs: Sequence[RowRun]) -> Copied:
        """Copy rows at the indices into host memory; no run if the part has readouts alone."""
        ...

    def read_out(self, jobs: Sequence[ReadoutJob], target_V: Tensor) -> frozenset[int]:
        """Compute readouts of rows at the indices, ahead of `gather`, and copy the outputs into host memory.

        Args:
            jobs: At least one, in the order of their targets.
            target_V: float32, where the outputs of all jobs go; gaps between them are undefined.

        Returns:
            Groups that failed; see `RowReader.run`.
        """
        ...

    def free_after_copy(self, start: int, stop: int) -> None:
        """Free slots ``start : stop`` once the copies that were started so far are done."""
        ...


class HostCopier:
    """For a forward pass on the CPU: everything has happened when the call returns."""

    def __init__(
        self, blocks_FD: Sequence[Tensor], slots: Tensor, max_part_rows: int, *, reads_out: bool = False
    ) -> None:
        self._blocks_FD = tuple(blocks_FD)
        self._slots: Int64Array = slots.numpy()
        self._index = torch.empty(max_part_rows, dtype=torch.int64)
        self._reader = RowReader(blocks_FD, max_part_rows) if reads_out else None
        self.device_bytes = 0 if self._reader is None else self._reader.device_bytes

    def slots_to_fill(self) -> Int64Array:
        return self._slots

    def send_slots(self, count: int) -> None:
        pass

    def reserve(self, start: int, stop: int) -> None:
        pass

    def wait_for_forward(self) -> None:
        pass

    def fetch(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def index_to_fill(self) -> Int64Array:
        index: Int64Array = self._index.numpy()
        return index

    def gather(self, runs: Sequence[RowRun]) -> Copied:
        for run in runs:
            index = self._index[run.first : run.stop]
            torch.index_select(self._blocks_FD[run.block], 0, index, out=run.target_ND)
        return _DONE

    def read_out(self, jobs: Sequence[ReadoutJob], target_V: Tensor) -> frozenset[int]:
        assert self._reader is not None  # noqa: S101  (there are jobs)

        def put(target: int, found: Tensor) -> None:
            target_V[target : target + found.numel()].view(found.shape).copy_(found)

        return self._reader.run(jobs, self._index, put)

    def free_after_copy(self, start: int, stop: int) -> None:
        pass


class _DoneCopy:
    def wait(self) -> None:
        pass

    def release(self) -> None:
        pass


_DONE = _DoneCopy()


class _Pack(NamedTuple):
    """A buffer on the device that scattered rows are packed into, and the event of its last copy.

    Attributes:
        rows_PD: The buffer, as rows of each block of the ring.
        copied: The event.
    """

    rows_PD: tuple[Tensor, ...]
    copied: torch.cuda.Event


class CudaCopier:
    """For a forward pass on a GPU: a side stream copies while the next forward runs.

    The side stream runs no kernel, only copies. On an H200, once kernels of two streams of a process have overlapped,
    each of its kernels starts 0.2 to 0.4 us later from then on, in CUDA graphs too, until another process uses the
    GPU: 5 to 15 % of a decode step, with captures or without (``tests/benchmarks/bench_side_stream.py``). So a few
    rectangles of rows, or many long runs, are copied from where they are; others are packed first by the stream of the
    forward, which takes it microseconds. Readouts, too, are computed there.

    All memory is allocated here; a step allocates none. Each stream works in order, so events are needed only between
    them; host buffers that the GPU reads are taken in turn, each with an event.

    Args:
        blocks_FD: Of the ring.
        slots: int64 ``[max_tokens]`` on the device.
        max_part_rows: Upper limit of rows in one part.
        reads_out: Whether there are readouts.
    """

    def __init__(
        self, blocks_FD: Sequence[Tensor], slots: Tensor, max_part_rows: int, *, reads_out: bool = False
    ) -> None:
        device = slots.device
        self._blocks_FD = tuple(blocks_FD)
        self._row_bytes = tuple(block.shape[1] * block.element_size() for block in blocks_FD)
        self._slots = slots
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # ROCm has no such driver: there, runs are copied one by one.
        self._pitched = [PitchedCopier(block, self._side) if torch.version.cuda else None for block in blocks_FD]
        self._launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._host_slots = _HostBuffers(len(slots))
        self._host_index = _HostBuffers(max_part_rows)
        self._index = torch.empty(max_part_rows, dtype=torch.int64, device=device)
        pack_rows = [min(max(PACK_BYTES // size, 1), max_part_rows) for size in self._row_bytes]
        pack_bytes = max(count * size for count, size in zip(pack_rows, self._row_bytes, strict=True))
        packs = torch.empty(2, -(-pack_bytes // 16) * 16, dtype=torch.uint8, device=device)
        self._packs = deque(self._pack(pack, pack_rows) for pack in packs)
        self._leaving: deque[tuple[int, int, torch.cuda.Event]] = deque()
        self._idle_events: deque[torch.cuda.Event] = deque()
        self.device_bytes = self._index.nbytes + packs.nbytes
        self._readouts = CudaReadouts(self._side, blocks_FD, max_part_rows) if reads_out else None
        self.device_bytes += 0 if self._readouts is None else self._readouts.device_bytes

    def _pack(self, pack: Tensor, pack_rows: Sequence[int]) -> _Pack:
        rows_PD = tuple(
            pack[: count * size].view(block.dtype).view(count, -1)
            for count, size, block in zip(pack_rows, self._row_bytes, self._blocks_FD, strict=True)
        )
        return _Pack(rows_PD, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def slots_to_fill(self) -> Int64Array:
        return self._host_slots.next()

    def send_slots(self, count: int) -> None:
        self._host_slots.send(self._slots, count, self._compute_stream())

    def reserve(self, start: int, stop: int) -> None:
        while self._leaving and self._leaving[0][2].query():  # type: ignore[no-untyped-call]
            self._idle_events.append(self._leaving.popleft()[2])
        for begin, end, left in self._leaving:
            if begin < stop and start < end:
                self._compute_stream().wait_event(left)

    def wait_for_forward(self) -> None:
        self._launched.record(self._compute_stream())
        self._side.wait_event(self._launched)

    def fetch(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)

    def index_to_fill(self) -> Int64Array:
        return self._host_index.next()

    def gather(self, runs: Sequence[RowRun]) -> Copied:
        for run in runs:
            rectangles = self._rectangles(run)
            if rectangles is None:
                self._copy_packed(run)
            else:
                self._copy_rectangles(rectangles, run)
        return _CudaCopied(self._record(), self._idle_events)

    def _rectangles(self, run: RowRun) -> list[Rectangle] | None:
        """Find a few copies that bring the rows of `run`, or many if each brings much; None if there are none."""
        index, pitched = self._host_index.current_buffer()[run.first : run.stop], self._pitched[run.block]
        starts, num_bytes = run_starts(index), len(index) * self._row_bytes[run.block]
        is_worth_many = num_bytes > len(self._packs) * PACK_BYTES and num_bytes >= len(starts) * RUN_BYTES
        if len(starts) > MOST_RUNS and not is_worth_many:
            return None
        max_distance = 0 if pitched is None else pitched.max_distance
        return rectangles_of(index, starts, max_distance=max_distance, most=None if is_worth_many else FEW_COPIES)

    def _copy_rectangles(self, rectangles: Sequence[Rectangle], run: RowRun) -> None:
        """Copy rows from where they are."""
        pitched, source_FD, target_ND = self._pitched[run.block], self._blocks_FD[run.block], run.target_ND
        with torch.cuda.stream(self._side):
            for each in rectangles:
                if each.num_runs > 1 and pitched is not None:
                    pitched.start(each, target_ND)
                    continue
                stop = each.start + each.num_rows
                source = source_FD[each.row : each.row + each.num_rows]
                target_ND[each.start : stop].copy_(source, non_blocking=True)

    def _copy_packed(self, run: RowRun) -> None:
        """Pack rows after the forward, in its stream, and copy what was packed.

        With more than two buffers full, the next forward waits for the copies of all but the last two.
        """
        compute = self._compute_stream()
        self._host_index.send(self._index, run.stop, compute)
        index, count = self._index[run.first : run.stop], len(run.target_ND)
        for start in range(0, count, len(self._packs[0].rows_PD[run.block])):
            pack = self._packs[0]
            self._packs.rotate()
            rows_PD = pack.rows_PD[run.block]
            stop = min(start + len(rows_PD), count)
            packed_ND = rows_PD[: stop - start]
            if not pack.copied.query():  # type: ignore[no-untyped-call]
                compute.wait_event(pack.copied)
            torch.index_select(self._blocks_FD[run.block], 0, index[start:stop], out=packed_ND)
            self.wait_for_forward()
            with torch.cuda.stream(self._side):
                run.target_ND[start:stop].copy_(packed_ND, non_blocking=True)
            pack.copied.record(self._side)

    def read_out(self, jobs: Sequence[ReadoutJob], target_V: Tensor) -> frozenset[int]:
        assert self._readouts is not None  # noqa: S101  (there are jobs)
        self._host_index.send(self._index, jobs[-1].stop, self._compute_stream())
        return self._readouts.run(jobs, self._index, target_V, self.wait_for_forward)

    def free_after_copy(self, start: int, stop: int) -> None:
        self._leaving.append((start, stop, self._record()))

    def _compute_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._slots.device)

    def _record(self) -> torch.cuda.Event:
        event = self._idle_events.popleft() if self._idle_events else torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._side)
        return event


class CudaReadouts:
    """Computes readouts in the stream of the forward, which is the current one, and copies their outputs by another.

    Args:
        side: The stream of the copies.
        blocks_FD: Of the ring.
        max_part_rows: Upper limit of rows in one part.
    """

    def __init__(self, side: torch.cuda.Stream, blocks_FD: Sequence[Tensor], max_part_rows: int) -> None:
        self._side = side
        self._device = blocks_FD[0].device
        self._reader = RowReader(blocks_FD, max_part_rows)
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._target_V = torch.empty(0)
        self._order_copies: Callable[[], None] = lambda: None
        self._buffers = OutputBuffers(self._device, before_use=self._await_copy, copy=self._copy)
        self.device_bytes = self._reader.device_bytes + self._buffers.device_bytes

    def run(
        self, jobs: Sequence[ReadoutJob], index: Tensor, target_V: Tensor, order_copies: Callable[[], None]
    ) -> frozenset[int]:
        """Launch jobs and the copies of their outputs; see `DeviceCopier.read_out`.

        Args:
            jobs: At least one.
            index: int64 on the device.
            target_V: Pinned.
            order_copies: Orders the stream of the copies after everything that was launched.
        """
        self._target_V, self._order_copies = target_V, order_copies
        failed = self._reader.run(jobs, index, self._buffers.put)
        self._buffers.flush()
        self._target_V = torch.empty(0)
        return failed

    def _await_copy(self, buffer: int) -> None:
        if not self._copied[buffer].query():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])

    def _copy(self, buffer: int, outputs: Tensor, target: int) -> None:
        self._order_copies()
        with torch.cuda.stream(self._side):
            self._target_V[target : target + len(outputs)].copy_(outputs, non_blocking=True)
        self._copied[buffer].record(self._side)


def copier_of(blocks_FD: Sequence[Tensor], slots: Tensor, max_part_rows: int, *, reads_out: bool) -> DeviceCopier:
    """Make the copier for the device of the ring; see `CudaCopier` for the arguments."""
    made = CudaCopier if slots.is_cuda else HostCopier
    return made(blocks_FD, slots, max_part_rows, reads_out=reads_out)


def run_starts(index: Int64Array) -> Int64Array:
    """Where in `index`, which has at least one entry, runs of consecutive numbers begin: int64, ascending from 0."""
    return np.concatenate(([0], changes(index - np.arange(len(index)))))


class _CudaCopied:
    """A copy that an event ends. Dispatch thread; a deque's ends are safe to use from two threads.

    Args:
        event: Recorded after the copy.
        idle: Takes the event back.
    """

    __slots__ = ("_event", "_idle")

    def __init__(self, event: torch.cuda.Event, idle: deque[torch.cuda.Event]) -> None:
        self._event = event
        self._idle = idle

    def wait(self) -> None:
        self._event.synchronize()

    def release(self) -> None:
        self._idle.append(self._event)


class _HostBuffers:
    """Pinned int64 buffers that are filled, sent and used again in turn."""

    def __init__(self, size: int) -> None:
        self._buffers = [torch.empty(size, dtype=torch.int64, pin_memory=True) for _ in range(NUM_HOST_BUFFERS)]
        self._sent = [torch.cuda.Event(blocking=True) for _ in range(NUM_HOST_BUFFERS)]  # type: ignore[no-untyped-call]
        self._at = 0

    def next(self) -> Int64Array:
        """The next buffer, once the GPU has read what it held last."""
        self._at = (self._at + 1) % NUM_HOST_BUFFERS
        self._sent[self._at].synchronize()
        return self.current_buffer()

    def current_buffer(self) -> Int64Array:
        """The buffer that `next` returned last."""
        array: Int64Array = self._buffers[self._at].numpy()
        return array

    def send(self, target: Tensor, count: int, stream: torch.cuda.Stream) -> None:
        """Copy the first `count` values of the current buffer into `target`. `stream` is the current one."""
        target[:count].copy_(self._buffers[self._at][:count], non_blocking=True)
        self._sent[self._at].record(stream)
