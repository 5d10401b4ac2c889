"""Rows on local disk: where a consumer's rows wait when its queue in memory is full."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headgate.capture.schema.config import MIB
from headgate.capture.schema.consumer import RowBlock
from headgate.capture.schema.errors import ConfigError, ConsumerError

SEGMENT_BYTES = 256 * MIB
"""Size at which a new segment begins: disk space is given back segment by segment."""


@dataclass(frozen=True, slots=True)
class SpilledBlocks:
    """Blocks whose rows are in a spill file.

    Attributes:
        blocks: As they were, with rows on the meta device: shape and dtype only.
        num_bytes: Bytes of the rows.
    """

    blocks: tuple[RowBlock, ...]
    num_bytes: int
    _segment: _Segment
    _offset: int


class _Segment:
    """One nameless file. It takes `SEGMENT_BYTES`, and its disk space is free again once all of that was read."""

    def __init__(self, folder: str | None) -> None:
        # Never has a name, or loses it at once: a killed process leaves nothing behind.
        self.file = tempfile.TemporaryFile(dir=folder, prefix="headgate-spill-", buffering=0)  # noqa: SIM115
        self.size = 0
        self.num_pending = 0


class SpillFile:
    """First in, first out. The dispatch thread stores; the consumer's thread loads; either discards.

    Rows are stored as their raw bytes in segments, so that disk space is given back while the queue still spills.
    The lock guards the segments' counters and is not held while rows are written or read.

    Args:
        folder: Where; the system's temporary folder if None.
        segment_bytes: Size at which a new segment begins.

    Raises:
        ConfigError: If no file can be made there.
    """

    def __init__(self, folder: str | None, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._is_closed = False
        try:
            self._current = _Segment(folder)
        except OSError as error:
            where = folder or tempfile.gettempdir()
            raise ConfigError(f"capture.spill_dir: cannot write to {where}: {error}") from error

    @property
    def pending_bytes(self) -> int:
        """Bytes stored and not yet loaded or discarded."""
        return self._pending_bytes

    def store(self, blocks: Sequence[RowBlock]) -> SpilledBlocks:
        """Write the rows of `blocks`.

        Raises:
            OSError: If the disk is full or failing; nothing is stored then.
        """
        segment = self._open_segment()
        start = offset = segment.size
        try:
            for block in blocks:
                offset += _write(segment.file.fileno(), _bytes_of(block.rows.contiguous()), offset)
        except OSError:
            segment.file.truncate(start)  # a full disk gets back what did not help
            raise
        stripped = tuple(replace(block, rows=torch.empty_like(block.rows, device="meta")) for block in blocks)
        with self._lock:
            segment.size = offset
            segment.num_pending += 1
            self._pending_bytes += offset - start
        return SpilledBlocks(stripped, offset - start, segment, start)

    def load(self, spilled: SpilledBlocks) -> tuple[RowBlock, ...]:
        """Read rows back, once; their disk space is free afterwards.

        Raises:
            OSError: If the disk fails.
            ConsumerError: If rows are missing from the file.
        """
        try:
            offset = spilled._offset
            blocks = []
            for block in spilled.blocks:
                rows = torch.empty(block.rows.shape, dtype=block.rows.dtype)
                offset += _read(spilled._segment.file.fileno(), _bytes_of(rows), offset)
                blocks.append(replace(block, rows=rows))
            return tuple(blocks)
        finally:
            self.discard(spilled)

    def discard(self, spilled: SpilledBlocks) -> None:
        """Give up rows that nobody will load."""
        segment = spilled._segment
        with self._lock:
            segment.num_pending -= 1
            self._pending_bytes -= spilled.num_bytes
            if segment.num_pending == 0 and (self._is_closed or segment is not self._current):
                segment.file.close()

    def close(self) -> None:
        """Store no more; stored rows can still be loaded, and their disk space is free after that."""
        with self._lock:
            self._is_closed = True
            if self._current.num_pending == 0:
                self._current.file.close()

    def _open_segment(self) -> _Segment:
        """Return the segment to write to. Only the dispatch thread replaces it."""
        with self._lock:
            segment = self._current
            if segment.num_pending == 0:
                segment.file.truncate(0)
                segment.size = 0
            if segment.size < self._segment_bytes:
                return segment
        fresh = _Segment(self._folder)
        with self._lock:
            full, self._current = self._current, fresh
            if full.num_pending == 0:
                full.file.close()
        return fresh


def _bytes_of(rows: Tensor) -> memoryview:
    """View the memory of contiguous `rows` as bytes, since numpy has no bf16."""
    return memoryview(rows.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write(descriptor: int, data: memoryview, offset: int) -> int:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)
    return written


def _read(descriptor: int, data: memoryview, offset: int) -> int:
    read = 0
    while read < len(data):
        count = os.preadv(descriptor, [data[read:]], offset + read)
        if count == 0:
            raise ConsumerError(f"the spill file ends {len(data) - read} bytes early")
        read += count
    return read
