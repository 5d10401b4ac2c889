"""Services of vLLM's server to a part that brings HTTP routes of its own.

The hook ``headgate_routes`` of a part is called once in every API server process, before the engine exists, with a
`RouteServices`, and returns a `fastapi.APIRouter`. Routes lie under ``/v1/``: the server's API key covers them there.

An error that a route raises is answered with vLLM's own error bodies: a `RequestError` with status 400 and the field
as ``param``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteServices:
    """Services of the server to one part's routes. Event loop only.

    Attributes:
        part: Name of its section.
        engine: The server's `AsyncLLM`, once it is there.
        handle: The attribute of ``AsyncLLM`` under the part's name. Raises an HTTP error 404 that says how to start the
            server with the part, if it was started without.
        require_key: A FastAPI dependency: an HTTP error 403 unless the request carries one of the part's keys.
        read_object: The body of a `starlette.requests.Request` as an object: JSON, or msgpack with raw bytes. Raises
            `RequestError`, or an HTTP error 415.
        client_errors: A context in which each `RequestError` becomes an answer with status 400.
    """

    part: str
    engine: Callable[[], Any]
    handle: Callable[[], Any]
    require_key: Callable[..., Awaitable[None]]
    read_object: Callable[[Any], Awaitable[dict[str, Any]]]
    client_errors: Callable[[], AbstractContextManager[None]]
