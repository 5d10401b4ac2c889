"""``Retry-After`` stands in answers to those that were sent away, and in no others; no refusal begins a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.requests.call_context import noting_refusals, watch_refusals
from headgate.capture.engine.server.retry_after import RetryAfterMiddleware, await_first_event
from headgate.capture.schema.errors import OverloadedError, RequestError

OVERLOAD = OverloadedError("too many wait")


def refuse(error: Exception) -> None:
    with noting_refusals():
        raise error


def headers_of(status: int, *, is_sent_away: bool, method: str = "POST") -> dict[bytes, bytes]:
    """The headers of an answer through the middleware."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def handle() -> None:
            if is_sent_away:
                with suppress(OverloadedError):
                    refuse(OVERLOAD)

        await asyncio.create_task(handle())
        await send({"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b""})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def call() -> None:
        await RetryAfterMiddleware(app)({"type": "http", "method": method}, None, send)  # type: ignore[arg-type]

    asyncio.run(call())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return dict(sent[0]["headers"])


@pytest.mark.parametrize(
    ("status", "is_sent_away", "method", "is_told"),
    [(503, True, "POST", True), (503, False, "POST", False), (200, True, "POST", False), (503, True, "GET", False)],
)
def test_the_header_is_ours_alone(status: int, is_sent_away: bool, method: str, is_told: bool) -> None:
    headers = headers_of(status, is_sent_away=is_sent_away, method=method)

    assert headers[b"a"] == b"b"
    assert (b"retry-after" in headers) == is_told


async def stream(
    *events: Any, is_closed: list[bool], error: Exception | None = None, is_raised: bool = False
) -> AsyncGenerator[Any, None]:
    """Events, and an error before the last; as vLLM's, which answer an error with an event, or raise it."""
    try:
        for event in events[:-1]:
            yield event
        if error is not None:
            with nullcontext() if is_raised else suppress(type(error)):
                refuse(error)
        for event in events[-1:]:
            yield event
    finally:
        is_closed.append(True)


def begun(*events: Any, **options: Any) -> tuple[Any, list[bool]]:
    is_closed: list[bool] = []
    serving = SimpleNamespace(create_error_response=lambda error: f"refused: {error}")

    async def call() -> Any:
        watch_refusals()
        answer = await await_first_event(stream(*events, is_closed=is_closed, **options), serving)
        return answer if isinstance(answer, str) else [event async for event in answer]

    return asyncio.run(call()), is_closed


def test_a_stream_is_the_same_and_is_closed() -> None:
    assert begun("a", "b", "c") == (["a", "b", "c"], [True])
    assert begun() == ([], [True])


CREATED, IN_PROGRESS = (SimpleNamespace(type=f"response.{name}") for name in ("created", "in_progress"))
WRONG = RequestError("steering_name", "no such module")


@pytest.mark.parametrize("is_raised", [False, True])
@pytest.mark.parametrize("error", [OVERLOAD, WRONG], ids=["sent away", "refused"])
@pytest.mark.parametrize("first", [[], [CREATED, IN_PROGRESS]], ids=["chunks", "response"])
def test_a_stream_that_the_engine_refused_is_an_error_answer(
    first: list[Any], error: Exception, is_raised: bool
) -> None:
    assert begun(*first, "data: {error}", error=error, is_raised=is_raised) == (f"refused: {error}", [True])


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(OSError, match="other"):
        begun(CREATED, "a", error=OSError("other"), is_raised=True)


def test_a_response_is_the_same() -> None:
    assert begun(CREATED, IN_PROGRESS, "a", "b") == ([CREATED, IN_PROGRESS, "a", "b"], [True])


def test_a_stream_that_nobody_reads_on_is_closed() -> None:
    is_closed: list[bool] = []

    async def call() -> None:
        answer = await await_first_event(stream("a", "b", is_closed=is_closed), None)
        assert await anext(answer) == "a"
        await answer.aclose()

    asyncio.run(call())

    assert is_closed == [True]


def test_what_is_no_stream_is_returned_as_it_is() -> None:
    answer = object()

    assert asyncio.run(await_first_event(answer, None)) is answer
