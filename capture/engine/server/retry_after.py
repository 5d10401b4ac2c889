"""Answers to requests that the engine refused or sent away: their status, and ``Retry-After``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Iterable
from http import HTTPStatus

from headgate.capture.engine.contracts.vllm_frontend import AsgiApp, AsgiMessage, Receive, Scope, Send
from headgate.capture.engine.contracts.vllm_server import ErrorAnswers
from headgate.capture.engine.requests.call_context import Refusal, refusals, watch_refusals
from headgate.capture.schema.errors import OverloadedError

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
