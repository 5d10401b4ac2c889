"""Bodies of requests to vLLM's server: none is longer than allowed, and long ones are read on a thread.

ASGI middleware. It is installed while routes are attached and so lies within all of vLLM's: bodies are read once the
server's own checks (``--api-key``) have passed. From long JSON bodies of the routes that take our fields, and from
msgpack bodies of any length, the fields of parts are taken out and read here; the server sees the rest, as JSON.

Bodies that are on their way share a budget of bytes, over all connections of a server. One that does not fit is refused
at once, with an error 503 that says when to try again. Waiting for room would not do: bodies that hold a part of the
budget each could wait for one another for ever, and a client that waits holds a connection. Two kinds of bodies make
way for others instead: slow ones, and those of a client that holds more than its share. And each has so much time: one
that comes more slowly than `LEAST_RATE` is given up, whether others wait or not.
"""

from __future__ import annotations

import asyncio
import ipaddress
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from headgate.capture.engine import vllm_names
from headgate.capture.engine.access.caller import current_caller
from headgate.capture.engine.contracts.parts import request_parts
from headgate.capture.engine.requests.call_context import NOTHING, ExtractedFields, hold, release
from headgate.capture.engine.requests.request_reader import reader_of
from headgate.capture.engine.server.bodies.field_guard import METHODS, Kind, kind_of, path_of, refuse, replay, type_of
from headgate.capture.engine.server.bodies.parsing import Fields, extract_json, extract_msgpack
from headgate.capture.engine.server.loop_threads import in_turn, run_in_thread
from headgate.capture.engine.vllm_types import AsgiApp, AsgiMessage, Receive, Scope, Send
from headgate.capture.schema.config import BUFFERED_BODIES, ServerConfig
from headgate.capture.schema.errors import RequestError

if TYPE_CHECKING:
    from fastapi import FastAPI


STALLED_S = 10.0
"""A body that has brought nothing for so long, or is slow after so long, makes way if others need the room."""
SLOW_RATE = 128 << 10
"""Bytes a second below which a body is slow, from its beginning on: some 1 Mbit/s."""
SHARES = 4
"""A client that holds more than one part in so many of the budget makes way for clients that hold less."""
GRACE_S = 10.0
LEAST_RATE = 16 << 10
"""Bytes a second that a body must come in, once it has had `GRACE_S`."""
MAX_S = 600.0
"""The most time that any body has."""


class ArrivingBody:
    """One body on its way.

    Args:
        client: Who sends it: what it holds counts against the share of that client.

    Attributes:
        pieces: Its bytes so far.
        is_refused: Whether there was no room for it; then it has no pieces.
        size: Bytes that it holds.
        num_received: Bytes that have come, including bytes thrown away.
    """

    def __init__(self, client: str = "") -> None:
        self.client = client
        self.pieces: list[bytes] = []
        self.is_refused = False
        self.size = 0
        self.num_received = 0
        self.began_s: float | None = None
        self.last_s = 0.0


