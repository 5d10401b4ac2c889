"""The bounded queue of one consumer, the overload policy for rows that come faster than it takes them, and its thread.

The dispatch thread puts requests and rows in; the consumer's thread, which owns the queue, takes them out, calls the
consumer, and reports results.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from headgate.capture.delivery.completeness import ConsumerRequest, OpenRequests, SendResult, failed, result_of
from headgate.capture.delivery.row_packets import Packet
from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.monitoring.stats import ConsumerStats, QueueCounters, figures_of
from headgate.capture.schema.batch import FinalState
from headgate.capture.schema.config import MIB, CaptureConsumerSpec
from headgate.capture.schema.consumer import (
    FinishedRequest,
    ModelInfo,
    RequestInfo,
    RowBlock,
    SendPart,
    StreamingConsumer,
    send_nowhere,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.capture.schema.results import CaptureResult

SEGMENT_BYTES = 256 * MIB
"""Size at which a new segment begins: disk space is given back segment by segment."""


class _Segment:
    """One nameless file. It takes `SEGMENT_BYTES`, and its disk space is free again once all of that was read."""

    def __init__(self, folder: str | None) -> None:
        # Never has a name, or loses it at once: a killed process leaves no file.
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

    def store(self, packet: Packet) -> SpilledPacket:
        """Write the rows of `packet`.

        Raises:
            OSError: If the disk is full or failing; nothing is stored then.
        """
        segment = self._open_segment()
        start = offset = segment.size
        try:
            for block, _ in packet.parts:
                offset += _write(segment.file.fileno(), _bytes_of(block.rows.contiguous()), offset)
        except OSError:
            segment.file.truncate(start)  # a full disk gets back what did not help
            raise
        stripped = [
            (replace(block, rows=torch.empty_like(block.rows, device="meta")), owners) for block, owners in packet.parts
        ]
        with self._lock:
            segment.size = offset
            segment.num_pending += 1
            self._pending_bytes += offset - start
        return SpilledPacket(stripped, segment, start)

    def load(self, spilled: SpilledPacket) -> Packet:
        """Read rows back, once; their disk space is free afterwards.

        Raises:
            OSError: If the disk fails.
            ConsumerError: If rows are missing from the file.
        """
        try:
            offset = spilled.offset
            parts = []
            for block, owners in spilled.parts:
                rows = torch.empty(block.rows.shape, dtype=block.rows.dtype)
                offset += _read(spilled.segment.file.fileno(), _bytes_of(rows), offset)
                parts.append((replace(block, rows=rows), owners))
            return Packet(parts)
        finally:
            self.discard(spilled)

    def discard(self, spilled: SpilledPacket) -> None:
        """Give up rows that will not be loaded."""
        segment = spilled.segment
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


class QueuedBegin(NamedTuple):
    """Announces a request to the consumer."""

    request: ConsumerRequest


@dataclass(frozen=True, slots=True, eq=False)
class SpilledPacket(Packet):
    """A packet whose rows are in a spill file; here they are on the meta device: shape and dtype only."""

    segment: _Segment
    offset: int


class Finish(NamedTuple):
    """Follows the last rows of a request; `final` is None if its end is unknown."""

    request: ConsumerRequest
    final: FinalState | None


class Abandon(NamedTuple):
    """Instructs the consumer to release what it keeps of a request that failed."""

    request: ConsumerRequest


Item = QueuedBegin | Packet | Finish | Abandon


class ConsumerQueue:
    """First in, first out; rows are bounded in bytes, everything else in it is small.

    `begin`, `offer`, `finish`, `replace` and `fail_hung` are for the dispatch thread; `next_item`, `free`, `calls` and
    `requests` for the consumer's thread; `stop_blocking`, `close` and `discard_all` for the closing thread; `due_at`
    and `stats` for any. One lock guards the queue, the call timer and the requests' state; no call of the consumer, no
    result and no disk access happens under it.

    A call of the consumer that takes longer than ``max_stall_s``, or a queue that stays full for so long under
    ``block``, ends every open request with an error. Rows are then dropped until the call returns; requests that begin
    after that are served again.

    Args:
        spec: Queue size, overload policy and longest stall.
        send_result: Gets each request's result, once.
        log: Where losses go; each is in its request's result too.
        spill: Where rows go that do not fit, for ``overload="spill"``.
        accepts_empty: Whether the consumer is given requests without sites on this worker; if not, their result is
            blank, since other pipeline stages have the rows.
    """

    def __init__(
        self,
        spec: CaptureConsumerSpec,
        send_result: SendResult,
        *,
        log: SparseLog,
        spill: SpillFile | None = None,
        accepts_empty: bool = False,
    ) -> None:
        lock = threading.Lock()
        self._instance = spec.instance
        self._spec = spec
        self._accepts_empty = accepts_empty
        self._spill = spill
        self._log = log
        self._changed = threading.Condition(lock)
        self._counters = QueueCounters()
        self.calls = CallTimer(lock, self._counters)
        self.requests = OpenRequests(lock, self._counters, send_result, log)
        self._items = _WaitingItems(spec, spill, self._changed, self.calls)
        self._is_closed = self._has_item = False
        self._stalled = f"held up the engine for longer than {spec.max_stall_s:g} s"

    def begin(self, request: ConsumerRequest) -> None:
        """Announce a request."""
        with self._changed:
            self.requests.add(request)
            request.is_passed_over = not request.info.spec.sites and not self._accepts_empty
            if request.is_passed_over:
                return
            if self._items.is_serving:
                self._items.append(QueuedBegin(request))
            else:
                request.failure = f"{self._instance}: was hung or shut down when the request began"

    def offer(self, packet: Packet, *, may_wait: bool) -> bool:
        """Queue `packet`, or block, drop or spill it under overload.

        Returns:
            False if it has to wait for room and `may_wait` is False; offer it again then.
        """
        num_bytes = packet.num_bytes
        overdue: list[ConsumerRequest] | None = None
        lost_to = ""
        with self._changed:
            if not self._items.is_ready_for(num_bytes):
                if not may_wait:
                    return False
                if not self._items.wait_until_ready(num_bytes):
                    overdue = self._give_up(self._stalled)
            is_serving = self._items.is_serving
            is_queued = is_serving and self._items.admit(packet, num_bytes)
            must_spill = not is_queued and is_serving and self._spill is not None
            if not is_queued and not must_spill:
                lost_to = f"its queue of {self._spec.queue_bytes} bytes was full" if is_serving else "it was hung"
                self._items.drop(packet, lost_to)
        if overdue is not None:
            self._log.error(f"{self._stalled}; its requests end with an error")
            self.requests.report_failures(overdue)
        elif lost_to:
            self._log.error(f"rows were dropped: {lost_to}")
        if must_spill and self._spill is not None:
            self._store(packet, self._spill)
        return True

    def finish(self, request: ConsumerRequest, final: FinalState | None, *, mismatch: str | None = None) -> None:
        """Say that `request` got its last row; its result follows the rows that are queued.

        Args:
            request: The request.
            final: How it ended; None if unknown.
            mismatch: Why its rows must not be used, if so: the consumer is instructed to release them.
        """
        with self._changed:
            request.ended_at = time.monotonic()
            if not request.is_passed_over and request.failure is None:
                if mismatch is None:
                    self._items.append(Finish(request, final))
                    return
                request.failure = f"{self._instance}: {mismatch}"
                self._items.append(Abandon(request))
        result = CaptureResult(status="ok") if request.is_passed_over else failed(request.failure)
        self.requests.report(request, result)

    def replace(self, request: ConsumerRequest, *, is_silent: bool) -> None:
        """Give `request` up for another that took its id.

        Args:
            request: The one that was there before.
            is_silent: Send no result: the other one's stands for both.
        """
        with self._changed:
            request.failure = request.failure or f"{self._instance}: another request took over the id"
            if request.is_begun or not request.is_passed_over:
                self._items.append(Abandon(request))
        self.requests.report(request, None if is_silent else failed(request.failure))

    def due_at(self) -> float | None:
        """When to call `fail_hung` next, on the monotonic clock; None if nothing is under way."""
        with self._changed:
            if self.calls.started_at is not None and not self.calls.is_hung:
                return self.calls.started_at + self._spec.max_stall_s
            return time.monotonic() + self._spec.max_stall_s if self._items or self._has_item else None

    def fail_hung(self) -> None:
        """End every open request with an error if the consumer's call takes too long."""
        with self._changed:
            started_at = self.calls.started_at
            if self.calls.is_hung or started_at is None or time.monotonic() < started_at + self._spec.max_stall_s:
                return
            reason = f"one call took longer than {self._spec.max_stall_s:g} s"
            overdue = self._give_up(reason)
        self._log.error(f"{reason}; its requests end with an error")
        self.requests.report_failures(overdue)

    def next_item(self) -> Item | None:
        """Wait for the next item and remove it; None when the queue is closed and empty."""
        with self._changed:
            self._has_item = False
            self._changed.wait_for(lambda: self._items or self._is_closed)
            self._has_item = bool(self._items)  # a call may follow
            return self._items.pop() if self._items else None

    def free(self, packet: Packet, *, num_rows: int = 0, num_bytes: int = 0, lost_to: str = "") -> None:
        """Give back the room of rows that were removed, and count the positions and bytes that the consumer took.

        Args:
            lost_to: Why the rows never reached the consumer, if so.
        """
        with self._changed:
            if lost_to:
                self._items.drop(packet, lost_to)
            self._counters.rows += num_rows
            self._counters.bytes += num_bytes
            self._items.free(packet)

    def stop_blocking(self) -> None:
        """Drop rows that do not fit from now on, whatever the policy, so that the dispatch thread can end."""
        with self._changed:
            self._items.may_block = False
            self._changed.notify_all()

    def close(self) -> None:
        """Let `next_item` return the items that are queued and then None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def discard_all(self) -> int:
        """Drop queued rows and all that are still offered; end every open request with an error and count them."""
        with self._changed:
            self._items.is_discarding = True
            self._items.discard("capture was shut down")
            text = f"{self._instance}: capture was shut down before the request had ended and was delivered"
            unfinished = self.requests.fail_open(text)
        self.requests.report_failures(unfinished)
        return len(unfinished)

    def stats(self) -> ConsumerStats:
        """Counters as of now; waits for no consumer."""
        with self._changed:
            return ConsumerStats(
                instance=self._instance,
                dropped_rows=self._items.dropped_rows,
                spilled_rows=self._items.spilled_rows,
                queued_bytes=self._items.queued_bytes,
                spilled_bytes=0 if self._spill is None else self._spill.pending_bytes,
                is_hung=self.calls.is_hung,
                **asdict(self._counters),
            )

    def _store(self, packet: Packet, spill: SpillFile) -> None:
        """Put rows that do not fit on disk, and their place into the queue."""
        lost_to, spilled = "capture was shut down", None
        try:
            spilled = spill.store(packet)
        except OSError as error:
            self._log.error("rows are dropped: cannot spill to disk", cause=error)
            lost_to = f"spilling to disk failed: {error}"
        with self._changed:
            if spilled is not None and not self._items.is_discarding:
                self._items.append_spilled(spilled)
                return
            self._items.drop(packet, lost_to)
        if spilled is not None:
            spill.discard(spilled)

    def _give_up(self, reason: str) -> list[ConsumerRequest]:
        """Under the lock: fail every request and drop all rows; return the requests whose result is due."""
        self.calls.is_hung = self.calls.started_at is not None
        self._counters.hangs += 1
        self._items.discard(reason)
        waiting = self.requests.fail_waiting(f"{self._instance}: hung: {reason}")
        for request in waiting:
            if request.is_begun:
                self._items.append(Abandon(request))
        return [request for request in waiting if request.ended_at is not None]


class CallTimer:
    """The consumer's call that is under way: entered by its thread, read by other threads under the queue's lock."""

    def __init__(self, lock: threading.Lock, counters: QueueCounters) -> None:
        self._lock, self.counters = lock, counters
        self.started_at: float | None = None
        self.is_hung = False

    def __enter__(self) -> None:
        with self._lock:
            self.started_at = time.monotonic()

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            if self.started_at is not None:
                self.counters.call_s += time.monotonic() - self.started_at
            self.started_at, self.is_hung = None, False


class _WaitingItems:
    """The items of a queue and the room that they take: the overload policy.

    Rows count until they were freed, that is, until the consumer has returned from taking them. Rows on disk keep
    their place in the queue: once one packet is spilled, those after it are too, until all were taken.

    Not locked: every method is called under the queue's lock, which `changed` belongs to.
    """

    def __init__(
        self, spec: CaptureConsumerSpec, spill: SpillFile | None, changed: threading.Condition, calls: CallTimer
    ) -> None:
        self._spec = spec
        self._spill = spill
        self._changed = changed
        self._calls = calls
        self._waiting: deque[Item] = deque()
        self._num_spilled = 0
        self.may_block = spec.overload == "block"
        self.is_discarding = False
        self.queued_bytes = 0
        self.dropped_rows = 0
        self.spilled_rows = 0

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    @property
    def is_serving(self) -> bool:
        """Whether rows may be queued at all."""
        return not self._calls.is_hung and not self.is_discarding

    def is_ready_for(self, num_bytes: int) -> bool:
        """Whether rows of that size need not wait: there is room, or they are to be dropped or spilled."""
        return not self.may_block or not self.is_serving or self._has_room(num_bytes)

    def wait_until_ready(self, num_bytes: int) -> bool:
        """Block the dispatch thread, and with it in the end the engine; False if that takes too long."""
        started = time.monotonic()
        while not (is_ready := self.is_ready_for(num_bytes)):
            since = started if self._calls.started_at is None else min(started, self._calls.started_at)
            left_s = since + self._spec.max_stall_s - time.monotonic()
            if left_s <= 0:
                break
            self._changed.wait(left_s)
        self._calls.counters.stalls += 1
        self._calls.counters.stall_s += time.monotonic() - started
        return is_ready

    def append(self, item: QueuedBegin | Finish | Abandon) -> None:
        """Append an item without rows."""
        self._waiting.append(item)
        self._changed.notify_all()

    def admit(self, packet: Packet, num_bytes: int) -> bool:
        """Append rows if they may wait in memory."""
        if self._num_spilled or not self._has_room(num_bytes):
            return False
        self.queued_bytes += num_bytes
        self._waiting.append(packet)
        self._changed.notify_all()
        return True

    def append_spilled(self, packet: SpilledPacket) -> None:
        """Append rows that are on disk."""
        self._num_spilled += 1
        self.spilled_rows += packet.num_rows
        self._waiting.append(packet)
        self._changed.notify_all()

    def drop(self, packet: Packet, reason: str) -> None:
        """Lose rows, and say so to their requests."""
        self.dropped_rows += packet.num_rows
        packet.note_dropped(reason)

    def pop(self) -> Item:
        """Remove the first item. Rows go on counting until they are freed; those on disk begin to."""
        item = self._waiting.popleft()
        if isinstance(item, SpilledPacket):
            self._num_spilled -= 1
            self.queued_bytes += item.num_bytes
        return item

    def free(self, packet: Packet) -> None:
        """Count rows that were popped no longer."""
        self.queued_bytes -= packet.num_bytes
        self._changed.notify_all()

    def discard(self, reason: str) -> None:
        """Empty the queue and drop its rows. `Abandon` stays: the consumer would keep those requests for ever."""
        kept = [item for item in self._waiting if isinstance(item, Abandon)]
        while self._waiting:
            item = self.pop()
            if isinstance(item, Packet):
                self.drop(item, reason)
                self.free(item)
                if isinstance(item, SpilledPacket) and self._spill is not None:
                    self._spill.discard(item)
        self._waiting.extend(kept)
        self._changed.notify_all()

    def _has_room(self, num_bytes: int) -> bool:
        """Whether rows of that size may wait in memory; a packet larger than the limit may if it is alone."""
        return self.queued_bytes == 0 or self.queued_bytes + num_bytes <= self._spec.queue_bytes


T = TypeVar("T")


class Deferred:
    """Returned by a consumer's `finish` if the request's result comes from elsewhere: none is reported here."""


DEFERRED: Final = Deferred()


class RowSink(Protocol):
    """The consumer as its thread sees it: a `StreamingConsumer`, or a `BatchedConsumer` fed by an `Assembler`."""

    def begin(self, request: RequestInfo) -> None: ...

    def write(self, blocks: Sequence[RowBlock]) -> None: ...

    def finish(self, finished: FinishedRequest) -> Any: ...

    def abandon(self, request: RequestInfo) -> None: ...

    def close(self, timeout_s: float) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedWork:
    """Work that a consumer leaves when it is closed.

    Attributes:
        unfinished: Requests reported as unfinished, for want of an end or of time.
        is_stuck: The consumer is still in a call; the thread ends when the call does.
        close_error: What the consumer's `close` raised, as text.
    """

    unfinished: int = 0
    is_stuck: bool = False
    close_error: str | None = None


_NO_END = (
    "the engine core reported that the request is over, but not its tokens and why it stopped, as expected at an end. "
    "Without them its rows cannot be checked, so they are discarded; send the request again, and if that ends so, too, "
    "report it with the output of `headgate doctor`"
)


class ConsumerThread:
    """Calls one consumer, in the order of its queue, on one daemon thread.

    A call that raises fails the requests it was for and nothing else.

    Attributes:
        instance: Name of the consumer.
        queue: Where the dispatch thread puts the consumer's requests and rows.

    Args:
        spec: Name, queue size, overload policy and longest stall.
        sink: The consumer.
        send_result: Gets each request's result, once.
        model: The model that is served.
        send_part: Gets parts of results of running requests; see `StreamingConsumer.send_part`.
        spill_dir: Folder of the spill file, for ``overload="spill"``.
        accepts_empty: See `ConsumerQueue`.

    Raises:
        ConfigError: If the spill file cannot be made.
    """

    def __init__(
        self,
        spec: CaptureConsumerSpec,
        sink: RowSink,
        send_result: SendResult,
        *,
        model: ModelInfo,
        send_part: SendPart = send_nowhere,
        spill_dir: str | None = None,
        accepts_empty: bool = False,
    ) -> None:
        self.instance = spec.instance
        self._sink = sink
        if isinstance(sink, StreamingConsumer):
            sink.send_part = send_part
        self._model = model
        self._spill = SpillFile(spill_dir) if spec.overload == "spill" else None
        self._log = SparseLog(f"capture consumer {self.instance}")
        self.queue = ConsumerQueue(spec, send_result, log=self._log, spill=self._spill, accepts_empty=accepts_empty)
        self._close_by = 0.0
        self._close_error: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"headgate-{self.instance}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stats(self) -> ConsumerStats:
        """Counters as of now, and the consumer's own figures."""
        try:
            figures = figures_of(self._sink)
        except Exception as error:  # noqa: BLE001  (a consumer may raise what it likes)
            self._log.error("its figures are not told", cause=error)
            figures = ()
        return replace(self.queue.stats(), figures=figures)

    def close(self, close_by: float) -> None:
        """Let the thread deliver what is queued, close the consumer and end; `close_by` is on the monotonic clock."""
        self._close_by = close_by
        self.queue.close()

    def join(self, close_by: float) -> UnfinishedWork:
        """Wait for the thread until `close_by`; after that, every request without a result gets an error."""
        self._thread.join(max(close_by - time.monotonic(), 0))
        is_stuck = self._thread.is_alive()
        unfinished = self.queue.discard_all()
        if self._spill is not None:
            self._spill.close()
        return UnfinishedWork(unfinished=unfinished, is_stuck=is_stuck, close_error=self._close_error)

    def _run(self) -> None:
        while (item := self.queue.next_item()) is not None:
            try:
                self._handle(item)
            except Exception as error:  # noqa: BLE001
                # A bug of ours must not end the thread: this consumer's later requests would wait for ever.
                self._log.error("delivery failed inside headgate; please report it", cause=error)
                about = item.requests() if isinstance(item, Packet) else [item.request]
                self._fail(about, f"{self.instance}: internal error: {error!r}")
                if isinstance(item, Finish):
                    self.queue.requests.report(item.request, failed(item.request.failure))
        try:
            self._call(partial(self._sink.close, max(self._close_by - time.monotonic(), 0)))
        except ConsumerError as error:
            self._close_error = str(error)

    def _handle(self, item: Item) -> None:
        if isinstance(item, Packet):
            self._write(item)
        elif isinstance(item, Finish):
            self._finish(item.request, item.final)
        elif isinstance(item, Abandon):
            self._abandon([item.request])
        elif item.request.failure is None:
            item.request.is_begun = True
            try:
                self._call(partial(self._sink.begin, item.request.info))
            except ConsumerError as error:
                self._fail([item.request], str(error))

    def _write(self, queued: Packet) -> None:
        num_rows = num_bytes = 0
        lost_to = ""
        try:
            packet = queued
            if isinstance(queued, SpilledPacket) and self._spill is not None:
                try:
                    packet = self._spill.load(queued)
                except (OSError, ConsumerError) as error:
                    self._log.error("cannot read back what was spilled", cause=error)
                    lost_to = f"reading back from disk failed: {error}"
                    return
            live = packet.without_failed()
            if live is None:
                return
            try:
                self._call(partial(self._sink.write, live.blocks))
            except ConsumerError as error:
                self._fail(live.requests(), str(error))
                return
            num_rows, num_bytes = live.note_delivered(), live.num_bytes
        finally:
            self.queue.free(queued, num_rows=num_rows, num_bytes=num_bytes, lost_to=lost_to)

    def _finish(self, request: ConsumerRequest, final: FinalState | None) -> None:
        requests = self.queue.requests
        if final is None:
            self._fail([request], f"{self.instance}: {_NO_END}")
        if final is None or request.failure is not None:
            requests.report(request, failed(request.failure))
            return
        totals = request.audit.close(final)
        result = result_of(request, totals, final, instance=self.instance, model=self._model)
        if result.status == "error":
            self._fail([request], str(result.error))
            requests.report(request, result)
            return
        finished = FinishedRequest(request=request.info, final=final, dropped_rows=totals.dropped)
        request.is_begun = False
        try:
            payload = self._call(partial(self._sink.finish, finished))
        except ConsumerError as error:
            requests.report(request, failed(str(error)))
            return
        if isinstance(payload, Future):
            requests.defer(request)
            payload.add_done_callback(partial(self._complete, request, result))
        elif payload is DEFERRED:
            requests.report(request, None)
        else:
            result.payload = payload
            requests.report(request, result)

    def _complete(self, request: ConsumerRequest, result: CaptureResult, future: Future[Any]) -> None:
        """Report a request that the consumer's own threads are done with, on whichever thread completes the future."""
        try:
            result.payload = future.result(timeout=0)
        except BaseException as error:  # noqa: BLE001  whatever happened there is this request's error
            self._log_failure("a request failed", error)
            result = failed(_text(self.instance, error))
        self.queue.requests.report(request, result)

    def _call(self, call: Callable[[], T]) -> T:
        """Call the consumer.

        Raises:
            ConsumerError: Whatever it raised, as text for people.
        """
        with self.queue.calls:
            try:
                return call()
            except BaseException as error:  # SystemExit too: it would end the thread, and with it every later request
                self._log_failure("a call failed", error)
                raise ConsumerError(_text(self.instance, error)) from error

    def _log_failure(self, what: str, error: BaseException) -> None:
        """Log one line for what a consumer refuses, and the traceback of anything else."""
        if isinstance(error, ConsumerError):
            self._log.error(f"{what}: {error}")
        else:
            self._log.error(what, cause=error)

    def _fail(self, requests: Sequence[ConsumerRequest], text: str) -> None:
        """Fail `requests`; each gets its result when it ends."""
        self._abandon(self.queue.requests.fail(requests, text))

    def _abandon(self, requests: Sequence[ConsumerRequest]) -> None:
        for request in requests:
            if request.is_begun:
                request.is_begun = False
                try:
                    self._call(partial(self._sink.abandon, request.info))
                except ConsumerError:
                    continue  # logged; the request has failed already


def _text(instance: str, error: BaseException) -> str:
    return f"{instance}: {type(error).__name__}: {error}"
