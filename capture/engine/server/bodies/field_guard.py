"""Refuses headgate's fields on routes that would ignore them.

ASGI middleware within vLLM's own, on every server with headgate in it, whatever it is configured for. Bodies of routes
that read our fields pass as they are; `ROUTES` lists every POST route and websocket of vLLM 0.26 to 0.33, by what it
does with headgate's fields. A test compares it with the routes of the vLLM that is installed, and with the source of
its routers. Routes that are not in it, of a later vLLM or of another plugin, refuse our fields like routes that are
known to ignore them.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from headgate.capture.engine.requests.sampling_params import find_ignored, is_of_interest, is_ours
from headgate.capture.engine.vllm_types import AsgiApp, AsgiMessage, Receive, Scope, Send
from headgate.capture.schema.batch import Document
from headgate.capture.schema.errors import RequestError

if TYPE_CHECKING:
    from fastapi import FastAPI


class Kind(enum.Enum):
    """Classes of routes, by what they do with headgate's fields."""

    SERVED = "reads them, or refuses them by itself"
    PARAMETERS = "its clients write SamplingParams: reads them from sampling_params.extra_args"
    REFUSED = "computes something that they would act on, without reading them: a body with one is refused"
    UPLOAD = "the same, with bodies of type multipart/form-data: its handler looks at the form, which is read once"
    NOT_GENERATING = "runs no forward pass: looks at nothing"


ROUTES: Mapping[str, Kind] = {
    "/v1/completions": Kind.SERVED,
    "/v1/chat/completions": Kind.SERVED,
    "/v1/chat/completions/batch": Kind.SERVED,
    "/v1/responses": Kind.SERVED,
    "/invocations": Kind.SERVED,
    # Rendering writes the fields into the sampling parameters that it answers with.
    "/v1/completions/render": Kind.SERVED,
    "/v1/chat/completions/render": Kind.SERVED,
    "/v1/responses/render": Kind.SERVED,
    "/inference/v1/generate": Kind.PARAMETERS,
    "/v1/messages": Kind.REFUSED,
    "/v1/messages/render": Kind.REFUSED,
    "/cohere/v2/chat": Kind.REFUSED,
    "/cohere/v2/chat/render": Kind.REFUSED,
    "/generative_scoring": Kind.REFUSED,
    "/v1/systemone": Kind.REFUSED,
    "/v1/decisions": Kind.REFUSED,
    "/v1/realtime": Kind.REFUSED,
    "/v1/embeddings": Kind.REFUSED,
    "/v2/embed": Kind.REFUSED,
    "/pooling": Kind.REFUSED,
    "/classify": Kind.REFUSED,
    "/score": Kind.REFUSED,
    "/v1/score": Kind.REFUSED,
    "/rerank": Kind.REFUSED,
    "/v1/rerank": Kind.REFUSED,
    "/v2/rerank": Kind.REFUSED,
    "/v1/audio/transcriptions": Kind.UPLOAD,
    "/v1/audio/translations": Kind.UPLOAD,
    **dict.fromkeys(
        (
            *("/ping", "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/{response_id}/cancel"),
            *("/v1/completions/derender", "/v1/chat/completions/derender"),
            *("/abort_requests", "/inference/v1/abort_requests", "/pause", "/resume", "/sleep", "/wake_up"),
            *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/release_kv_cache_memory"),
            *("/start_profile", "/stop_profile", "/collective_rpc", "/fault_tolerance/apply"),
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/scale_elastic_ep"),
            *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"),
            *("/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
            *("/weight_checker", "/is_scaling_elastic_ep"),
        ),
        Kind.NOT_GENERATING,
    ),
}
"""By path; names in braces stand for anything but a slash."""

_TEMPLATES = tuple(
    (re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), kind) for path, kind in ROUTES.items() if "{" in path
)


def kind_of(path: str) -> Kind:
    """Return what the route at `path` does; `Kind.REFUSED` if it is unknown."""
    found = ROUTES.get(path)
    if found is None:
        found = next((kind for template, kind in _TEMPLATES if template.fullmatch(path)), Kind.REFUSED)
    return found


METHODS = ("POST", "PUT", "PATCH")
"""Methods of requests with bodies."""


def path_of(scope: Scope) -> str:
    """Return the path of a call, without what a proxy put before it."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def type_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the content type that the headers declare, in lower case and without its parameters."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


def replay(body: bytes, receive: Receive) -> Receive:
    """Make a `receive` that gives `body` in one piece first."""
    is_sent = False

    async def replayed() -> AsgiMessage:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def refuse(
    send: Send,
    status: HTTPStatus,
    message: str,
    param: str | None = None,
    *,
    retry_after_s: int | None = None,
    closes: bool = False,
) -> None:
    """Answer with an error as vLLM does; `closes` the connection if the rest of the body is not read."""
    kind = "BadRequestError" if status is HTTPStatus.BAD_REQUEST else status.phrase
    error = {"message": message, "type": kind, "param": param, "code": status.value}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    if closes:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})


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
    """The fields of a JSON object that matter here; nothing for what is no JSON object, which the server refuses."""
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