class BytesInFlight:
    """The budget. Event loop only.

    Args:
        max_bytes: Of all bodies together.
        clock: Returns the time, in seconds.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.used = 0
        self._clock = clock
        self._arriving: dict[ArrivingBody, None] = {}
        """Bodies that are not complete."""
        self._held: Counter[str] = Counter()
        """Bytes by client, for clients that hold any."""

    def begin(self, body: ArrivingBody) -> None:
        """Let the time of a body begin; its first piece does so, too."""
        body.began_s = body.last_s = self._clock()

    def seconds_left(self, body: ArrivingBody) -> float:
        """Return how long the next piece of a body that has begun may take; 0 or less if it is too late."""
        assert body.began_s is not None  # noqa: S101
        allowed = min(GRACE_S + body.num_received / LEAST_RATE, MAX_S)
        return body.began_s + allowed - self._clock()

    def add(self, body: ArrivingBody, piece: bytes) -> None:
        """Add a piece to a body, or refuse it."""
        if body.began_s is None:
            self.begin(body)
        body.num_received += len(piece)
        if body.is_refused:
            return
        now = self._clock()
        while self.used + len(piece) > self.max_bytes:
            victim = self._find_victim(body, len(piece), now)
            if victim is None:
                self.refuse(body)
                return
            self.refuse(victim)
        self._arriving[body] = None
        body.pieces.append(piece)
        body.size += len(piece)
        body.last_s = now
        self.used += len(piece)
        self._held[body.client] += len(piece)

    def complete(self, body: ArrivingBody) -> None:
        """Nothing more will come; what it holds stays taken until `release`."""
        self._arriving.pop(body, None)

    def release(self, body: ArrivingBody) -> None:
        """Give back what a body holds. A second call does nothing."""
        self._arriving.pop(body, None)
        self.used -= body.size
        self._held[body.client] -= body.size
        if not self._held[body.client]:
            del self._held[body.client]
        body.size = 0

    def _find_victim(self, asking: ArrivingBody, num_bytes: int, now: float) -> ArrivingBody | None:
        """Find the body that makes way for a piece of another one; None if none does."""
        others = [body for body in self._arriving if body is not asking and body.size]
        slow = [body for body in others if _is_slow(body, now)]
        if slow:
            return _costliest(slow, now)
        share = self.max_bytes // SHARES
        if self._held[asking.client] + num_bytes > share:
            return None
        above = [body for body in others if self._held[body.client] > share]
        if not above:
            return None
        most = max(self._held[body.client] for body in above)
        return _costliest([body for body in above if self._held[body.client] == most], now)

    def refuse(self, body: ArrivingBody) -> None:
        """Give up a body, and what it holds."""
        self.release(body)
        body.pieces.clear()
        body.is_refused = True


def _is_slow(body: ArrivingBody, now: float) -> bool:
    age = now - (body.began_s or 0.0)
    is_stalled = now - body.last_s >= STALLED_S
    return is_stalled or (age >= STALLED_S and body.num_received < age * SLOW_RATE)


def _costliest(bodies: Iterable[ArrivingBody], now: float) -> ArrivingBody:
    """Return the body that has held the most for the longest time."""
    return max(bodies, key=lambda body: body.size * (now - (body.began_s or 0.0)))


FieldExtractor = Callable[[bytes, Collection[str]], tuple[bytes, Fields]]

EXTRACT: Mapping[str, FieldExtractor] = {
    "application/json": extract_json,
    "application/msgpack": extract_msgpack,
    "application/x-msgpack": extract_msgpack,
}
"""By content type."""
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
LONG_BODY = 64 << 10
"""JSON bodies of fewer bytes are left to the server: on its loop they take less time than a thread needs to start.
Bodies that say so beforehand are not even looked at: the server itself reads no more than was declared."""
_HUGE = 1 << 20
"""Bodies of this many bytes are put together on a thread: the GIL is free meanwhile."""

_MANY_VECTORS = 256 << 10
"""The fields of shorter bodies are read in turn: most of it is Python, or numpy for a few us at a time, so several
threads would hand the GIL to one another all the time. Of longer ones, most is hashed, and the GIL is free."""

READ_AHEAD = 2 << 20
"""Bytes of a body that uvicorn reads before its application asks for them. With its own 64 KiB, the vectors of a
request take a turn of the event loop for each 256 KiB, and a busy loop's turns take milliseconds."""
_UVICORN, _LIMIT = "uvicorn.protocols.http.", "HIGH_WATER_LIMIT"


_UPLOAD_FIELDS = 1 << 20
"""Bytes of an upload beside its file."""
_RETRY_AFTER_S = 1
_TOO_SLOW = (
    f"the body came too slowly: {LEAST_RATE >> 10} KiB a second are expected after {GRACE_S:g} s, and all of it within "
    f"{MAX_S:g} s"
)


