"""The middleware that reads bodies, and an application behind it that notes what it was given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headgate.capture.engine.requests.call_context import taken
from headgate.capture.engine.server.bodies.middleware import Bodies, BytesInFlight

MAX_BYTES = 1 << 20
MAX_UPLOAD = 3 << 20


class Inner:
    """The application: notes what it was given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, is_more = b"", True
        while is_more:
            message = await receive()
            body += message.get("body", b"")
            is_more = message.get("more_body", False)
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        self.calls.append(SimpleNamespace(body=body, headers=headers, taken=taken()))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def bodies(inner: Any, max_bytes: int = MAX_BYTES, max_buffered: int = 8 * MAX_BYTES) -> Bodies:
    """The middleware."""
    return Bodies(inner, max_bytes, max_upload=MAX_UPLOAD, in_flight=BytesInFlight(max_buffered))
