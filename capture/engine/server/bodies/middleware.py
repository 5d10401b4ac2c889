"""Bodies of requests to vLLM's server: none is longer than allowed, and long ones are read on a thread.

ASGI middleware. It is installed while routes are attached and so lies within all of vLLM's: bodies are read once the
server's own checks (``--api-key``) have passed. From long JSON bodies of the routes that take our fields, and from
msgpack bodies of any length, the fields of parts are taken out and read here; the server sees the rest, as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from headgate.capture.engine.contracts.parts import request_parts
from headgate.capture.engine.contracts.vllm_frontend import AsgiApp, Receive, Scope, Send
from headgate.capture.engine.requests.call_context import NOTHING, ExtractedFields, hold, release
from headgate.capture.engine.requests.request_reader import reader_of
from headgate.capture.engine.server.bodies.asgi import METHODS, path_of, refuse, replay, type_of
from headgate.capture.engine.server.bodies.parsing import EXTRACT, FieldExtractor, extract_json
from headgate.capture.engine.server.loop_threads import run_in_thread
from headgate.capture.schema.config import ServerConfig
from headgate.capture.schema.errors import RequestError

if TYPE_CHECKING:
    from fastapi import FastAPI

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
LONG = 32 << 10
"""JSON bodies of fewer bytes are left to the server: on its loop they take less time than a thread needs to start.
Those that say so beforehand are not even looked at: the server itself reads no more than was declared."""
_HUGE = 1 << 20
"""Bodies of this many bytes are put together on a thread: Python's lock is free meanwhile."""

READ_AHEAD = 2 << 20
"""Bytes of a body that uvicorn reads before its application asks for them. With its own 64 KiB, the vectors of a
request take a turn of the event loop for each 256 KiB, and a busy loop's turns take milliseconds."""
_UVICORN, _LIMIT = "uvicorn.protocols.http.", "HIGH_WATER_LIMIT"


def install_bodies(app: FastAPI, config: ServerConfig) -> None:
    """Put the middleware into a `fastapi.FastAPI` application that is being made."""
    app.add_middleware(Bodies, max_bytes=config.max_body_bytes)
    read_ahead(min(READ_AHEAD, config.max_body_bytes))


def read_ahead(num_bytes: int) -> None:
    """Let uvicorn, in this process, read so much of a body ahead; what it has by itself is the least.

    It has no setting for that: its protocols take the limit from one module when they are imported.
    """
    from uvicorn.protocols.http import flow_control

    limit = max(num_bytes, getattr(flow_control, _LIMIT))
    for name, module in list(sys.modules.items()):
        if name.startswith(_UVICORN) and hasattr(module, _LIMIT):
            setattr(module, _LIMIT, limit)


class Bodies:
    """The middleware.

    Args:
        app: What it wraps.
        max_bytes: Of one body.
    """

    def __init__(self, app: AsgiApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._short = min(LONG, max_bytes)
        self._names = tuple(name for part in request_parts().values() for name in part.fields)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in METHODS:
            await self._app(scope, receive, send)
            return
        given = scope["headers"]
        headers = dict(reversed(given))  # of two by one name the first counts, as for the server
        kind = type_of(headers)
        extract = EXTRACT.get(kind) if path_of(scope) in ROUTES else None
        declared = _declared(headers)
        is_short = declared is not None and declared < self._short and len(headers) == len(given)
        if kind == "multipart/form-data" or (is_short and extract in (None, extract_json)):
            await self._app(scope, receive, send)
            return
        try:
            chunks = await self._read(declared or 0, receive)
        except ConnectionResetError:
            return  # nobody waits for an answer
        if chunks is None:
            message = f"the body has more than {self._max_bytes} bytes (the server's max_body_bytes)"
            await refuse(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
            return
        if extract is not None and (extract is not extract_json or sum(map(len, chunks)) >= LONG):
            await self._serve_extracted(extract, chunks, scope, receive, send)
            return
        is_huge = sum(map(len, chunks)) >= _HUGE
        body = await run_in_thread(partial(b"".join, chunks)) if is_huge else b"".join(chunks)
        await self._app(scope, replay(body, receive), send)

    async def _serve_extracted(
        self, extract: FieldExtractor, chunks: list[bytes], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            rest, taken = await run_in_thread(partial(self._extract, scope, extract, chunks))
        except RequestError as error:
            await refuse(send, HTTPStatus.BAD_REQUEST, str(error), error.field)
            return
        token = hold(taken)
        try:
            json_scope = {**scope, "headers": _json_headers(scope["headers"], len(rest))}
            await self._app(json_scope, replay(rest, receive), send)
        finally:
            release(token)

    async def _read(self, declared: int, receive: Receive) -> list[bytes] | None:
        """The body in pieces; None if it is too long. One a little too long is received, so that its sender listens.

        Raises:
            ConnectionResetError: If the client is gone.
        """
        if declared > 2 * self._max_bytes:
            return None
        chunks, size, is_more = [], 0, True
        while is_more and size <= 2 * self._max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            chunk = message.get("body", b"")
            size += len(chunk)
            if size <= self._max_bytes:
                chunks.append(chunk)
            else:
                chunks.clear()
            is_more = message.get("more_body", False)
        return chunks if size <= self._max_bytes else None

    def _extract(self, scope: Scope, extract: FieldExtractor, chunks: list[bytes]) -> tuple[bytes, ExtractedFields]:
        body = b"".join(chunks)
        chunks.clear()  # here, not on the event loop: giving this much memory back takes time
        rest, fields = extract(body, self._names)
        fields = {name: value for name, value in fields.items() if value is not None}
        if not fields:
            return rest, NOTHING
        reader = reader_of(scope["app"].state.engine_client)
        return rest, ExtractedFields(fields, reader.read_parts(fields))


def _declared(headers: Mapping[bytes, bytes]) -> int | None:
    """The length that the client has declared, which servers hold it to; None if it has not, or for something else."""
    if b"transfer-encoding" in headers or b"content-encoding" in headers:
        return None
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() else None


def _json_headers(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    others = [(key, value) for key, value in headers if key not in (b"content-type", b"content-length")]
    return [*others, (b"content-type", b"application/json"), (b"content-length", b"%d" % length)]
