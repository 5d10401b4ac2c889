"""One request on its way to one consumer, and the checks of its result: nothing says ``ok`` when rows are missing.

`ConsumerRequestReader` makes it of the request's beginning, `DeliveryAudit` counts which positions reached the consumer
at how many sites, `TokenCheck` compares the tokens that rows were computed from with the request's own, and
`OpenRequests` sends each request's result once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.monitoring.stats import QueueCounters
from headgate.capture.schema.batch import Begin, FinalState, Int32Array, Int64Array
from headgate.capture.schema.consumer import ModelInfo, ReadoutFacts, ReadoutSite, RequestInfo, by_consumer
from headgate.capture.schema.results import CaptureResult, Origin
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec, SpecReader

SPARE_POSITIONS = 64
"""Positions of output that there is room for at first; the arrays grow by doubling."""

SendResult = Callable[[RequestInfo, CaptureResult | None], None]
"""Sends the result of one request, with which its part here is over; None if it comes from elsewhere. Any thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTotals:
    """Positions of a finished request, counted. Positions computed in vain are not counted.

    Attributes:
        wanted: Positions that its selector wants.
        complete: Wanted positions that were delivered at every site.
        dropped: Wanted positions that overload has cost.
        surplus: Deliveries that were not requested, or that came twice: above 0 only if headgate has a bug.
        outdated: Wanted positions that were delivered before what acts on the model changed: they were computed again.
        by_selection: Complete positions of each of the spec's selections.
    """

    wanted: int
    complete: int
    dropped: int
    surplus: int
    outdated: int = 0
    by_selection: tuple[int, ...] = field(default=(), compare=False)

    @property
    def missing(self) -> int:
        """Wanted positions that are not complete."""
        return self.wanted - self.complete


class DeliveryAudit:
    """Counts, position by position, at how many sites a request's row was delivered.

    The expected positions come from the request's selector and its final length alone, not from what was planned:
    rows that were never computed (read from the prefix cache, for instance) are found out too.

    Args:
        request: The request; its sites are those of this worker.
    """

    def __init__(self, request: RequestInfo) -> None:
        self._request = request
        self._num_sites = np.zeros(request.num_prompt_tokens + SPARE_POSITIONS, dtype=np.int32)
        self._runs: dict[int, tuple[int, int]] = {}
        """Number of sites to consecutive positions that are not counted in yet: most rows prolong a run."""
        self._dropped: list[Int64Array] = []
        self._num_lost = 0

    def deliver(self, positions: Int64Array, num_sites: int) -> None:
        """Count rows at `positions`, ascending, of `num_sites` sites."""
        first, last = int(positions[0]), int(positions[-1])
        if last - first + 1 == len(positions):
            self.deliver_run(first, last + 1, num_sites)
        else:
            self._make_room(last + 1)
            self._num_sites[positions] += num_sites

    def deliver_run(self, start: int, stop: int, num_sites: int) -> None:
        """Count rows at positions ``start : stop``, of `num_sites` sites."""
        before = self._runs.get(num_sites)
        if before is not None:
            if before[1] == start:
                start = before[0]
            else:
                self._count_in(*before, num_sites)
        self._runs[num_sites] = (start, stop)

    def drop(self, positions: Int64Array) -> None:
        """Count rows at `positions` as lost to overload."""
        self._dropped.append(positions.copy())

    def lose(self, count: int) -> None:
        """Count so many rows as lost to overload, at unknown positions."""
        self._num_lost += count

    def close(self, final: FinalState) -> RowTotals:
        """Compare what was delivered with what the request wanted, now that its length is known."""
        for num_sites, run in self._runs.items():
            self._count_in(*run, num_sites)
        self._runs.clear()
        num_rows = final.num_rows
        positions = np.arange(num_rows, dtype=np.int64)
        num_prompt = np.full(num_rows, self._request.num_prompt_tokens, dtype=np.int64)
        selections = [
            (len(sites), selector.mask(positions, num_prompt)) for sites, selector in self._request.spec.selections
        ]
        expected = np.sum([num_sites * is_selected for num_sites, is_selected in selections], axis=0)
        is_wanted = np.any([is_selected for _, is_selected in selections], axis=0)
        delivered = np.zeros(num_rows, dtype=np.int64)
        counted = self._num_sites[:num_rows]
        delivered[: len(counted)] = counted
        is_complete = is_wanted & (delivered == expected)
        lost = np.unique(np.concatenate(self._dropped)) if self._dropped else positions[:0]
        lost = lost[lost < num_rows]
        is_missing = is_wanted & ~is_complete
        num_dropped = int(is_missing[lost].sum())
        return RowTotals(
            wanted=int(is_wanted.sum()),
            complete=int(is_complete.sum()),
            dropped=num_dropped + min(self._num_lost, int(is_missing.sum()) - num_dropped),
            surplus=int(np.maximum(delivered - expected, 0).sum()),
            outdated=int(np.count_nonzero(delivered[: final.num_outdated])),
            by_selection=tuple(int((is_complete & is_selected).sum()) for _, is_selected in selections),
        )

    def _count_in(self, start: int, stop: int, num_sites: int) -> None:
        self._make_room(stop)
        self._num_sites[start:stop] += num_sites

    def _make_room(self, size: int) -> None:
        if size > len(self._num_sites):
            grown = np.zeros(max(size, 2 * len(self._num_sites)), dtype=np.int32)
            grown[: len(self._num_sites)] = self._num_sites
            self._num_sites = grown