def install_bodies(app: FastAPI, config: ServerConfig) -> None:
    """Put the middleware into a `fastapi.FastAPI` application that is being made."""
    app.add_middleware(
        Bodies,
        max_bytes=config.max_body_bytes,
        max_upload=(vllm_names.UPLOAD_SETTING.get() << 20) + _UPLOAD_FIELDS,
        in_flight=BytesInFlight(config.max_buffered_bytes or BUFFERED_BODIES * config.max_body_bytes),
    )
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
        max_upload: Bytes of a form of an audio route, which is read piece by piece and not kept.
        in_flight: The budget of bytes for all bodies that are being received and read.
    """

    def __init__(self, app: AsgiApp, max_bytes: int, max_upload: int, in_flight: BytesInFlight) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_upload = max_upload
        self._in_flight = in_flight
        self._short = min(LONG_BODY, max_bytes)
        self._names = tuple(name for part in request_parts().values() for name in part.fields)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in METHODS:
            await self._app(scope, receive, send)
            return
        given, path = scope["headers"], path_of(scope)
        headers = dict(reversed(given))  # of two by one name the first counts, as for the server
        declared = _declared(headers)
        if kind_of(path) is Kind.UPLOAD:
            await self._serve_upload(declared or 0, scope, receive, send)
            return
        extract = EXTRACT.get(type_of(headers)) if path in ROUTES else None
        is_short = declared is not None and declared < self._short and len(headers) == len(given)
        if is_short and extract in (None, extract_json):
            await self._app(scope, receive, send)
            return
        arriving = ArrivingBody(_client_of(scope))
        try:
            if not await self._is_received(arriving, declared or 0, receive, send):
                return
            if extract is extract_json and arriving.size < LONG_BODY:
                extract = None
            found = await self._read(arriving.pieces, extract, scope)
        except RequestError as error:
            await refuse(send, HTTPStatus.BAD_REQUEST, str(error), error.field)
            return
        finally:
            self._in_flight.release(arriving)
        await self._serve(*found, scope if extract is None else _as_json(scope, len(found[0])), receive, send)

    async def _serve(self, body: bytes, fields: ExtractedFields, scope: Scope, receive: Receive, send: Send) -> None:
        token = hold(fields)
        try:
            await self._app(scope, replay(body, receive), send)
        finally:
            release(token)

    async def _serve_upload(self, declared: int, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the form has more than {self._max_upload} bytes (the server's VLLM_MAX_AUDIO_CLIP_FILESIZE_MB)"
        if declared > self._max_upload:
            await refuse(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        else:
            await self._app(scope, _limited(receive, self._max_upload, message), send)

    async def _is_received(self, body: ArrivingBody, declared: int, receive: Receive, send: Send) -> bool:
        """Receive a body, or answer why not. One that is refused is received, too, so that its sender listens."""
        size, is_more = declared if declared > 2 * self._max_bytes else 0, True
        self._in_flight.begin(body)
        while is_more and size <= 2 * self._max_bytes:
            try:
                message = await asyncio.wait_for(receive(), self._in_flight.seconds_left(body))
            except asyncio.TimeoutError:
                self._in_flight.refuse(body)
                await refuse(send, HTTPStatus.REQUEST_TIMEOUT, _TOO_SLOW, closes=True)
                return False
            if message["type"] == "http.disconnect":
                return False  # no client waits for an answer
            piece = message.get("body", b"")
            size += len(piece)
            if size <= self._max_bytes:
                self._in_flight.add(body, piece)
            else:
                self._in_flight.release(body)
                body.pieces.clear()
            is_more = message.get("more_body", False)
        self._in_flight.complete(body)
        if size > self._max_bytes:
            reason = f"the body has more than {self._max_bytes} bytes (the server's max_body_bytes)"
            await refuse(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
        elif body.is_refused:
            reason = (
                f"{self._in_flight.max_bytes} bytes of requests are on their way at this moment (the server's "
                "max_buffered_bytes): send it again in a moment"
            )
            await refuse(send, HTTPStatus.SERVICE_UNAVAILABLE, reason, retry_after_s=_RETRY_AFTER_S)
        return size <= self._max_bytes and not body.is_refused

    async def _read(
        self, pieces: list[bytes], extract: FieldExtractor | None, scope: Scope
    ) -> tuple[bytes, ExtractedFields]:
        if extract is not None:
            return await run_in_thread(partial(self._extract, scope, extract, pieces))
        is_huge = sum(map(len, pieces)) >= _HUGE
        return await run_in_thread(partial(b"".join, pieces)) if is_huge else b"".join(pieces), NOTHING

    def _extract(self, scope: Scope, extract: FieldExtractor, pieces: list[bytes]) -> tuple[bytes, ExtractedFields]:
        body = b"".join(pieces)
        pieces.clear()  # here, not on the event loop: giving this much memory back takes time
        if len(body) < _MANY_VECTORS:
            return in_turn(lambda: self._read_fields(scope, *extract(body, self._names)))
        return self._read_fields(scope, *in_turn(partial(extract, body, self._names)))

    def _read_fields(self, scope: Scope, rest: bytes, extracted: Fields) -> tuple[bytes, ExtractedFields]:
        fields = {name: value for name, value in extracted.items() if value is not None}
        if not fields:
            return rest, NOTHING
        return rest, ExtractedFields(fields, reader_of(scope["app"].state.engine_client).read_parts(fields))


def _limited(receive: Receive, max_bytes: int, message: str) -> Receive:
    """Receive no more than `max_bytes`; the server answers what is raised after them."""
    from starlette.exceptions import HTTPException

    size = 0

    async def limited() -> AsgiMessage:
        nonlocal size
        received = await receive()
        size += len(received.get("body", b""))
        if size > max_bytes:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE.value, message)
        return received

    return limited


def _client_of(scope: Scope) -> str:
    """Distinguish clients by their keys, and by addresses without: IPv6 ones by network, since each client has one."""
    if (caller := current_caller()) is not None:
        return caller.name
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"address {host}"
    return f"address {address if address.version == 4 else ipaddress.ip_network((address, 64), strict=False)}"


def _declared(headers: Mapping[bytes, bytes]) -> int | None:
    """The length that the client has declared, which servers hold it to; None if it has not, or for something else."""
    if b"transfer-encoding" in headers or b"content-encoding" in headers:
        return None
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() else None


def _as_json(scope: Scope, length: int) -> Scope:
    others = [(key, value) for key, value in scope["headers"] if key not in (b"content-type", b"content-length")]
    ours = [(b"content-type", b"application/json"), (b"content-length", b"%d" % length)]
    return {**scope, "headers": [*others, *ours]}
