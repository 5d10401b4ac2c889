"""Refuses headgate's fields on routes that would ignore them.

ASGI middleware within vLLM's own, on every server with headgate in it, whatever it is configured for. Bodies of routes
that read our fields pass as they are; `route_table` has the routes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.contracts.vllm_frontend import AsgiApp, AsgiMessage, Receive, Scope, Send
from headgate.capture.engine.requests.stray_fields import find_ignored, is_of_interest, is_ours
from headgate.capture.engine.server.bodies.asgi import METHODS, path_of, refuse, replay, type_of
from headgate.capture.engine.server.bodies.route_table import Kind, kind_of
from headgate.capture.schema.errors import RequestError

if TYPE_CHECKING:
    from fastapi import FastAPI

_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
_NULL, _FALSE = b"null", b"false"
_SESSION = "session"
"""Field of a websocket's events that holds its settings."""


def install_guard(app: FastAPI, own: Collection[str] = ()) -> None:
    """Put the middleware into a `fastapi.FastAPI` application that is being made.

    Args:
        app: The application.
        own: Parts whose routes it has.
    """
    app.add_middleware(FieldGuard, own=tuple(f"/v1/{part}/" for part in own))


class FieldGuard:
    """The middleware.

    Args:
        app: What it wraps.
        own: Paths of headgate's routes, which check their bodies themselves.
    """

    def __init__(self, app: AsgiApp, own: tuple[str, ...]) -> None:
        self._app = app
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._app(scope, _guarded(receive, send), send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = path_of(scope)
        kind = Kind.NOT_GENERATING if path.startswith(self._own) else kind_of(path)
        if scope["method"] not in METHODS or kind not in (Kind.REFUSED, Kind.PARAMETERS):
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            return  # the client is gone
        is_form = type_of(dict(reversed(scope["headers"]))) in _FORMS  # as the server: the first counts
        document = await _fields_of_form(scope, body) if is_form else _fields_of_json(body)
        field = find_ignored(document, reads_extra_args=kind is Kind.PARAMETERS)
        if field is None:
            await self._app(scope, replay(body, receive), send)
            return
        error = RequestError(field, _why(path, kind))
        await refuse(send, HTTPStatus.BAD_REQUEST, str(error), error.field)


def _why(path: str, kind: Kind) -> str:
    if kind is Kind.PARAMETERS:
        return f"{path} takes it within sampling_params.extra_args alone"
    return f"{path} does not take it; use /v1/completions, /v1/chat/completions or /v1/responses"


async def _read(receive: Receive) -> bytes | None:
    pieces, is_more = [], True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        is_more = message.get("more_body", False)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _fields_of_form(scope: Scope, body: bytes) -> Document:
    """Fields of a form, read as the server will read it; nothing if it cannot be read."""
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

    async def nothing_more() -> AsgiMessage:
        return {"type": "http.disconnect"}

    try:
        async with Request(scope, replay(body, nothing_more)).form() as form:
            return {name: value for name, value in form.items() if is_of_interest(name)}
    except HTTPException:
        return {}


def _fields_of_json(body: bytes, also: str = "") -> Document:
    """Those fields of a JSON object that matter here; nothing for what is no JSON object, which the server refuses."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {name: _read_raw(name, value) for name, value in raw.items() if is_of_interest(name) or name == also}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        document = json.loads(body)  # takes what the server takes and msgspec does not: UTF-16, NaN, lone surrogates
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _read_raw(name: str, value: msgspec.Raw) -> object:
    """Whether a field of ours says anything; of other fields the value."""
    if not is_ours(name):
        return msgspec.json.decode(value)
    text = bytes(value).strip()
    return None if text == _NULL else text != _FALSE


def _guarded(receive: Receive, send: Send) -> Receive:
    """Receive the events of a websocket, except those with a field of ours: they are answered with an error."""

    async def guarded() -> AsgiMessage:
        while True:
            message = await receive()
            if message["type"] != "websocket.receive" or (field := _find_in_event(message)) is None:
                return message
            error = {"type": "error", "error": f"{field}: this route does not take it", "code": "invalid_event"}
            await send({"type": "websocket.send", "text": json.dumps(error)})

    return guarded


def _find_in_event(message: AsgiMessage) -> str | None:
    given = message.get("text") or message.get("bytes") or b""
    event = _fields_of_json(given.encode() if isinstance(given, str) else given, also=_SESSION)
    found = find_ignored(event)
    session = event.get(_SESSION)
    if found is None and isinstance(session, Mapping):
        found = find_ignored(session, f"{_SESSION}.")
    return found
