"""Capture on vLLM's server: the HTTP routes ``/v1/capture/...``."""

from __future__ import annotations

from fastapi import APIRouter, Depends, HTTPException

from headgate.capture.engine.access.caller import current_caller
from headgate.capture.engine.contracts.route_part import RouteServices
from headgate.capture.engine.requests.capture_frontend import FrontEnd, front_end_of
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
    async def consumers() -> dict[str, object]:
        """The consumers that the operator configured; their parameters, which may hold secrets, are not told."""
        engine = services.engine()
        front = None if engine is None else front_end_of(engine)
        if front is None:
            raise HTTPException(
                404, "this server was started without capture. Start it with --capture-consumers, such as filesystem"
            )
        return described(front)

    return router


def described(front: FrontEnd) -> dict[str, object]:
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