class ConsumerRequest:
    """One request on its way to one consumer.

    Attributes:
        info: The request as the consumer knows it.
        audit: Counts deliveries; written by the consumer's thread, its drops under the queue's lock.
        failure: Why it ends in ``error``; None so far. This and the others are guarded by the queue's lock.
        first_site: The site by which its positions are counted: a position may lie in several blocks of a step, one
            for each set of sites.
        drop_reason: Why rows of it were dropped, for people.
        is_begun: The consumer was notified that it began, and not yet that it ended; the consumer's thread's own.
        ended_at: When it got its last row and its result became due, on the monotonic clock; None so far.
        is_passed_over: The consumer is not notified of it, since none of its sites is on this worker.
        is_reported: Its result is out.
    """

    __slots__ = (
        "audit",
        "drop_reason",
        "ended_at",
        "failure",
        "first_site",
        "info",
        "is_begun",
        "is_passed_over",
        "is_reported",
    )

    def __init__(self, info: RequestInfo) -> None:
        self.info = info
        sites, own = info.spec.sites, info.spec.hook_positions
        self.first_site = next((site for site in sites if site.hook not in own), sites[0] if sites else None)
        self.audit = DeliveryAudit(info)
        self.failure: str | None = None
        self.drop_reason = ""
        self.is_begun = self.is_passed_over = False
        self.ended_at: float | None = None
        self.is_reported = False


class ConsumerRequestReader:
    """Makes the request of each consumer of a `Begin`.

    Args:
        sites: Of the worker, in the order of the ring.
        bits: Of the consumers that are served, by their instances; others get nothing.
        readouts: The readouts that the worker computes.
    """

    def __init__(self, sites: Sequence[Site], bits: Mapping[str, int], readouts: Sequence[ReadoutSite]) -> None:
        self._specs = SpecReader(sites)
        self._bits = dict(bits)
        self._readouts = by_consumer(readouts)

    def read(self, begin: Begin) -> dict[int, ConsumerRequest]:
        """Return the request as each consumer knows it, by the consumer's bit."""
        found = {}
        for instance, raw in ({} if begin.capture is None else begin.capture["specs"]).items():
            if (bit := self._bits.get(instance)) is not None:
                spec = self._specs.read(raw)
                own = self._readouts.get(bit, {})
                readouts = {site: facts for site, facts in own.items() if site in spec.sites}
                found[bit] = ConsumerRequest(request_info(begin, spec, readouts))
        return found


