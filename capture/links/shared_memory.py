"""Staging memory that a worker writes and others read, and how they notify each other without a thread.

A copy into it is followed, on the same stream, by a copy of its number into a word of the memory, which the readers
watch. Each reader writes the number of each lease that it has read into a table of its own, where the step thread finds
it: a lease is free when its number stands in all of them. Readers are capture processes, or threads of the worker.
A capture process shows its counters in memory of the same kind, where its worker reads them.

Shapes: A rows of the arena, D hidden size.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
import weakref
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from headgate.capture.delivery.delivery import DeliveryStats
from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.errors import ConfigError, UnsupportedError
from headgate.capture.staging.device_copy import Copied, DeviceCopier
from headgate.capture.staging.host_rows import Arena, Lease, round_up

_NUMBER = struct.Struct("=q")
_FRAME = struct.Struct("=II")
_CONSUMER_BYTES, _OTHER_BYTES = 8192, 1024
"""More than the counters of a consumer without its name, and those of the process, take; most is for its figures."""
_READS = 10
"""Attempts to read a state that is not written meanwhile; two writes would have to fall into each of them."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(DeliveryStats)


class StatsBoard:
    """Counters in anonymous memory that two processes map: one shows them, the other reads them.

    States lie in two places by turns, each with a checksum: a reader never waits, and takes none that is half written.

    Attributes:
        fd: Of the memory.

    Args:
        instances: The consumers whose counters are shown.
        fd: Of memory that another process has made for the same consumers; None to make it.
    """

    def __init__(self, instances: Iterable[str], fd: int | None = None) -> None:
        self._size = _OTHER_BYTES + sum(_CONSUMER_BYTES + len(name.encode()) for name in instances)
        num_bytes = _NUMBER.size + 2 * (_FRAME.size + self._size)
        if fd is None:
            fd = os.memfd_create("headgate-counters")
            os.ftruncate(fd, num_bytes)
        self.fd = fd
        self._mapped = mmap.mmap(fd, num_bytes)
        self._last = b""
        self._log = SparseLog("counters of a capture process")

    def show(self, stats: DeliveryStats) -> None:
        """Show `stats` from now on. For one thread at a time of one process.

        Raises:
            ValueError: If they are of other consumers than the board was made for.
        """
        data = _encoder.encode(stats)
        if data == self._last:
            return
        if len(data) > self._size:
            self._log.error(f"figures of consumers are left out: with them they take {len(data)} bytes")
            data = _encoder.encode(replace(stats, consumers=tuple(replace(one, figures=()) for one in stats.consumers)))
        if len(data) > self._size:
            raise ValueError(f"counters of {len(data)} bytes do not fit a board of {self._size}")
        number = self._number() + 1
        at = self._place(number)
        self._mapped[at + _FRAME.size : at + _FRAME.size + len(data)] = data
        _FRAME.pack_into(self._mapped, at, len(data), zlib.crc32(data))
        _NUMBER.pack_into(self._mapped, 0, number)
        self._last = data

    def read(self) -> DeliveryStats | None:
        """Return what was shown last; None if nothing was, or it changes all the time."""
        for _ in range(_READS):
            number = self._number()
            if number == 0:
                return None
            at = self._place(number)
            length, checksum = _FRAME.unpack_from(self._mapped, at)
            data = self._mapped[at + _FRAME.size : at + _FRAME.size + min(length, self._size)]
            if zlib.crc32(data) == checksum:
                return _decoder.decode(data)
        return None

    def clear(self) -> None:
        """Show nothing. Call when the process that wrote the counters is gone."""
        _NUMBER.pack_into(self._mapped, 0, 0)

    def close(self) -> None:
        """Close the memory's file; what is mapped stays so."""
        os.close(self.fd)

    def _number(self) -> int:
        number: int = _NUMBER.unpack_from(self._mapped, 0)[0]
        return number

    def _place(self, number: int) -> int:
        return _NUMBER.size + number % 2 * (_FRAME.size + self._size)


MAX_LEASES = 4096
"""Leases that may be out at a time, at most half of it; their numbers are counted modulo this."""

_HEADER = 2
"""int64 words in front of the rows: the last copy that has arrived, whether a process waits; then released leases."""
_ARRIVED, _IS_WAITING, _RELEASED = 0, 1, 2
_PAGE = mmap.PAGESIZE

PROOF_S = 30.0
"""Seconds after which a row that is copied at the start counts as lost."""
FREED_POLL_S = 0.05
"""Interval at which the step thread looks for itself while it waits for the other process to free memory."""
FIRST_POLL_S, LAST_POLL_S = 20e-6, 500e-6
"""Intervals at which a capture process looks whether a copy has arrived, growing from one to the other."""


