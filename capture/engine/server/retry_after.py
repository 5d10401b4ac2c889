"""``Retry-After`` in the answers to requests that were sent away since too many others wait."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from http import HTTPStatus

from headgate.capture.engine.contracts.vllm_frontend import AsgiApp, AsgiMessage, Receive, Scope, Send
from headgate.capture.engine.contracts.vllm_server import ErrorAnswers
from headgate.capture.engine.requests.call_context import overloads, watch_overloads

RETRY_AFTER_S = 5
"""Seconds that such a client is asked to wait: vector slots come free when other requests end."""


class RetryAfterMiddleware:
    """ASGI middleware: adds the header to answers with status 503 that headgate caused."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        sent_away = watch_overloads()

        async def send_on(message: AsgiMessage) -> None:
            if sent_away and message.get("status") == HTTPStatus.SERVICE_UNAVAILABLE:
                headers = [*message.get("headers", ()), (b"retry-after", b"%d" % RETRY_AFTER_S)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_on)


async def await_first_event(answer: object, handler: ErrorAnswers) -> object:
    """Return a stream once its first event is there, or the error answer if the request was sent away before.

    The status of a stream is sent before its first event is asked for, so it would be 200 in any case.

    Args:
        answer: Of vLLM's handler; what is no stream is returned as it is.
        handler: Makes the error answer.
    """
    if not isinstance(answer, AsyncGenerator):
        return answer
    try:
        first = await anext(answer)
    except StopAsyncIteration:
        return answer
    if sent_away := overloads():
        await answer.aclose()
        return handler.create_error_response(sent_away[0])
    return _rejoined(first, answer)


async def _rejoined(first: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    try:
        yield first
        async for event in rest:
            yield event
    finally:
        await rest.aclose()
