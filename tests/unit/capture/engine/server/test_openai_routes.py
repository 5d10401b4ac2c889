"""Which streams begin only when the engine has not refused their request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.requests.call_context import noting_refusals, watch_refusals
from headgate.capture.engine.server import openai_routes
from headgate.capture.schema.errors import RequestError

STEERED, CAPTURED = {"steering_name": "calm"}, {"capture": {}}


def answer_of(given: dict[str, Any], *, is_background: bool) -> object:
    """What is answered to a streaming request that the engine refuses: the stream, or an error answer."""

    async def stream() -> AsyncGenerator[str, None]:
        with noting_refusals():
            raise RequestError("steering_name", "no such module")
        yield "never"

    async def original(*args: object) -> object:
        return stream()

    async def call() -> object:
        watch_refusals()
        handler: Any = SimpleNamespace(create_error_response=str)
        body: Any = SimpleNamespace(background=is_background)
        return await openai_routes._serve(original, given, handler, body)

    return asyncio.run(call())


def test_a_stream_that_may_be_refused_is_watched() -> None:
    answer = answer_of({**STEERED, **CAPTURED}, is_background=False)

    assert isinstance(answer, str)
    assert "no such module" in answer


@pytest.mark.parametrize(("given", "is_background"), [(STEERED, True), (CAPTURED, False)])
def test_other_streams_are_handed_on(given: dict[str, Any], is_background: bool) -> None:
    """That of a response in the background would never come to a first event."""
    assert isinstance(answer_of(given, is_background=is_background), AsyncGenerator)
