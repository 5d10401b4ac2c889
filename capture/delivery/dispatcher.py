"""The dispatch thread, and the hand-off through which the step thread feeds it.

The step thread puts rows, begins and ends of requests into `Handoff` and goes on at once. `Dispatcher` waits for the
device copies, copies rows out of the staging memory, splits them by consumer and puts them into the consumers' queues.
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
from headgate.capture.schema.batching import END_LINGER_S
from headgate.capture.staging.host_rows import StagedRows


@dataclass(frozen=True, slots=True)
class RequestBegins:
    """A new request.

    Attributes:
        req_id: Internal id. A request that is known under it is given up for this one.
        num_prompt: Length of its prompt.
        requests: Makes the request for each consumer, by the consumer's bit.
        is_same_client: The results of a request that is given up go where this one's go: one result stands for both.
    """

    req_id: str
    num_prompt: int
    requests: Callable[[], Mapping[int, ConsumerRequest]]
    is_same_client: bool = False


@dataclass(frozen=True, slots=True)
class RequestEnds:
    """The end of a request, behind its last rows; `final` is None if nobody knows how it ended."""

    req_id: str
    final: FinalState | None


@dataclass(frozen=True, slots=True)
class MemoryWanted:
    """Sent when the step thread is about to wait for staging memory."""


Dispatched = StagedRows | RequestBegins | RequestEnds | MemoryWanted

T = TypeVar("T")


class Handoff(Generic[T]):
    """First in, first out: the step thread puts, and the one dispatch thread takes.

    It has no bound of its own: rows are bounded by the staging memory that they lie in, and everything else is small.
    The lock keeps items from being put behind the end; nothing else runs under it, so the step thread never waits for a
    consumer here. A `SimpleQueue` wakes the other thread without running Python for it.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[T | None] = SimpleQueue()  # None stands behind the last item
        self._lock = threading.Lock()
        self._is_closed = self._is_exhausted = False

    def put(self, item: T) -> bool:
        """Append `item`; False once closed."""
        with self._lock:
            if self._is_closed:
                return False
            self._items.put(item)
            return True

    def next_item(self, timeout_s: float | None) -> T | None:
        """Wait for the next item and remove it.

        Args:
            timeout_s: Seconds to wait; None for as long as it takes, which `close` ends.

        Returns:
            None when the time is up, or when it is closed and empty.
        """
        if self._is_exhausted:
            return None
        try:
            item = self._items.get(timeout=timeout_s)
        except Empty:
            return None
        self._is_exhausted = item is None
        return item

    def close(self) -> None:
        """Refuse further items; `next_item` still returns those that were put."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._items.put(None)

    @property
    def is_done(self) -> bool:
        """Whether it is closed and everything was taken. For the thread that takes."""
        with self._lock:  # without it, the end might not be put yet, and the last item be mistaken for it
            return self._is_exhausted or (self._is_closed and self._items.qsize() == 1)


class Dispatcher:
    """Distributes rows and requests from the hand-off to the consumers' queues on one daemon thread, in order.

    Rows are copied out of the staging memory once, into memory that all consumers share read-only, and the staging
    memory is free again before the thread waits for any consumer. Queues with room are served before it waits for one
    without. Rows of small steps are held for a moment and dispatched together; see `StepCoalescer`.

    Args:
        handoff: Where the step thread puts; closing it ends the thread, once it is empty.
        queues: Consumer bit to queue.
        keep_bytes: Memory that may be kept for later rows while nobody uses it.
        hold_bytes: Staging memory from which on rows are held no longer.
        linger_s: Seconds after their forward that rows are held at most.
    """

    def __init__(
        self,
        handoff: Handoff[Dispatched],
        queues: Mapping[int, ConsumerQueue],
        *,
        keep_bytes: int,
        hold_bytes: int = 0,
        linger_s: float = 0.0,
    ) -> None:
        self._handoff = handoff
        self._queues = queues
        self._splitter = Splitter()
        self._pool = RowPool(keep_bytes)
        self._held = StepCoalescer(hold_bytes)
        self._held_ends: list[RequestEnds] = []
        self._held_until = 0.0
        self._linger_s = linger_s
        self._token_checks: dict[str, TokenCheck] = {}
        self._log = SparseLog("capture dispatch")
        self._thread = threading.Thread(target=self._run, name="headgate-dispatch", daemon=True)
        self.num_errors = 0
        """Items that could not be dispatched; a bug of ours, logged. Their requests miss the rows and say so."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, close_by: float) -> bool:
        """Wait for the thread until `close_by` on the monotonic clock; False if it still runs."""
        self._thread.join(max(close_by - time.monotonic(), 0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            for queue in self._queues.values():
                queue.fail_hung()
            item = self._handoff.next_item(self._timeout_s())
            is_done = item is None and self._handoff.is_done
            if item is not None:
                self._guard(self._accept, item)
            if self._held and (is_done or self._held.is_full or time.monotonic() >= self._held_until):
                self._release_held()
            if is_done:
                return

    def _guard(self, dispatch: Callable[..., None], *arguments: Any) -> None:
        try:
            dispatch(*arguments)
        except Exception as error:  # noqa: BLE001  the thread must live: staging memory is freed here alone
            self.num_errors += 1
            self._log.error("rows could not be dispatched; report it as a bug", cause=error)

    def _timeout_s(self) -> float | None:
        """Compute the seconds until held rows are due or a consumer's call takes too long; None if neither can be."""
        due = [at for queue in self._queues.values() if (at := queue.due_at()) is not None]
        if self._held:
            due.append(self._held_until)
        return max(min(due) - time.monotonic(), 0) if due else None

    def _accept(self, item: Dispatched) -> None:
        if isinstance(item, StagedRows):
            if not self._held:
                self._held_until = item.since + self._linger_s
            self._held.add(item)
        elif isinstance(item, MemoryWanted):
            self._held_until = 0.0
        elif isinstance(item, RequestBegins):
            if item.req_id in self._token_checks:
                self._release_held()
            self._begin(item)
        elif self._held.has(item.req_id):
            self._held_ends.append(item)
            has_others = len(self._token_checks) > len(self._held_ends)
            self._held_until = min(self._held_until, time.monotonic() + END_LINGER_S if has_others else 0.0)
        else:
            self._end(item)

    def _release_held(self) -> None:
        """Dispatch held rows, then the ends of requests whose last rows were among them."""
        ends, self._held_ends = self._held_ends, []
        if self._held:
            self._guard(self._dispatch_rows)
        for end in ends:
            self._guard(self._end, end)

    def _begin(self, item: RequestBegins) -> None:
        requests = item.requests()
        for bit, request in self._splitter.end(item.req_id).items():
            self._queues[bit].replace(request, is_silent=bit in requests and item.is_same_client)
        self._splitter.begin(item.req_id, requests)
        self._token_checks[item.req_id] = TokenCheck(item.num_prompt)
        for bit, request in requests.items():
            self._queues[bit].begin(request)

    def _end(self, item: RequestEnds) -> None:
        check = self._token_checks.pop(item.req_id)
        mismatch = None if item.final is None else check.mismatch(item.final)
        for bit, request in self._splitter.end(item.req_id).items():
            self._queues[bit].finish(request, item.final, mismatch=mismatch)

    def _note_tokens(self, group: PackGroup, token_ids: Int32Array | None) -> None:
        if token_ids is not None:
            positions, ids = group.positions, token_ids.tolist()
            for req_id, start, stop in group.spans:
                if stop - start == 1:
                    self._token_checks[req_id].note_one(int(positions[start]), ids[start])
                else:
                    self._token_checks[req_id].note(positions[start:stop], token_ids[start:stop])

    def _dispatch_rows(self) -> None:
        parts: dict[int, list[BlockPart]] = {}
        for group, rows, token_ids in self._held.copy_out(self._pool):
            self._note_tokens(group, token_ids)
            for bit, part in self._splitter.split(group, rows):
                parts.setdefault(bit, []).append(part)
        packets = [(self._queues[bit], join(found)) for bit, found in parts.items()]
        waiting: list[tuple[ConsumerQueue, Packet]] = [
            (queue, packet) for queue, packet in packets if not queue.offer(packet, may_wait=False)
        ]
        for queue, packet in waiting:
            queue.offer(packet, may_wait=True)