def request_info(begin: Begin, spec: CaptureSpec, readouts: Mapping[Site, ReadoutFacts]) -> RequestInfo:
    """Return a request that captures as one consumer knows it.

    Args:
        begin: The request.
        spec: What it wants of the consumer, at sites of this worker.
        readouts: Of those sites.

    Raises:
        ValueError: If its id does not say which of several samples it is.
    """
    capture = begin.capture
    assert capture is not None  # noqa: S101  (there is a spec)
    num_samples = capture["n"]
    return RequestInfo(
        request_id=begin.req_id,
        client_request_id=capture["id"],
        # With n > 1 vLLM calls the samples "0_ID", "1_ID", ...
        sample_index=int(begin.req_id.split("_", 1)[0]) if num_samples > 1 else 0,
        num_samples=num_samples,
        prompt_token_ids=begin.prompt_token_ids,
        spec=spec,
        readouts=readouts,
        origin=Origin(capture["reply"], capture["key"], capture.get("streamed", False)),
    )


def result_of(
    request: ConsumerRequest, totals: RowTotals, final: FinalState, *, instance: str, model: ModelInfo
) -> CaptureResult:
    """Make the result of a request that its consumer took, without the payload.

    Args:
        request: The request.
        totals: Its positions, counted.
        final: How it ended.
        instance: The consumer, for the text.
        model: The model that is served.
    """
    result = CaptureResult(
        status="ok",
        num_rows=totals.complete,
        num_bytes=sum(
            count * model.position_bytes(sites, request.info.readouts, request.info.spec.columns)
            for count, (sites, _) in zip(totals.by_selection, request.info.spec.selections, strict=True)
        ),
        dropped_rows=totals.dropped,
    )
    if totals.surplus:
        result.status = "error"
        result.error = (
            f"{instance}: {totals.surplus} rows were delivered twice or unasked for; do not use this capture, and "
            "report it as a bug of headgate"
        )
    elif totals.outdated:
        result.status = "error"
        result.error = (
            f"{instance}: {totals.outdated} rows of the prompt were captured before the global vectors or the weights "
            "changed, and the answer is of the prompt as it was computed again; send the request again"
        )
    elif totals.missing:
        result.status = "partial_error"
        result.error = f"{instance}: {_missing_text(request, totals, final)}"
    return result


def _missing_text(request: ConsumerRequest, totals: RowTotals, final: FinalState) -> str:
    causes = []
    if totals.dropped:
        causes.append(f"{totals.dropped} dropped ({request.drop_reason})")
    not_computed = totals.missing - totals.dropped
    if not_computed:
        causes.append(
            f"{not_computed} never captured: not computed before the request ended (status {final.status!r}) or "
            f"read from the prefix cache{', or their readout failed: see the log' if request.info.readouts else ''}"
        )
    return f"{totals.missing} of {totals.wanted} wanted positions are missing: {'; '.join(causes)}"


def failed(text: str | None) -> CaptureResult:
    """Make the result of a request that failed."""
    return CaptureResult(status="error", error=text)


