"""What waits for one consumer, and which rows may: the overload policy without the threads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from headgate.capture.delivery.completeness import ConsumerRequest
from headgate.capture.delivery.row_packets import Packet
from headgate.capture.delivery.spill_file import SpilledBlocks, SpillFile
from headgate.capture.schema.batch import FinalState
from headgate.capture.schema.config import CaptureConsumerSpec


@dataclass(frozen=True, slots=True)
class Begin:
    """The consumer is to hear of a request."""

    request: ConsumerRequest


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows are to be written.

    Attributes:
        packet: The rows; those of a spilled packet are on the meta device.
        num_bytes: Bytes of the rows, wherever they are.
        spilled: Where they are, if not in memory.
    """

    packet: Packet
    num_bytes: int
    spilled: SpilledBlocks | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """A request got its last row; `final` is None if nobody knows how it ended."""

    request: ConsumerRequest
    final: FinalState | None


@dataclass(frozen=True, slots=True)
class Abandon:
    """The consumer is to let go of a request that failed."""

    request: ConsumerRequest


Item = Begin | Rows | Finish | Abandon


def requests_of(item: Item) -> list[ConsumerRequest]:
    """The requests that `item` is about."""
    return item.packet.requests() if isinstance(item, Rows) else [item.request]


class Backlog:
    """First in, first out; rows are bounded in bytes, everything else is small.

    Rows count until they were freed, that is, until the consumer has returned from taking them. Rows on disk keep
    their place in the queue: once one packet is spilled, those after it are too, until all were taken.

    Not locked: every method is called under the lane's lock.

    Args:
        spec: Queue size and overload policy.
        spill: Where rows go that do not fit, under ``spill``.
    """

    def __init__(self, spec: CaptureConsumerSpec, spill: SpillFile | None) -> None:
        self._limit = spec.queue_bytes
        self._spill = spill
        self._items: deque[Item] = deque()
        self._num_spilled = 0
        self.queued_bytes = 0
        self.dropped_rows = 0
        self.spilled_rows = 0

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._items)

    def has_room(self, num_bytes: int) -> bool:
        """Whether rows of that size may wait in memory; a packet larger than the limit may if it is alone."""
        return self.queued_bytes == 0 or self.queued_bytes + num_bytes <= self._limit

    def append(self, item: Begin | Finish | Abandon) -> None:
        """Append what is no rows."""
        self._items.append(item)

    def admit(self, packet: Packet, num_bytes: int) -> bool:
        """Append rows if they may wait in memory."""
        if self._num_spilled or not self.has_room(num_bytes):
            return False
        self.queued_bytes += num_bytes
        self._items.append(Rows(packet, num_bytes))
        return True

    def append_spilled(self, packet: Packet, spilled: SpilledBlocks) -> None:
        """Append rows that are on disk."""
        self._num_spilled += 1
        self.spilled_rows += packet.num_rows
        self._items.append(Rows(replace(packet, blocks=spilled.blocks), spilled.num_bytes, spilled))

    def drop(self, packet: Packet, reason: str) -> None:
        """Lose rows, and say so to their requests."""
        self.dropped_rows += packet.num_rows
        for portion in packet.portions():
            portion.request.ledger.drop(portion.positions)
            portion.request.drop_reason = reason

    def pop(self) -> Item:
        """Remove the first item. Rows go on counting until they are freed; those on disk begin to."""
        item = self._items.popleft()
        if isinstance(item, Rows) and item.spilled is not None:
            self._num_spilled -= 1
            self.queued_bytes += item.num_bytes
        return item

    def free(self, rows: Rows) -> None:
        """The rows that were popped are no longer held."""
        self.queued_bytes -= rows.num_bytes

    def discard(self, reason: str) -> None:
        """Empty the queue and drop its rows. What the consumer has to let go of stays: it would keep that for ever."""
        kept = [item for item in self._items if isinstance(item, Abandon)]
        while self._items:
            item = self.pop()
            if isinstance(item, Rows):
                self.drop(item.packet, reason)
                self.free(item)
                if item.spilled is not None and self._spill is not None:
                    self._spill.discard(item.spilled)
        self._items.extend(kept)
