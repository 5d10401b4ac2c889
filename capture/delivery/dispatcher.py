"""The dispatch thread: takes rows, begins and ends of requests out of a `Handoff`, in order.

It waits for the device copies, copies rows out of the staging memory, splits them by consumer and puts them into the
consumers' queues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from headgate.capture.delivery.buffer_pool import RowPool
from headgate.capture.delivery.completeness import TokenCheck
from headgate.capture.delivery.consumer_queue import ConsumerQueue
from headgate.capture.delivery.handoff import Dispatched, Handoff, MemoryWanted, RequestBegins, RequestEnds
from headgate.capture.delivery.row_packets import BlockPart, Packet, Splitter, StepCoalescer, join
from headgate.capture.monitoring.rate_limited_log import SparseLog
from headgate.capture.planning.step_plan import PackGroup
from headgate.capture.schema.batch import Int32Array
from headgate.capture.schema.batching import END_LINGER_S
from headgate.capture.staging.host_rows import StagedRows


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
        self._token_checks[item.req_id] = TokenCheck(item.new.num_prompt_tokens)
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
                if (check := self._token_checks.get(req_id)) is None:
                    continue  # none of its consumers is served here
                if stop - start == 1:
                    check.note_one(int(positions[start]), ids[start])
                else:
                    check.note(positions[start:stop], token_ids[start:stop])

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
