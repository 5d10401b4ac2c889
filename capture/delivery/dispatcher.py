"""The dispatch thread: takes rows off the staging memory and deals them out to the consumers' lanes.

The way from the step thread to the dispatch thread: first in, first out, and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from headgate.capture.delivery.buffer_pool import RowPool
from headgate.capture.delivery.completeness import ConsumerRequest, TokenCheck
from headgate.capture.delivery.consumer_queue import ConsumerQueue
from headgate.capture.delivery.row_packets import BlockPart, Packet, Splitter, StepCoalescer, join
from headgate.capture.monitoring.rate_limited_log import SparseLog
from headgate.capture.planning.step_plan import PackGroup
from headgate.capture.schema.batch import FinalState, Int32Array
from headgate.capture.staging.host_rows import StagedRows


@dataclass(frozen=True, slots=True)
class RequestBegins:
    """A request that wants something.

    Attributes:
        req_id: Internal id. If it is known already, the request under it is given up for this one.
        num_prompt: Length of its prompt.
        requests: Makes the request for each consumer's lane, by the consumer's bit.
        is_same_client: That request's results go where this one's go, so that one result is enough for both.
    """

    req_id: str
    num_prompt: int
    requests: Callable[[], Mapping[int, ConsumerRequest]]
    is_same_client: bool = False


@dataclass(frozen=True, slots=True)
class RequestEnds:
    """Its last rows went ahead of this."""

    req_id: str
    final: FinalState | None


@dataclass(frozen=True, slots=True)
class MemoryWanted:
    """The step thread is about to wait for staging memory."""


Dispatched = StagedRows | RequestBegins | RequestEnds | MemoryWanted

END_LINGER_S = 0.004
"""How long the end of one request may wait for rows of others; not at all if there are no others."""


class Dispatcher:
    """Deals out what comes through the hand-off on one daemon thread: each request's items in order.

    Rows are copied out of the staging memory once, into memory of their own that all consumers share read-only, and
    the staging memory is free again before anybody is waited for. Lanes with room are served before it waits for one
    without. Rows of small steps are held for a moment, so that those of several steps are dealt out as one; see
    `coalesce`.

    Args:
        handoff: Where the step thread puts; closing it ends the thread, once it is empty.
        lanes: Consumer bit to lane.
        keep_bytes: Memory that may be kept for later rows while nobody uses it.
        hold_bytes: Staging memory from which on rows are held no longer.
        linger_s: Seconds after their forward that rows are held at most.
    """

    def __init__(
        self,
        handoff: Handoff[Dispatched],
        lanes: Mapping[int, ConsumerQueue],
        *,
        keep_bytes: int,
        hold_bytes: int = 0,
        linger_s: float = 0.0,
    ) -> None:
        self._handoff = handoff
        self._lanes = lanes
        self._splitter = Splitter()
        self._pool = RowPool(keep_bytes)
        self._held = StepCoalescer(hold_bytes)
        self._held_ends: list[RequestEnds] = []
        self._held_until = 0.0
        self._linger_s = linger_s
        self._books: dict[str, TokenCheck] = {}
        self._log = SparseLog("capture dispatch")
        self._thread = threading.Thread(target=self._run, name="headgate-dispatch", daemon=True)
        self.num_errors = 0
        """Items that could not be dealt out; a bug of ours, logged. Their requests miss the rows and say so."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, close_by: float) -> bool:
        """Wait for the thread until `close_by` on the monotonic clock; False if it is still at work."""
        self._thread.join(max(close_by - time.monotonic(), 0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            item = self._handoff.take(self._patience_s())
            is_done = item is None and self._handoff.is_done
            if item is not None:
                self._try(self._accept, item)
            if self._held and (is_done or self._held.is_full or time.monotonic() >= self._held_until):
                self._deal_held()
            if is_done:
                return

    def _try(self, deal: Callable[..., None], *what: Any) -> None:
        try:
            deal(*what)
        except Exception as error:  # noqa: BLE001  the thread must live: staging memory is freed here alone
            self.num_errors += 1
            self._log.error("rows could not be dispatched; report it as a bug", cause=error)

    def _patience_s(self) -> float | None:
        """Seconds until something is due.

        Rows are held no longer then, or a consumer's call takes too long: finished requests get their error then, come
        what may.
        """
        looks = [look for lane in self._lanes.values() if (look := lane.watch()) is not None]
        if self._held:
            looks.append(self._held_until)
        return max(min(looks) - time.monotonic(), 0) if looks else None

    def _accept(self, item: Dispatched) -> None:
        if isinstance(item, StagedRows):
            if not self._held:
                self._held_until = item.since + self._linger_s
            self._held.add(item)
        elif isinstance(item, MemoryWanted):
            self._held_until = 0.0
        elif isinstance(item, RequestBegins):
            if item.req_id in self._books:
                self._deal_held()
            self._begin(item)
        elif self._held.has(item.req_id):
            self._held_ends.append(item)
            due = time.monotonic() + END_LINGER_S if len(self._books) > len(self._held_ends) else 0.0
            self._held_until = min(self._held_until, due)
        else:
            self._end(item)

    def _deal_held(self) -> None:
        """Rows first: what ends had its last row among them."""
        ends, self._held_ends = self._held_ends, []
        if self._held:
            self._try(self._deal_rows)
        for end in ends:
            self._try(self._end, end)

    def _begin(self, item: RequestBegins) -> None:
        requests = item.requests()
        for bit, request in self._splitter.end(item.req_id).items():
            self._lanes[bit].replace(request, is_silent=bit in requests and item.is_same_client)
        self._splitter.begin(item.req_id, requests)
        self._books[item.req_id] = TokenCheck(item.num_prompt)
        for bit, request in requests.items():
            self._lanes[bit].begin(request)

    def _end(self, item: RequestEnds) -> None:
        book = self._books.pop(item.req_id)
        contradiction = None if item.final is None else book.contradiction(item.final)
        for bit, request in self._splitter.end(item.req_id).items():
            self._lanes[bit].finish(request, item.final, contradiction=contradiction)

    def _note_tokens(self, group: PackGroup, token_ids: Int32Array | None) -> None:
        if token_ids is not None:
            positions, ids = group.positions, token_ids.tolist()
            for req_id, start, stop in group.spans:
                if stop - start == 1:
                    self._books[req_id].note_one(int(positions[start]), ids[start])
                else:
                    self._books[req_id].note(positions[start:stop], token_ids[start:stop])

    def _deal_rows(self) -> None:
        parts: dict[int, list[BlockPart]] = {}
        for group, rows, token_ids in self._held.take(self._pool):
            self._note_tokens(group, token_ids)
            for bit, part in self._splitter.split(group, rows):
                parts.setdefault(bit, []).append(part)
        packets = [(self._lanes[bit], join(found)) for bit, found in parts.items()]
        waiting: list[tuple[ConsumerQueue, Packet]] = [
            (lane, packet) for lane, packet in packets if not lane.offer(packet, may_wait=False)
        ]
        for lane, packet in waiting:
            lane.offer(packet, may_wait=True)


T = TypeVar("T")


class Handoff(Generic[T]):
    """FIFO between the step thread, which puts, and the one dispatch thread, which takes.

    It is not bounded itself: rows are, by the staging memory that they lie in, and everything else in it is small.
    The lock keeps items from coming behind the end; it is never held while anything else runs, so the step thread never
    waits for a consumer here. A `SimpleQueue` wakes the other thread without running Python for it.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[T | None] = SimpleQueue()  # None stands behind the last item
        self._lock = threading.Lock()
        self._is_closed = self._is_through = False

    def put(self, item: T) -> bool:
        """Append `item`; False once closed."""
        with self._lock:
            if self._is_closed:
                return False
            self._items.put(item)
            return True

    def take(self, timeout_s: float | None) -> T | None:
        """Wait for the next item and remove it.

        Args:
            timeout_s: Seconds to wait; None for as long as it takes, which `close` ends.

        Returns:
            None when the time is up, or when it is closed and empty.
        """
        if self._is_through:
            return None
        try:
            item = self._items.get(timeout=timeout_s)
        except Empty:
            return None
        self._is_through = item is None
        return item

    def close(self) -> None:
        """Refuse further items and let `take` go through what is left."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._items.put(None)

    @property
    def is_done(self) -> bool:
        """Closed, and everything was taken. For the thread that takes."""
        with self._lock:  # else what is closed might not have its end yet, and one item be taken for it
            return self._is_through or (self._is_closed and self._items.qsize() == 1)
