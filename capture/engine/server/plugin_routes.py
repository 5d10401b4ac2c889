"""Entry point of the group ``vllm.endpoint_plugins``: headgate's own routes on vLLM's server.

vLLM loads it only where ``VLLM_PLUGINS`` names it: ``VLLM_PLUGINS=headgate``. Fields of requests work without it.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, HTTPException, Request
from starlette.datastructures import State

from headgate.capture.engine.access.access_key import ADMIN, role_of
from headgate.capture.engine.access.caller import current_caller
from headgate.capture.engine.contracts.parts import Part, collect
from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.contracts.route_part import RouteClient
from headgate.capture.engine.frontends.engine_handles import NotConfiguredError
from headgate.capture.engine.requests.request_reader import reader_of
from headgate.capture.engine.server.access_keys import (
    forwarded_for,
    install_clients,
    open_access,
    peer_of,
    require_role,
)
from headgate.capture.engine.server.bodies.field_guard import install_guard
from headgate.capture.engine.server.bodies.middleware import LONG_BODY, install_bodies
from headgate.capture.engine.server.bodies.msgpack_fields import read_msgpack
from headgate.capture.engine.server.bodies.parsing import read_json, read_short_json
from headgate.capture.engine.server.loop_threads import in_turn, run_in_thread
from headgate.capture.engine.server.metrics_page import Counters, MetricsPage
from headgate.capture.engine.server.retry_after import RetryAfterMiddleware
from headgate.capture.engine.server.scoring import EngineVocabulary, score, vocabulary_of
from headgate.capture.engine.setup.client_errors import answer_refused, as_client_error, refused_error
from headgate.capture.engine.setup.logs import speak_through_vllm
from headgate.capture.engine.setup.server_args import read_server_args
from headgate.capture.engine.setup.settings import OUR_KEY
from headgate.capture.schema.config import server_config
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.results import KeptRequest

logger = logging.getLogger("headgate")

_Decode = Callable[[bytes], object]
_MSGPACK = (read_msgpack, read_msgpack)
_DECODERS: dict[str, tuple[_Decode, _Decode]] = {
    "application/json": (read_short_json, read_json),
    "application/msgpack": _MSGPACK,
    "application/x-msgpack": _MSGPACK,
}
"""By content type: of short bodies, on the event loop, and of long ones, on a thread."""


class Endpoints:
    """Implements ``vllm.plugins.endpoint_plugins.interface.EndpointPlugin``."""

    name = "headgate"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._parts: tuple[str, ...] = ()
        """Names of those whose routes are served."""

    def attach_router(self, app: FastAPI) -> None:
        """Add every part's routes, our counters to the page of metrics, and the reader of bodies."""
        open_access(app.state)
        configuration = read_server_args(app.state.args).additional_config
        configured = configuration.get(OUR_KEY)
        routers = collect(self._routes, needed=configured if isinstance(configured, Mapping) else ())
        for router in routers.values():
            app.include_router(router)
        self._parts = tuple(routers)
        app.add_middleware(RetryAfterMiddleware)
        install_guard(app, self._parts)
        app.add_middleware(MetricsPage, counters=Counters(lambda: self._engine))
        install_bodies(app, server_config(configuration))
        install_clients(app)
        app.add_exception_handler(refused_error(), answer_refused)

    async def init_state(self, engine_client: object, state: State, args: Namespace) -> None:
        """The engine is there; the keys are read."""
        self._engine = engine_client
        speak_through_vllm()
        access = open_access(state)
        access.read_again_on_hangup()
        for name in self._parts:
            who = access.keys.described(role_of(name), is_local=access.is_local)
            logger.info("headgate: /v1/%s is served; %s", name, who)

    def _routes(self, part: Part) -> APIRouter | None:
        return part.routes(PartServices(part.name, lambda: self._engine))


class PartServices:
    """Implements `headgate.capture.engine.contracts.route_part.RouteServices`.

    Args:
        part: Name of its section.
        engine: The server's `AsyncLLM`, or None while it is not there.
    """

    def __init__(self, part: str, engine: Callable[[], Any]) -> None:
        self._part = part
        self.engine = engine

    def handle(self) -> Any:
        """Return what the engine has under the part's name, or raise an error 404."""
        try:
            return getattr(self.engine(), self._part)
        except NotConfiguredError as error:
            raise HTTPException(404, str(error)) from None

    async def require_key(self, request: Request) -> None:
        """Raise an error 403 unless `request` carries one of the part's keys."""
        require_role(role_of(self._part), request)

    def has_key(self, request: Request) -> bool:
        """Whether `require_key` lets `request` pass."""
        try:
            require_role(role_of(self._part), request)
        except refused_error():
            return False
        return True

    async def require_admin(self, request: Request) -> None:
        """Raise an error 403 unless `request` carries a key with the role ``admin``."""
        require_role(ADMIN, request)

    def client(self, request: Request) -> RouteClient:
        """The client that `require_key` has let pass."""
        caller = current_caller()
        address, forwarded = peer_of(request.scope), forwarded_for(request.headers)
        key = None if caller is None else caller.key_with(role_of(self._part))
        if key is None:
            return RouteClient(None, address, is_bound=False, forwarded=forwarded)
        is_bound = not key.is_of_environment and not key.has_role(ADMIN)
        return RouteClient(key.name, address, is_bound, forwarded)

    async def read_object(self, request: Request) -> dict[str, Any]:
        """Read the body of `request`; see the function `read_object`."""
        return await read_object(request)

    def find_kept(self, name: str, sample_index: int, field: str) -> KeptRequest:
        """Find the rows that the client at hand has kept."""
        return reader_of(self.engine()).find_kept(name, sample_index, field)

    async def vocabulary(self) -> EngineVocabulary:
        """Return the tokens of the model."""
        return await vocabulary_of(self.engine())

    async def score(self, prompt: Sequence[int], token_ids: Sequence[int], fields: Document) -> Sequence[float]:
        """Return the logprobs of tokens after a prompt."""
        return await score(self.engine(), prompt, token_ids, fields)

    def client_errors(self) -> AbstractContextManager[None]:
        """Turn each `RequestError` into an answer with status 400."""
        return as_client_error()


async def read_object(request: Request) -> dict[str, Any]:
    """The body of a request as an object.

    Raises:
        HTTPException: With status 415, if it is neither JSON nor msgpack.
        RequestError: If it cannot be decoded, or is no object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _DECODERS:
        raise HTTPException(
            415, f"Unsupported Media Type {kind!r}: send Content-Type: application/json or application/msgpack"
        )
    body = await _body_of(request)
    try:
        short, long = _DECODERS[kind]
        document = short(body) if len(body) < LONG_BODY else await run_in_thread(partial(in_turn, partial(long, body)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError("body", f"is not {kind.rpartition('/')[2]}: {error}") from None
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise RequestError("body", f"expected an object, got {type(document).__name__}")
    return document


async def _body_of(request: Request) -> bytes:
    """As ``request.body()``, which copies what `bodies` hands on in one piece."""
    pieces = [piece async for piece in request.stream() if piece]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
