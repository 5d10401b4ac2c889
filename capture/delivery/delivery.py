"""Where the step thread hands over what was captured, whichever process takes it from there."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from headgate.capture.delivery.completeness import ConsumerRequest
from headgate.capture.delivery.consumer_queue import UnfinishedWork
from headgate.capture.monitoring.stats import ConsumerStats
from headgate.capture.schema.batch import Begin, End, MemoryWanted
from headgate.capture.schema.consumer import ReadoutFacts, ReadoutSite, RequestInfo, by_consumer
from headgate.capture.schema.results import Origin
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec, SpecReader
from headgate.capture.staging.host_rows import StagedRows

Dispatched = Begin | StagedRows | End | MemoryWanted

T = TypeVar("T")


class Handoff(Generic[T]):
    """First in, first out: the step thread puts, and the one dispatch thread takes.

    It has no bound of its own: rows are bounded by the staging memory that they lie in, and everything else is small.
    The lock keeps items from being put after the end; nothing else runs under it, so the step thread never waits for a
    consumer here. A `SimpleQueue` wakes the other thread without running Python for it.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[T | None] = SimpleQueue()  # None follows the last item
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
        """Refuse further items; `next_item` still returns the items that were put."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._items.put(None)

    @property
    def is_done(self) -> bool:
        """Whether it is closed and everything was taken. For the thread that takes."""
        with self._lock:  # without it, the end might not be put yet, and the last item be mistaken for it
            return self._is_exhausted or (self._is_closed and self._items.qsize() == 1)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseReport:
    """Work that was unfinished when capture was closed.

    Attributes:
        consumers: Unfinished work of each consumer, by instance.
        is_dispatch_stuck: Rows were still being dispatched when time was up.
        num_unsent: Results and messages that their front end did not acknowledge.
        num_lost: Requests whose capture process ended with their rows, and which got an error.
    """

    consumers: Mapping[str, UnfinishedWork] = field(default_factory=dict)
    is_dispatch_stuck: bool = False
    num_unsent: int = 0
    num_lost: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether everything was delivered."""
        is_left = self.is_dispatch_stuck or self.num_unsent or self.num_lost
        return not is_left and set(self.consumers.values()) <= {UnfinishedWork()}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveryStats:
    """Counters of a delivery; see `CaptureStats`, whose fields these are."""

    dispatch_errors: int = 0
    lost_results: int = 0
    lost_messages: int = 0
    restarts: int = 0
    consumers: tuple[ConsumerStats, ...] = ()


class Delivery(Protocol):
    """Takes rows and requests from the step thread, in order, and has consumers called and results sent.

    `put`, `flush`, `is_lost` and `recover` are for the step thread, `stats` and `close` for any.
    """

    @property
    def is_lost(self) -> bool:
        """Whether all that was handed over is gone, its requests having got an error; nothing is taken meanwhile."""
        ...

    def recover(self) -> None:
        """Say that every request and row of before is forgotten: what is put from now on is new."""
        ...

    def put(self, item: Dispatched) -> bool:
        """Take `item`, without waiting; False if it was not taken. A request that is not taken has got its error.

        What was taken may lie until `flush`, or until more is put.
        """
        ...

    def flush(self) -> None:
        """See to it that everything that was put is on its way."""
        ...

    def stats(self) -> DeliveryStats:
        """Counters as of now."""
        ...

    def close(self, timeout_s: float) -> CloseReport:
        """Take nothing more, deliver what is there, close the consumers, and end every thread."""
        ...
