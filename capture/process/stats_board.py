"""Where a capture process shows its counters: its worker reads them without a word to it."""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from headgate.capture.delivery.delivery import DeliveryStats
from headgate.capture.monitoring.rate_limited_log import SparseLog

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
