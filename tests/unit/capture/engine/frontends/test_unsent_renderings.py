"""Renderings that are never sent leave vLLM's account of what the engine core has as it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headgate.capture.engine.frontends import async_llm, input_processor, llm
from headgate.capture.engine.frontends.prompt_tokens import forget_unsent, looking_up, render_chat
from headgate.capture.schema.errors import ForbiddenError, OverloadedError, QuotaError, RequestError

PROMPT = {"mm_kwargs": {"image": [None, "pixels"]}, "mm_hashes": {"image": ["sent", "new"]}}


class Renderer:
    def __init__(self) -> None:
        self.skipped: list[bool] = []

    def render_chat(self, chat: object, *, skip_mm_cache: bool = False) -> object:
        self.skipped.append(skip_mm_cache)
        return chat

    async def render_chat_async(self, chat: object, *, skip_mm_cache: bool = False) -> object:
        await asyncio.sleep(0)
        return self.render_chat(chat, skip_mm_cache=skip_mm_cache)


def test_lookups_alone_pass_the_cache_by() -> None:
    renderer, render = Renderer(), render_chat(Renderer.render_chat)

    render(renderer, "sent")
    with looking_up():
        render(renderer, "looked at")
    render(renderer, "sent", skip_mm_cache=True)

    assert renderer.skipped == [False, True, True]


def test_a_lookup_of_one_task_is_none_of_another() -> None:
    renderer, render = Renderer(), render_chat(Renderer.render_chat_async)

    async def look() -> None:
        with looking_up():
            await render(renderer, "looked at")

    async def both() -> None:
        await asyncio.gather(look(), render(renderer, "sent"))

    asyncio.run(both())

    assert sorted(renderer.skipped) == [False, True]


class MultiModalProcessorSenderCache:
    """That of vLLM 0.26."""

    def __init__(self) -> None:
        self._cache = {"sent": 1, "new": 2}


@pytest.mark.parametrize("kind", ["0.26", "0.32", "0.33", "none"])
def test_what_was_not_sent_is_forgotten_and_the_rest_is_not(kind: str) -> None:
    gone: list[str] = []
    cache: Any = {
        "0.26": MultiModalProcessorSenderCache(),
        "0.32": SimpleNamespace(invalidate=gone.append),
        "0.33": SimpleNamespace(),
        "none": None,
    }[kind]
    renderer: Any = SimpleNamespace(mm_processor_cache=cache)
    if kind == "0.33":
        renderer.queue_mm_cache_invalidations = gone.extend

    forget_unsent(SimpleNamespace(renderer=renderer), PROMPT)
    forget_unsent(SimpleNamespace(renderer=renderer), {"prompt_token_ids": [1]})

    if kind == "0.26":
        assert list(cache._cache) == ["sent"]
    else:
        assert gone == ([] if kind == "none" else ["new"])


REFUSALS = [
    RequestError("capture", "no such layer"),
    ForbiddenError("the key may not"),
    QuotaError("used up", "capture", 1),
    OverloadedError("full"),
]


class Input:
    """An `InputProcessor` as far as its renderer goes."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.renderer = SimpleNamespace(mm_processor_cache=SimpleNamespace(invalidate=self.gone.append))


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("wrap", [async_llm.generate, llm.add_request], ids=["AsyncLLM", "LLMEngine"])
def test_whatever_refuses_a_rendered_prompt_its_images_are_sent_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch, wrap: Any, error: Exception
) -> None:
    def refuse(engine: object) -> None:
        raise error

    monkeypatch.setattr(f"{wrap.__module__}.reader_of", refuse)
    engine = SimpleNamespace(input_processor=Input())
    params, names = SimpleNamespace(extra_args=None), ("request",)
    given = (PROMPT, params, *names) if wrap is async_llm.generate else (*names, PROMPT, params)

    with pytest.raises(Exception, match=str(error)):
        wrap(lambda *_: pytest.fail("the engine was asked"))(engine, *given)

    assert engine.input_processor.gone == ["new"]


def test_a_prompt_that_vllm_renders_when_it_makes_the_request_is_forgotten_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A position beyond a prompt of text is known only then."""

    def refuse(*_: object) -> None:
        raise RequestError("capture", "no such position")

    monkeypatch.setattr(input_processor, "_fold", refuse)
    monkeypatch.setattr(input_processor, "attached", lambda params: SimpleNamespace())
    monkeypatch.setattr(input_processor, "attach", lambda params, asked: params)
    features = [
        SimpleNamespace(data=None, identifier="sent", mm_hash="sent"),
        SimpleNamespace(data="pixels", identifier="lora:new", mm_hash="new"),
        SimpleNamespace(data="pixels", identifier="old", mm_hash=None),
    ]
    make = input_processor.process_inputs(lambda *_: SimpleNamespace(mm_features=features))
    processor = Input()

    with pytest.raises(RequestError, match="no such position"):
        make(processor, "request", {"prompt": "<image>"}, SimpleNamespace(extra_args=None))

    assert processor.gone == ["new", "old"]


def test_a_name_that_is_gone_before_its_request_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader:
        def confirm(self, asked: object) -> None:
            raise RequestError("steering_name", "unknown")

    async def outputs() -> AsyncGenerator[Any, None]:
        asked.append("the engine")
        yield None

    asked: list[str] = []
    engine: Any = SimpleNamespace(input_processor=Input(), engine_core=None)
    monkeypatch.setattr(async_llm, "reader_of", lambda _: Reader())

    async def ask() -> None:
        async for _ in async_llm._with_refusals(outputs(), engine, PROMPT, cast("Any", None)):
            pass

    with pytest.raises(RequestError, match="steering_name"):
        asyncio.run(ask())

    assert engine.input_processor.gone == ["new"]
    assert not asked
