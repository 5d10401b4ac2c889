"""headgate's families on the server's own ``/metrics`` page.

The page of vLLM is made by the API server process that is asked, from files that all of them share; our counters live
in workers and engine cores, beside those of that process. So they are fetched when the page is asked for, at most once
a second, between two steps of the engine, and appended to it. An engine that takes long over a step does not hold the
page up: it then shows what was fetched last, and ``headgate_stats_age_seconds`` says how old that is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, cast

from headgate.capture.engine.client_errors import refusals
from headgate.capture.engine.contracts.core_calls import METHOD
from headgate.capture.engine.contracts.core_part import CoreAnswer
from headgate.capture.engine.contracts.parts import metrics_parts
from headgate.capture.engine.requests.capture_frontend import FrontEnd, front_end_of
from headgate.capture.engine.setup.settings import sections
from headgate.capture.engine.vllm_types import AsgiApp, AsgiMessage, AsyncEngineClient, AsyncLLM, Receive, Scope, Send
from headgate.capture.monitoring.metrics import EngineStats, Family, MetricsPart, Sample, each_worker
from headgate.capture.monitoring.stats import RESULT_BOUNDS_S

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


Kind = Literal["counter", "gauge"]

_STAGING: tuple[tuple[str, Kind, str, str], ...] = (
    ("steps", "counter", "steps", "Steps with captured rows."),
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


def front_end_families(front: FrontEnd, api_server: int) -> Iterator[Family]:
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
    for name, reported in sorted(found.items()):
        kind, about = reported[0][0]["kind"], reported[0][0]["about"]
        samples = tuple(sample for figure, sample in reported if figure["kind"] == kind)
        yield Family(name=f"{prefix}_own_{name}", kind=kind, about=about, labels=labels, samples=samples)


logger = logging.getLogger("headgate")

PAGE = "/metrics"
FRESH_S = 1.0
PATIENCE_S = 2.0


class Counters:
    """Counters of one server's engine cores and workers. Event loop only.

    Args:
        engine: The `AsyncLLM`, or None while it is not there.
    """

    def __init__(self, engine: Callable[[], AsyncLLM | None]) -> None:
        self._engine = engine
        self._families: tuple[Family, ...] = ()
        self._fetched_at: float | None = None
        self._fetching: asyncio.Task[None] | None = None

    async def families(self) -> tuple[Family, ...]:
        """Everything, not older than `FRESH_S` if the engine answers in time; nothing if nothing is configured."""
        engine = self._engine()
        if engine is None or not sections(engine.vllm_config):
            return ()
        now = time.monotonic()
        if self._fetching is None and (self._fetched_at is None or now - self._fetched_at >= FRESH_S):
            self._fetching = asyncio.create_task(self._fetch(engine))
        if self._fetching is not None:
            await asyncio.wait([self._fetching], timeout=PATIENCE_S)
        here = _of_this_process(engine)
        if self._fetched_at is None:
            return here
        return *self._families, *here, _age(time.monotonic() - self._fetched_at)

    async def _fetch(self, engine: AsyncLLM) -> None:
        try:
            fetched_at = time.monotonic()
            found = await _fetch_parts(engine, metrics_parts())
            self._families = tuple(
                family
                for name, part in metrics_parts().items()
                if name in found
                for family in part.families(found[name])
            )
            self._fetched_at = fetched_at
        except Exception as error:  # noqa: BLE001  (the page is served all the same, and says how old its values are)
            logger.warning("headgate: counters could not be fetched: %r", error)
        finally:
            self._fetching = None


def _of_this_process(engine: AsyncLLM) -> tuple[Family, ...]:
    """Make the families of the front end in this process, which needs no fetching."""
    front, api_server = front_end_of(engine), max(engine.vllm_config.parallel_config._api_process_rank, 0)
    of_capture = () if front is None else tuple(front_end_families(front, api_server))
    return *of_capture, refused(api_server)


async def _fetch_parts(engine: AsyncLLM, parts: Mapping[str, MetricsPart]) -> dict[str, list[EngineStats]]:
    """Ask each engine core and its workers about every configured part."""
    configured = {name: part for name, part in parts.items() if name in sections(engine.vllm_config)}
    client = engine.engine_core
    cores = list(client.core_engines)
    answers = await asyncio.gather(*(_fetch_core(client, core, configured) for core in cores))
    return {name: [answer[name] for answer in answers] for name in configured}


async def _fetch_core(
    client: AsyncEngineClient, core: object, parts: Mapping[str, MetricsPart]
) -> dict[str, EngineStats]:
    stats = client._call_utility_async("collective_rpc", "headgate_stats", None, (), None, engine=core)
    methods = {name: part.core_method for name, part in parts.items() if part.core_method is not None}
    calls = [client._call_utility_async(METHOD, name, method, {}, engine=core) for name, method in methods.items()]
    found, *answers = await asyncio.gather(stats, *calls)
    workers = cast("Sequence[Mapping[str, Mapping[str, object] | None]]", found)
    reported = {
        name: cast("Mapping[str, object]", cast("CoreAnswer", answer)["ok"])
        for name, answer in zip(methods, answers, strict=True)
    }
    return {
        name: EngineStats(workers=[worker.get(name) for worker in workers], core=reported.get(name)) for name in parts
    }


def _age(seconds: float) -> Family:
    return Family(
        name="headgate_stats_age_seconds",
        kind="gauge",
        about="Seconds since the values of headgate's other families were fetched from the engine.",
        labels=(),
        samples=(Sample(labels=(), value=seconds),),
    )


class MetricsPage:
    """ASGI middleware: appends families to the server's metrics page.

    Args:
        app: The server.
        counters: What is appended.
    """

    def __init__(self, app: AsgiApp, counters: Counters) -> None:
        self._app = app
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "GET" or path != PAGE:
            await self._app(scope, receive, send)
            return
        ours = render(await self._counters.families())
        page = Page(send, ours)
        await self._app(scope, receive, page.send)


class Page:
    """One answer: held back until it is whole, then sent with `ours` after it, if it is what it is expected to be."""

    def __init__(self, send: Send, ours: bytes) -> None:
        self._send = send
        self._ours = ours
        self._start: AsgiMessage = {}
        self._body: list[bytes] = []

    async def send(self, message: AsgiMessage) -> None:
        """ASGI's ``send``."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body.append(message.get("body", b""))
        if message.get("more_body"):
            return
        body = b"".join(self._body)
        headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        if self._start["status"] == 200 and _is_plain(headers):
            body += self._ours
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _is_plain(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    known = {name.lower(): value for name, value in headers}
    return known.get(b"content-type", b"").startswith(b"text/plain") and b"content-encoding" not in known


def render(families: Sequence[Family]) -> bytes:
    """Families in the text format of Prometheus."""
    from prometheus_client import generate_latest
    from prometheus_client.registry import Collector, CollectorRegistry

    class Ours(Collector):
        def collect(self) -> Iterator[Metric]:
            return map(_metric, families)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Ours())
    return bytes(generate_latest(registry))


def _metric(family: Family) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.about, labels=family.labels)
        for sample in family.samples:
            histogram.add_metric(sample.labels, _cumulative(family.bounds, sample.counts), sample.value)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.about, labels=family.labels)
    for sample in family.samples:
        metric.add_metric(sample.labels, float(sample.value))
    return metric


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, int]]:
    edges = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return [(edge, sum(counts[: index + 1])) for index, edge in enumerate(edges)]
