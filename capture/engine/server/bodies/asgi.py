"""Small tools for ASGI middleware that looks at bodies before the application does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from headgate.capture.engine.contracts.vllm_frontend import AsgiMessage, Receive, Scope, Send

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