class OpenRequests:
    """Requests that one consumer still owes a result, in order of arrival.

    Threads: any. `add`, `fail_open` and `fail_waiting` are called under `lock`; the others take it.

    Args:
        lock: The lock of the consumer's queue, which also guards the attributes of the requests.
        counters: The queue's.
        send_result: Gets each request's result, once, without the lock.
        log: Where a result that cannot be sent goes.
    """

    def __init__(self, lock: threading.Lock, counters: QueueCounters, send_result: SendResult, log: SparseLog) -> None:
        self._lock = lock
        self._counters = counters
        self._send_result = send_result
        self._log = log
        self._open: dict[ConsumerRequest, None] = {}
        self._deferred: set[ConsumerRequest] = set()

    def add(self, request: ConsumerRequest) -> None:
        """Expect the result of `request`."""
        self._open[request] = None

    def fail(self, requests: Sequence[ConsumerRequest], text: str) -> list[ConsumerRequest]:
        """Let `requests` end in an error; return the ones that had not failed before."""
        with self._lock:
            fresh = [request for request in requests if request.failure is None]
            for request in fresh:
                request.failure = text
        return fresh

    def fail_open(self, text: str) -> list[ConsumerRequest]:
        """Let every open request end in an error, unless it failed before; return them all."""
        for request in self._open:
            request.failure = request.failure or text
        return list(self._open)

    def fail_waiting(self, text: str) -> list[ConsumerRequest]:
        """Let every open request but the deferred ones end in an error; return those."""
        waiting = [request for request in self._open if request not in self._deferred]
        for request in waiting:
            request.failure = request.failure or text
        return waiting

    def defer(self, request: ConsumerRequest) -> None:
        """Let the result of `request` come later, from a thread of the consumer's own."""
        with self._lock:
            self._deferred.add(request)

    def report(self, request: ConsumerRequest, result: CaptureResult | None) -> None:
        """Send a result, unless one was sent already: an error while the consumer hung. None: it is sent elsewhere."""
        with self._lock:
            if request.is_reported:
                return
            request.is_reported = True
            self._open.pop(request, None)
            self._deferred.discard(request)
            self._counters.requests += 1
            self._counters.errors += result is not None and result.status == "error"
            if request.ended_at is not None:
                self._counters.note_result(time.monotonic() - request.ended_at)
        try:
            self._send_result(request.info, result)
        except Exception as error:  # noqa: BLE001  the sender's failure must not end the thread; it is counted
            self._log.error("a result could not be sent", cause=error)
            with self._lock:
                self._counters.lost_reports += 1

    def report_failures(self, requests: Sequence[ConsumerRequest]) -> None:
        """Send the errors of requests that failed."""
        for request in requests:
            self.report(request, failed(request.failure))


_UNKNOWN = -1


class TokenCheck:
    """The tokens of one request's captured positions, as the device read them: proof that rows are the request's own.

    For the dispatch thread.

    Args:
        num_prompt: Length of the prompt.
    """

    def __init__(self, num_prompt: int) -> None:
        self._token_ids = np.full(num_prompt + SPARE_POSITIONS, _UNKNOWN, dtype=np.int32)

    def note(self, positions: Int64Array, token_ids: Int32Array) -> None:
        """Record that rows at `positions`, ascending, were computed from `token_ids`."""
        top = int(positions[-1]) + 1
        if top > len(self._token_ids):
            self._grow(top)
        self._token_ids[positions] = token_ids

    def note_one(self, position: int, token_id: int) -> None:
        """Record a single row."""
        if position >= len(self._token_ids):
            self._grow(position + 1)
        self._token_ids[position] = token_id

    def mismatch(self, final: FinalState) -> str | None:
        """Say for people which rows are of another token; None if every row is of the request's own."""
        num_rows = min(final.num_rows, len(self._token_ids), len(final.token_ids))
        noted, expected = self._token_ids[:num_rows], final.token_ids[:num_rows]
        wrong = np.flatnonzero((noted != _UNKNOWN) & (noted != expected))
        if not len(wrong):
            return None
        first = int(wrong[0])
        return (
            f"{len(wrong)} captured rows were not computed from the request's own tokens (position {first}: token "
            f"{noted[first]}, expected {expected[first]}), so none of them is given out; report it as a bug of headgate"
        )

    def _grow(self, size: int) -> None:
        grown = np.full(max(size, 2 * len(self._token_ids)), _UNKNOWN, dtype=np.int32)
        grown[: len(self._token_ids)] = self._token_ids
        self._token_ids = grown
