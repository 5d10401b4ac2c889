"""Where the step thread hands over what was captured, whichever process takes it from there."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

import numpy as np

from headgate.capture.delivery.completeness import ConsumerRequest
from headgate.capture.delivery.consumer_thread import UnfinishedWork
from headgate.capture.monitoring.stats import ConsumerStats
from headgate.capture.schema.batch import FinalState, NewRequest
from headgate.capture.schema.consumer import ReadoutFacts, RequestInfo
from headgate.capture.schema.results import Origin
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.capture.staging.host_rows import StagedRows


@dataclass(frozen=True, slots=True)
class RequestBegins:
    """A new request.

    Attributes:
        new: The request. One that is known under its id is given up for it.
        specs: What each consumer gets of it, by the consumer's bit.
        is_same_client: The results of a request that is given up go where this one's go: one result stands for both.
        readouts: Of the worker, by consumer and site; see `by_consumer`.
    """

    new: NewRequest
    specs: Mapping[int, CaptureSpec]
    is_same_client: bool = False
    readouts: Mapping[int, Mapping[Site, ReadoutFacts]] = field(default_factory=dict, repr=False)

    @property
    def req_id(self) -> str:
        """Internal id."""
        return self.new.req_id

    def requests(self) -> dict[int, ConsumerRequest]:
        """Make the request for each consumer, by the consumer's bit."""
        return consumer_requests(self.new, self.specs, self.readouts)


@dataclass(frozen=True, slots=True)
class RequestEnds:
    """The end of a request, put after its last rows; `final` is None if its end is unknown."""

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


def consumer_requests(
    new: NewRequest, specs: Mapping[int, CaptureSpec], readouts: Mapping[int, Mapping[Site, ReadoutFacts]]
) -> dict[int, ConsumerRequest]:
    """The request as each consumer knows it, by the consumer's bit."""
    capture = None if new.wire is None else new.wire.get("capture")
    if capture is None:
        return {}
    prompt_token_ids = np.asarray(new.prompt_token_ids, dtype=np.int64)
    made = {}
    for bit, spec in specs.items():
        num_samples = capture["n"]
        info = RequestInfo(
            request_id=new.req_id,
            client_request_id=capture["id"],
            # With n > 1 vLLM calls the samples "0_ID", "1_ID", ...
            sample_index=int(new.req_id.split("_", 1)[0]) if num_samples > 1 else 0,
            num_samples=num_samples,
            prompt_token_ids=prompt_token_ids,
            spec=spec,
            readouts={site: facts for site, facts in readouts.get(bit, {}).items() if site in spec.sites},
            origin=Origin(reply=capture["reply"], key=capture["key"]),
        )
        made[bit] = ConsumerRequest(info)
    return made


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
