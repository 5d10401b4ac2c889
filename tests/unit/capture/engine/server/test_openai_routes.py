"""Which streams begin only when the engine has not refused their request; whose templates are refused."""

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


@pytest.mark.parametrize("own", [{"chat_template": "{{ x }}"}, {"chat_template_kwargs": {"chat_template": "{{ x }}"}}])
def test_a_template_of_a_request_that_the_server_does_not_trust_is_refused_for_that(own: dict[str, Any]) -> None:
    async def refuse(request: object) -> object:
        return SimpleNamespace(error=SimpleNamespace(message="--trust-request-chat-template is not set"))

    handler: Any = SimpleNamespace(render_chat_request=refuse)
    body: Any = SimpleNamespace(**own, model_copy=dict)

    assert openai_routes._has_own_template(body)
    with pytest.raises(RequestError, match=r"^chat_template: --trust-request-chat-template is not set"):
        asyncio.run(openai_routes._check_template(handler, body))


def test_a_template_of_a_request_that_the_server_renders_is_let_pass() -> None:
    async def render(request: object) -> object:
        return [], [{"prompt_token_ids": [1]}]

    handler: Any = SimpleNamespace(render_chat_request=render)
    body: Any = SimpleNamespace(chat_template=None, chat_template_kwargs={"enable_thinking": True}, model_copy=dict)

    asyncio.run(openai_routes._check_template(handler, body))
    assert not openai_routes._has_own_template(body)
