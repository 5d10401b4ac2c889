"""Answers to requests that the engine refused or sent away: their status, and ``Retry-After``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from functools import wraps
from http import HTTPStatus
from typing import TYPE_CHECKING

from headgate.capture.engine.client_errors import answer_refused, refused_error
from headgate.capture.engine.requests.call_context import Refusal, refusals, watch_refusals
from headgate.capture.engine.server.access_keys import install_clients, open_access
from headgate.capture.engine.server.bodies.field_guard import install_guard
from headgate.capture.engine.vllm_types import AsgiApp, AsgiMessage, ErrorAnswers, Function, Receive, Scope, Send
from headgate.capture.schema.errors import OverloadedError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State


RETRY_AFTER_S = 5
"""Seconds that such a client is asked to wait: vector slots come free when other requests end."""

_BEFORE_THE_ENGINE = ("response.created", "response.in_progress")
"""Events of a response that are sent before the engine is asked."""


class RetryAfterMiddleware:
    """ASGI middleware: adds the header to answers with status 503 that headgate caused."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        refused = watch_refusals()

        # No coroutine of its own: each piece of a streamed answer comes through here.
        def send_on(message: AsgiMessage) -> Awaitable[None]:
            if refused and message.get("status") == HTTPStatus.SERVICE_UNAVAILABLE:
                return send(_with_header(message, refused))
            return send(message)

        await self._app(scope, receive, send_on)


def _with_header(message: AsgiMessage, refused: Iterable[Refusal]) -> AsgiMessage:
    if not any(isinstance(error, OverloadedError) for error in refused):
        return message
    return {**message, "headers": [*message.get("headers", ()), (b"retry-after", b"%d" % RETRY_AFTER_S)]}


async def await_first_event(answer: object, handler: ErrorAnswers) -> object:
    """Return a stream once its first event from the engine is there, or the error answer if it refused the request.

    The status of a stream is sent before its first event is asked for, so it would be 200 in any case; and the stream
    of a response (/v1/responses) would break off, without a word.

    Args:
        answer: Of vLLM's handler; what is no stream is returned as it is.
        handler: Makes the error answer.
    """
    if not isinstance(answer, AsyncGenerator):
        return answer
    begun: list[object] = []
    try:
        while not begun or getattr(begun[-1], "type", None) in _BEFORE_THE_ENGINE:
            begun.append(await anext(answer))
    except StopAsyncIteration:
        pass
    except Exception:
        if not refusals():
            raise
    if refused := refusals():
        await answer.aclose()
        return handler.create_error_response(refused[0])
    return _rejoined(begun, answer)


async def _rejoined(begun: list[object], rest: AsyncGenerator[object, None]) -> AsyncGenerator[object, None]:
    try:
        for event in begun:
            yield event
        async for event in rest:
            yield event
    finally:
        await rest.aclose()


ROUTES = ("/v1/steering", "/v1/capture", "/v1/patch_sweep")
BINARY = ("application/msgpack", "application/x-msgpack")
_HOW = "The operator starts it with `headgate serve`, or with the environment variable VLLM_PLUGINS=headgate"


def load_endpoint_plugins(original: Function) -> Function:
    """Wrap ``vllm.plugins.load_endpoint_plugins``: where ours is not loaded, explain that. No route is added."""

    @wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        plugins = original(*args, **kwargs)
        if any(plugin.name == Explanation.name for plugin in plugins):
            return plugins
        return [*plugins, Explanation()]

    return wrapped


class Explanation:
    """Stands in for `headgate.capture.engine.server.plugin_routes.Endpoints` where that is not let in."""

    name = "headgate"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Answer requests to what is not there with the reason; refuse our fields where they would be ignored."""
        app.add_middleware(RetryAfterMiddleware)
        install_guard(app)
        app.add_middleware(MissingRouteMiddleware)
        install_clients(app)
        open_access(app.state)
        app.add_exception_handler(refused_error(), answer_refused)

    async def init_state(self, engine_client: object, state: State, args: Namespace) -> None:
        """The event loop runs."""
        open_access(state).read_again_on_hangup()


class MissingRouteMiddleware:
    """ASGI middleware: requests to our routes, and with binary bodies, are answered with what to set."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (reason := _reason(scope)) is not None:
            from starlette.responses import JSONResponse

            status, message = reason
            error = {"message": message, "type": status.phrase, "param": None, "code": status.value}
            await JSONResponse({"error": error}, status)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _reason(scope: Scope) -> tuple[HTTPStatus, str] | None:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if any(path == route or path.startswith(f"{route}/") for route in ROUTES):
        return HTTPStatus.NOT_FOUND, f"this server does not serve {'/'.join(path.split('/')[:3])}. {_HOW}"
    kind = dict(scope["headers"]).get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if kind in BINARY:
        return HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"this server does not read {kind}. {_HOW}"
    return None
