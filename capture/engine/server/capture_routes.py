"""Capture on vLLM's server: the HTTP routes ``/v1/capture/...``, and its counters on ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Depends, HTTPException

from headgate.capture.engine.access.caller import current_caller
from headgate.capture.engine.contracts.route_part import RouteServices
from headgate.capture.engine.requests.capture_frontend import FrontEnd, front_end_of
from headgate.capture.monitoring.metrics import EngineStats, Family, Sample, each_worker
from headgate.capture.monitoring.stats import RESULT_BOUNDS_S
from headgate.capture.schema.registry import load_configured
from headgate.capture.schema.sites import site_map

_TEXT = {"type": "string"}
_CONSUMER = {
    "type": "object",
    "properties": {
        "name": {**_TEXT, "description": "What requests call it."},
        "consumer": {**_TEXT, "description": "Its entry point."},
        "location": {"type": "string", "enum": ["worker", "driver"]},
        "reads_client_spec": {"type": "boolean", "description": "Whether requests can name it."},
        "overload": {"type": "string", "enum": ["block", "drop", "spill"]},
    },
    "required": ["name", "consumer", "location", "reads_client_spec", "overload"],
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "consumers": {"type": "array", "items": _CONSUMER},
        "count": {"type": "integer"},
        "sites": {
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "integer"}},
            "description": "What can be captured: {hook point: layers}.",
        },
    },
    "required": ["consumers", "count", "sites"],
}
_EXAMPLE = {
    "consumers": [
        {
            "name": "filesystem",
            "consumer": "filesystem",
            "location": "worker",
            "reads_client_spec": True,
            "overload": "block",
        }
    ],
    "count": 1,
    "sites": {"post_mlp": [0, 1, 2]},
}


def open_routes(services: RouteServices) -> APIRouter:
    """The router of ``/v1/capture``."""
    router = APIRouter(prefix="/v1/capture", tags=["capture"], dependencies=[Depends(services.require_key)])

    @router.get(
        "/consumers",
        summary="Consumers of captured activations, and what can be captured",
        response_model=None,
        responses={
            200: {"description": "Done.", "content": {"application/json": {"schema": _SCHEMA, "example": _EXAMPLE}}},
            403: {"description": "The request lacks a key of HEADGATE_CAPTURE_KEYS."},
            404: {"description": "The server was started without capture."},
        },
    )
    async def consumers() -> dict[str, Any]:
        """The consumers that the operator configured; their parameters, which may hold secrets, are not told."""
        front = front_end_of(services.engine())
        if front is None:
            raise HTTPException(
                404, "this server was started without capture. Start it with --capture-consumers, such as filesystem"
            )
        return described(front)

    return router


def described(front: FrontEnd) -> dict[str, Any]:
    """The answer of ``GET /v1/capture/consumers``: what the client's key allows, if it has shown one."""
    caller = current_caller()
    sites = [site for site in front.model.sites if caller is None or caller.key.allows_site(site)]
    found = []
    for spec in front.config.consumers:
        if caller is not None and not caller.key.allows_consumer(spec.instance):
            continue
        consumer = load_configured(spec)
        found.append(
            {
                "name": spec.instance,
                "consumer": spec.name,
                "location": consumer.location,
                "reads_client_spec": consumer.reads_client_spec,
                "overload": spec.overload,
            }
        )
    return {"consumers": found, "count": len(found), "sites": site_map(sites)}


Kind = Literal["counter", "gauge"]

_STAGING: tuple[tuple[str, Kind, str, str], ...] = (
    ("steps", "counter", "steps", "Steps of which something was captured."),
    ("rows", "counter", "rows", "Rows copied off the device, each once however many consumers want it."),
    ("bytes", "counter", "bytes", "Bytes of those rows, over all sites."),
    ("stalls", "counter", "stalls", "Times that the engine had to wait for staging memory."),
    ("stall_seconds", "counter", "stall_s", "Seconds that the engine waited for staging memory."),
    ("dropped_rows", "counter", "dropped_rows", "Rows lost because staging memory did not become free in time."),
    ("dispatch_errors", "counter", "dispatch_errors", "Steps that could not be dispatched; a bug of headgate's."),
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
_WORKER = ("engine", "worker")


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
    consumers = [
        ((*where, consumer["instance"]), consumer) for where, counted in workers for consumer in counted["consumers"]
    ]
    labels = (*_WORKER, "consumer")
    for name, kind, key, about in _CONSUMERS:
        found = tuple(Sample(labels=where, value=consumer[key]) for where, consumer in consumers)
        yield Family(name=f"headgate_capture_consumer_{name}", kind=kind, about=about, labels=labels, samples=found)
    yield Family(
        name="headgate_capture_consumer_result_seconds",
        kind="histogram",
        about="Seconds from the end of a request to the consumer's result.",
        labels=labels,
        samples=tuple(
            Sample(labels=where, value=consumer["result_s"], counts=consumer["result_counts"])
            for where, consumer in consumers
        ),
        bounds=RESULT_BOUNDS_S,
    )