class SharedMemory:
    """Anonymous memory that processes map: it is gone when all of them are, however they end.

    Attributes:
        memory_fd: Of the memory.
        freed_fd: An eventfd that is written to when a lease was released and a process waits.
        words: int64 ``[_HEADER + num_readers * MAX_LEASES]``: see there.

    Args:
        num_bytes: Of the rows.
        num_readers: Tables of released leases.
        fds: Of memory that another process has made; None to make it.
    """

    def __init__(self, num_bytes: int, num_readers: int = 1, fds: tuple[int, int] | None = None) -> None:
        num_words = _HEADER + num_readers * MAX_LEASES
        offset = -(-8 * num_words // _PAGE) * _PAGE
        if fds is None:
            self.memory_fd = os.memfd_create("headgate-staging")
            os.ftruncate(self.memory_fd, offset + num_bytes)
            self.freed_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.memory_fd, self.freed_fd = fds
        self._mapped = mmap.mmap(self.memory_fd, offset + num_bytes)
        self._pinned: weakref.finalize[..., object] | None = None
        self.words: Int64Array = np.frombuffer(self._mapped, np.int64, num_words)
        self._released = self.words[_RELEASED:].reshape(num_readers, MAX_LEASES)
        self._bytes = torch.frombuffer(self._mapped, dtype=torch.uint8, offset=offset, count=num_bytes)

    def rows(self, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """The rows, ``[A, D]``."""
        row_bytes = hidden_size * dtype.itemsize
        num_rows = len(self._bytes) // row_bytes
        return self._bytes[: num_rows * row_bytes].view(dtype).view(num_rows, hidden_size)

    def pin(self) -> None:
        """Let GPUs copy into the rows and the words by themselves.

        Raises:
            ConfigError: If CUDA does not allow it.
        """
        address, size = self.words.ctypes.data, len(self._mapped)
        error = torch.cuda.cudart().cudaHostRegister(address, size, 0)  # type: ignore[no-untyped-call]
        if int(error) != 0:
            raise ConfigError(
                f"capture.staging_bytes: CUDA cannot pin {size} bytes of shared memory (error {int(error)}); lower it, "
                "or set capture.processes to 0"
            )

        self._pinned = weakref.finalize(self, _unregister, address)

    def unpin(self) -> None:
        """Undo `pin`, if it was done; it also is undone before the memory goes, whose address may be used again."""
        if self._pinned is not None:
            self._pinned()

    def close(self) -> None:
        """Unpin the memory, and close its files; what is mapped stays so."""
        self.unpin()
        os.close(self.memory_fd)
        os.close(self.freed_fd)

    @property
    def num_readers(self) -> int:
        """Tables of released leases."""
        return len(self._released)

    def is_released(self, number: int) -> bool:
        """Whether every reader has given the lease of that number back."""
        at = number % MAX_LEASES
        return all(int(table[at]) == number for table in self._released)

    def release(self, number: int, reader: int) -> None:
        """Give the lease of that number back, for that reader."""
        self._released[reader, number % MAX_LEASES] = number
        if self.words[_IS_WAITING]:
            os.eventfd_write(self.freed_fd, 1)

    def has_arrived(self, number: int) -> bool:
        """Whether the copies of the lease of that number, and of all before it, have arrived."""
        behind = (int(self.words[_ARRIVED]) - number) % MAX_LEASES
        return behind < MAX_LEASES // 2


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class SharedArena(Arena):
    """Leases of memory that another process releases. Step thread only, but for `num_leased`.

    Args:
        num_rows: See `Arena`.
        shared: The memory.
    """

    def __init__(self, num_rows: int, shared: SharedMemory) -> None:
        super().__init__(num_rows)
        self._shared = shared
        self._last_number = 0
        self._gone: set[int] = set()
        """Readers that release nothing."""

    @property
    def is_served(self) -> bool:
        """Whether a process that releases is alive."""
        return len(self._gone) < self._shared.num_readers

    def try_lease(self, num_rows: int) -> Lease | None:
        """See `Arena.try_lease`."""
        with self._freed:
            self._reclaim()
            lease = self._lease(round_up(num_rows)) if len(self._leases) < MAX_LEASES // 2 else None
            if lease is not None:
                self._last_number += 1
                lease.number = self._last_number
            return lease

    def lease(self, num_rows: int, patience_s: float) -> Lease | None:
        """See `Arena.lease`; also None once no process is left that could release anything."""
        words = self._shared.words
        words[_IS_WAITING] = 1
        try:
            deadline = time.monotonic() + patience_s
            while (lease := self.try_lease(num_rows)) is None and self.is_served:
                self._release_for_gone()
                seen, left_s = self._num_released, deadline - time.monotonic()
                if left_s <= 0:
                    return None
                select.select([self._shared.freed_fd], [], [], min(left_s, FREED_POLL_S))
                if self._has_freed(seen):
                    deadline = time.monotonic() + patience_s
            return lease
        finally:
            words[_IS_WAITING] = 0

    def _has_freed(self, seen: int) -> bool:
        with suppress(BlockingIOError):
            os.eventfd_read(self._shared.freed_fd)
        with self._freed:
            self._reclaim()
            return self._num_released != seen

    def release(self, lease: Lease) -> None:
        """Give back a lease that was not handed over to anybody."""
        for reader in range(self._shared.num_readers):
            self._shared.release(lease.number, reader)

    def release_for(self, lease: Lease, reader: int) -> None:
        """Give back a lease that was not handed over to that reader."""
        self._shared.release(lease.number, reader)

    def leave(self, reader: int) -> None:
        """Note that a reader is gone: the process that waits for memory takes back what it holds. Any thread."""
        self._gone.add(reader)

    def enter(self, reader: int) -> None:
        """Take back what a reader held that was gone, and note that another is there in its place."""
        self._release_all(reader)
        self._gone.discard(reader)

    def _release_for_gone(self) -> None:
        for reader in tuple(self._gone):
            self._release_all(reader)

    def _release_all(self, reader: int) -> None:
        with self._freed:
            for lease in self._leases:
                self._shared.release(lease.number, reader)

    def _reclaim(self) -> None:
        while self._leases and self._shared.is_released(self._leases[0].number):
            self._leases.popleft()
            self._num_released += 1


class SharedRows:
    """The memory as its reader sees it: what `StagedRows` needs of it.

    Attributes:
        is_over: Whether the process that copies is gone, so that nothing arrives any more.

    Args:
        shared: The memory.
        reader: Which reader this is.
    """

    def __init__(self, shared: SharedMemory, reader: int = 0) -> None:
        self._shared = shared
        self._reader = reader
        self.is_over = False

    def release(self, lease: Lease) -> None:
        """Give a lease back."""
        self._shared.release(lease.number, self._reader)

    def await_copy(self, number: int) -> None:
        """Wait until the copies of the lease of that number have arrived.

        Raises:
            ConnectionError: If they never will.
        """
        pause_s = FIRST_POLL_S
        while not self._shared.has_arrived(number):
            if self.is_over:
                raise ConnectionError("the engine is gone, and with it the rows that were on their way")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LAST_POLL_S)


class NumberedCopy:
    """A copy that a number announces. Implements `Copied`."""

    __slots__ = ("_number", "_rows")

    def __init__(self, rows: SharedRows, number: int) -> None:
        self._rows = rows
        self._number = number

    def wait(self) -> None:
        """Wait until the rows are there."""
        self._rows.await_copy(self._number)

    def release(self) -> None:
        """Nothing is held."""


class SharedStaging:
    """Memory with readers that take leases back for themselves. Implements `StagingMemory`.

    Args:
        num_rows: ``A``, before it is rounded down to whole granules.
        hidden_size: ``D``.
        dtype: Of the rows.
        device: Where the forward pass runs.
        num_readers: Of capture processes, and of the worker's own threads.
    """

    def __init__(
        self, num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device, num_readers: int = 1
    ) -> None:
        # Tensors that are made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.num_rows = num_rows
            self.shared = SharedMemory(num_rows * hidden_size * dtype.itemsize, num_readers)
            self.arena = SharedArena(num_rows, self.shared)
            self.rows_AD = self.shared.rows(hidden_size, dtype)[: self.arena.num_rows]
            self._arrived = torch.from_numpy(self.shared.words)[_ARRIVED : _ARRIVED + 1]
            self._numbers = torch.arange(MAX_LEASES, device=device)
        self._rows = SharedRows(self.shared)
        self._is_open = True
        self._is_pinned = device.type == "cuda"
        if self._is_pinned:
            self.shared.pin()

    def announce(self, lease: Lease, copied: Copied, copier: DeviceCopier) -> Copied:
        """See `StagingMemory.announce`: one more copy, of the lease's number, follows those of the rows."""
        self._send_number(lease, copier)
        copied.release()
        return NumberedCopy(self._rows, lease.number)

    def prove(self, copier: DeviceCopier) -> None:
        """Copy a row of known values and its number, as for every step, and see whether they arrive.

        Raises:
            UnsupportedError: If they do not.
        """
        lease = self.arena.try_lease(1)
        assert lease is not None  # noqa: S101  (nothing is leased yet)
        sent = torch.arange(self.rows_AD.shape[1], device=self._numbers.device).to(self.rows_AD.dtype)
        copier.wait_for_forward()
        copier.fetch(sent, self.rows_AD[lease.start])
        self._send_number(lease, copier)
        wait_by = time.monotonic() + PROOF_S
        while not (has_arrived := self.shared.has_arrived(lease.number)) and time.monotonic() < wait_by:
            time.sleep(FIRST_POLL_S)
        if not has_arrived or not torch.equal(self.rows_AD[lease.start], sent.cpu()):
            what = "other values than it was sent" if has_arrived else f"nothing in {PROOF_S:g} s"
            raise UnsupportedError(
                f"capture: a row that {sent.device} copied into shared memory, to prove the way, brought {what}; "
                "set capture.processes to 0, and report it"
            )
        self.arena.release(lease)

    def _send_number(self, lease: Lease, copier: DeviceCopier) -> None:
        at = lease.number % MAX_LEASES
        copier.fetch(self._numbers[at : at + 1], self._arrived)

    def close(self) -> None:
        """Give the memory back, once no copy is under way. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            if self._is_pinned:
                torch.cuda.synchronize(self._numbers.device)
            self.shared.close()
