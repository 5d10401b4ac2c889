"""Entry point of the group ``vllm.endpoint_plugins``: headgate's own routes on vLLM's server.

vLLM loads it only where ``VLLM_PLUGINS`` names it: ``VLLM_PLUGINS=headgate``. Fields of requests work without it.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException, Request

from headgate.capture.engine.bodies import install_bodies
from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.handles import NotConfiguredError
from headgate.capture.engine.keys import access_of, require_key
from headgate.capture.engine.logs import speak_through_vllm
from headgate.capture.engine.metrics import Counters, MetricsPage
from headgate.capture.engine.route_seam import GROUP, RouteServices
from headgate.capture.errors import RequestError
from headgate.capture.server_config import server_config

logger = logging.getLogger("headgate")

_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "application/json": msgspec.json.decode,
    "application/msgpack": msgspec.msgpack.decode,
    "application/x-msgpack": msgspec.msgpack.decode,
}
_LONG = 1 << 16
"""Bodies of more bytes are decoded beside the event loop."""


class Endpoints:
    """Implements ``vllm.plugins.endpoint_plugins.interface.EndpointPlugin``."""

    name = "headgate"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None

    def attach_router(self, app: FastAPI) -> None:
        """Add every part's routes, our counters to the page of metrics, and the reader of bodies."""
        for entry in _parts():
            app.include_router(entry.load()(self._services(entry.name)))
        app.add_middleware(MetricsPage, counters=Counters(lambda: self._engine))
        install_bodies(app, server_config(getattr(app.state.args, "additional_config", None)))

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """The engine is there; the keys are read."""
        self._engine = engine_client
        speak_through_vllm()
        for entry in _parts():
            logger.info("headgate: /v1/%s is served; %s", entry.name, access_of(entry.name, args))

    def _services(self, part: str) -> RouteServices:
        async def check_key(request: Request) -> None:
            require_key(part, request)

        return RouteServices(
            part=part,
            engine=lambda: self._engine,
            handle=lambda: self._handle(part),
            require_key=check_key,
            read_object=read_object,
            client_errors=as_client_error,
        )

    def _handle(self, part: str) -> Any:
        try:
            return getattr(self._engine, part)
        except NotConfiguredError as error:
            raise HTTPException(404, str(error)) from None


def _parts() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda entry: entry.name)


async def read_object(request: Request) -> dict[str, Any]:
    """The body of a request as an object.

    Raises:
        HTTPException: With status 415, if it is neither JSON nor msgpack.
        RequestError: If it cannot be decoded, or is no object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    decode = _DECODERS.get(kind)
    if decode is None:
        raise HTTPException(
            415, f"Unsupported Media Type {kind!r}: send Content-Type: application/json or application/msgpack"
        )
    body = await request.body()
    try:
        document = decode(body) if len(body) < _LONG else await asyncio.to_thread(decode, body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError("body", f"is not {kind.rpartition('/')[2]}: {error}") from None
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise RequestError("body", f"expected an object, got {type(document).__name__}")
    return document
