"""Statistics of capture. Counters never decrease; a gauge is marked with "now"."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

RESULT_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the buckets in which `ConsumerStats.result_counts` counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A number that a consumer counts by itself.

    Attributes:
        name: Small letters, digits and ``_``: ``/metrics`` prefixes it with ``headgate_capture_consumer_own_``.
        kind: Counters only ever grow while the consumer lives.
        about: A sentence, with the unit.
        value: Now.
    """

    name: str
    kind: Literal["counter", "gauge"]
    about: str
    value: float


@runtime_checkable
class HasFigures(Protocol):
    """A consumer that counts something by itself."""

    def figures(self) -> Sequence[Figure]:
        """Return all its figures, at once: for each scrape of ``/metrics``. Any thread."""
        ...


def figures_of(consumer: object) -> tuple[Figure, ...]:
    """Return the figures of a consumer; none if it has none."""
    return tuple(consumer.figures()) if isinstance(consumer, HasFigures) else ()


def added_figures(before: Sequence[Figure], now: Sequence[Figure]) -> tuple[Figure, ...]:
    """Return the figures of a consumer that was opened anew: counters of both together, gauges of `now`."""
    earlier = {each.name: each for each in before if each.kind == "counter"}
    found = []
    for each in now:
        known = earlier.pop(each.name, None)
        is_sum = known is not None and each.kind == "counter"
        found.append(replace(each, value=each.value + known.value) if known is not None and is_sum else each)
    return (*found, *earlier.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerStats:
    """One consumer on one worker.

    Attributes:
        instance: What requests call it.
        rows: Rows delivered; a row is one position of one request, at all its sites.
        bytes: Bytes of them, over all sites.
        requests: Requests whose result was reported.
        errors: Those of them that ended in ``error``.
        dropped_rows: Rows that never reached it.
        spilled_rows: Rows that went through the spill file.
        stalls: Times that delivery had to wait for room in its queue.
        stall_s: Seconds of that.
        hangs: Times that it was taken for hung.
        lost_reports: Results that could not be sent.
        call_s: Seconds that its calls took.
        result_s: Seconds from the ends of requests to their results, summed up.
        result_counts: Requests by those seconds: up to each of `RESULT_BOUNDS_S`, and above the last.
        queued_bytes: Now: rows in its queue or in its hands.
        spilled_bytes: Now: rows in its spill file.
        is_hung: Now.
        figures: The numbers that it counts by itself.
    """

    instance: str
    rows: int = 0
    bytes: int = 0
    requests: int = 0
    errors: int = 0
    dropped_rows: int = 0
    spilled_rows: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    hangs: int = 0
    lost_reports: int = 0
    call_s: float = 0.0
    result_s: float = 0.0
    result_counts: Sequence[int] = (0,) * (len(RESULT_BOUNDS_S) + 1)
    queued_bytes: int = 0
    spilled_bytes: int = 0
    is_hung: bool = False
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureStats:
    """Capture on one worker.

    Attributes:
        steps: Steps with captured rows.
        rows: Batch rows copied off the device, each once however many consumers want it.
        bytes: Bytes of them, over all sites.
        stalls: Times that the step thread had to wait for staging memory.
        stall_s: Seconds of that: time that the engine lost.
        dropped_rows: Rows lost because staging memory did not become free in time.
        dispatch_errors: Steps that could not be dispatched; a bug of ours, logged with its traceback.
        staged_bytes: Now: staging memory in use.
        lost_results: Results whose front end was gone or did not answer.
        lost_messages: Likewise, messages of rows to consumers in it; the rows count in their requests' results.
        restarts: Times that the capture process ended and was started again; its open requests got an error.
        consumers: One for each consumer, in the order of the configuration.
    """

    steps: int = 0
    rows: int = 0
    bytes: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    dropped_rows: int = 0
    dispatch_errors: int = 0
    staged_bytes: int = 0
    lost_results: int = 0
    lost_messages: int = 0
    restarts: int = 0
    consumers: tuple[ConsumerStats, ...] = ()


@dataclass(slots=True)
class QueueCounters:
    """The growing part of `ConsumerStats`; guarded by the queue's lock."""

    rows: int = 0
    bytes: int = 0
    requests: int = 0
    errors: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    hangs: int = 0
    lost_reports: int = 0
    call_s: float = 0.0
    result_s: float = 0.0
    result_counts: list[int] = field(default_factory=lambda: [0] * (len(RESULT_BOUNDS_S) + 1))

    def note_result(self, seconds: float) -> None:
        """A request's result came so long after its end."""
        self.result_s += seconds
        self.result_counts[bisect_left(RESULT_BOUNDS_S, seconds)] += 1


@dataclass(slots=True)
class StagingCounters:
    """The step thread's counters: it alone writes them."""

    steps: int = 0
    rows: int = 0
    bytes: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    dropped_rows: int = 0
