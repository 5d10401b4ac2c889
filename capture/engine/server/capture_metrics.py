"""Capture's counters on ``/metrics``: of the workers and their consumers, and of the API server that is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Protocol

from headgate.capture.engine.setup.client_errors import refusals
from headgate.capture.monitoring.metrics import EngineStats, Family, Sample, each_worker
from headgate.capture.monitoring.stats import RESULT_BOUNDS_S
from headgate.capture.transport.driver_host import DriverStats
from headgate.capture.transport.result_hub import HubStats

Kind = Literal["counter", "gauge"]

_STAGING: tuple[tuple[str, Kind, str, str], ...] = (
    ("steps", "counter", "steps", "Steps of which something was captured."),
    ("rows", "counter", "rows", "Rows copied off the device, each once however many consumers want it."),
    ("bytes", "counter", "bytes", "Bytes of those rows, over all sites."),
    ("stalls", "counter", "stalls", "Times that the engine had to wait for staging memory."),
    ("stall_seconds", "counter", "stall_s", "Seconds that the engine waited for staging memory."),
    ("dropped_rows", "counter", "dropped_rows", "Rows lost because staging memory did not become free in time."),
    ("dispatch_errors", "counter", "dispatch_errors", "Steps that could not be dispatched; a bug of headgate's."),
    ("lost_results", "counter", "lost_results", "Results whose front end was gone or did not answer."),
    (
        "lost_messages",
        "counter",
        "lost_messages",
        "Messages of rows to consumers in a front end that was gone or slow.",
    ),
    ("process_restarts", "counter", "restarts", "Times that the capture process ended and was started again."),
    ("staged_bytes", "gauge", "staged_bytes", "Bytes of staging memory in use."),
)
_CONSUMERS: tuple[tuple[str, Kind, str, str], ...] = (
    ("rows", "counter", "rows", "Rows delivered to the consumer."),
    ("bytes", "counter", "bytes", "Bytes of those rows, over all sites."),
    ("requests", "counter", "requests", "Requests whose result was reported."),
    ("errors", "counter", "errors", "Requests whose result was an error."),
    ("dropped_rows", "counter", "dropped_rows", "Rows that never reached the consumer."),
    ("spilled_rows", "counter", "spilled_rows", "Rows that went through the spill file."),
    ("stalls", "counter", "stalls", "Times that delivery had to wait for room in the consumer's queue."),
    ("stall_seconds", "counter", "stall_s", "Seconds that delivery waited for room in the consumer's queue."),
    ("hangs", "counter", "hangs", "Times that the consumer was taken for hung."),
    ("lost_results", "counter", "lost_reports", "Results that could not be sent."),
    ("busy_seconds", "counter", "call_s", "Seconds that the consumer's calls took."),
    ("queue_bytes", "gauge", "queued_bytes", "Bytes of rows in the consumer's queue or hands."),
    ("spill_bytes", "gauge", "spilled_bytes", "Bytes of rows in the consumer's spill file."),
    ("hung", "gauge", "is_hung", "Whether the consumer is taken for hung now."),
)
_FRONT_END: tuple[tuple[str, Kind, str], ...] = (
    ("results", "counter", "Results that requests of this API server were waiting for."),
    ("unknown", "counter", "Results and rows for no request of this API server: too late, or of an aborted one."),
    ("malformed", "counter", "Messages to this API server that could not be read."),
    ("waiting", "gauge", "Requests of this API server that expect results."),
    ("failed", "gauge", "Whether results can no longer reach this API server; /health then answers 503."),
)
_WORKER = ("engine", "worker")
_SERVER = ("api_server",)


class CaptureMetrics:
    """Implements `headgate.capture.monitoring.metrics.MetricsPart`."""

    core_method = None

    def families(self, engines: Sequence[EngineStats]) -> Iterator[Family]:
        """Make the families of every worker and of every consumer in it."""
        return families(engines)


def families(engines: Sequence[EngineStats]) -> Iterator[Family]:
    """Counters of every worker and of every consumer in it."""
    workers = list(each_worker(engines))
    for name, kind, key, about in _STAGING:
        found = tuple(Sample(labels=where, value=counted[key]) for where, counted in workers)
        yield Family(name=f"headgate_capture_{name}", kind=kind, about=about, labels=_WORKER, samples=found)
    labels = (*_WORKER, "consumer")
    consumers = [((*where, each["instance"]), each) for where, counted in workers for each in counted["consumers"]]
    yield from _consumer_families("headgate_capture_consumer", labels, consumers)


class ToldFrontEnd(Protocol):
    """A `FrontEnd`, as far as its counters are concerned."""

    def stats(self) -> tuple[HubStats, DriverStats]: ...


def front_end_families(front: ToldFrontEnd, api_server: int) -> Iterator[Family]:
    """Counters of an API server's own process, of the consumers in it, too; `api_server` counts from 0."""
    hub, drivers = front.stats()
    server = str(api_server)
    values = {
        "results": hub.results,
        "unknown": hub.unknown + drivers.unknown,
        "malformed": hub.malformed + drivers.malformed,
        "waiting": hub.waiting,
        "failed": hub.problem is not None,
    }
    for name, kind, about in _FRONT_END:
        found = (Sample(labels=(server,), value=values[name]),)
        yield Family(name=f"headgate_capture_server_{name}", kind=kind, about=about, labels=_SERVER, samples=found)
    consumers = [((server, each.instance), asdict(each)) for each in drivers.consumers]
    yield from _consumer_families("headgate_capture_server_consumer", (*_SERVER, "consumer"), consumers)


def refused(api_server: int) -> Family:
    """Make the family of requests that the API server's own process has refused."""
    return Family(
        name="headgate_refusals",
        kind="counter",
        about="Requests and calls that this API server refused with status 400, by what was wrong with them.",
        labels=("api_server", "about"),
        samples=tuple(Sample(labels=(str(api_server), about), value=count) for about, count in refusals().items()),
    )


def _consumer_families(
    prefix: str, labels: tuple[str, ...], consumers: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]]
) -> Iterator[Family]:
    """Counters of consumers, each with the values of its labels."""
    for name, kind, key, about in _CONSUMERS:
        found = tuple(Sample(labels=where, value=consumer[key]) for where, consumer in consumers)
        yield Family(name=f"{prefix}_{name}", kind=kind, about=about, labels=labels, samples=found)
    yield from _own_families(prefix, labels, consumers)
    yield Family(
        name=f"{prefix}_result_seconds",
        kind="histogram",
        about="Seconds from the end of a request to the consumer's result.",
        labels=labels,
        samples=tuple(
            Sample(labels=where, value=consumer["result_s"], counts=consumer["result_counts"])
            for where, consumer in consumers
        ),
        bounds=RESULT_BOUNDS_S,
    )


def _own_families(
    prefix: str, labels: tuple[str, ...], consumers: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]]
) -> Iterator[Family]:
    """Figures that consumers count by themselves; those of one name, kind and description are one family."""
    found: dict[str, list[tuple[Mapping[str, Any], Sample]]] = {}
    for where, consumer in consumers:
        for figure in consumer["figures"]:
            sample = Sample(labels=where, value=figure["value"])
            found.setdefault(figure["name"], []).append((figure, sample))
    for name, told in sorted(found.items()):
        kind, about = told[0][0]["kind"], told[0][0]["about"]
        samples = tuple(sample for figure, sample in told if figure["kind"] == kind)
        yield Family(name=f"{prefix}_own_{name}", kind=kind, about=about, labels=labels, samples=samples)
