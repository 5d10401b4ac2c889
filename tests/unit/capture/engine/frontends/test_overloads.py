"""Requests that the engine core sent away: what callers of `AsyncLLM` and of `LLM` are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.contracts.wire_format import OVERLOADED
from headgate.capture.engine.frontends import async_llm, llm
from headgate.capture.engine.requests.call_context import watch_refusals
from headgate.capture.engine.requests.request_reader import RequestReader, overload_of
from headgate.capture.engine.requests.sampling_params import HeadgateRequest
from headgate.capture.schema.errors import OverloadedError

WHY = "no vector slots were free for 5 s. Try again later"


def output(*samples: tuple[str | None, Any], finished: bool = True) -> Any:
    made = [SimpleNamespace(finish_reason=finish, stop_reason=stop) for finish, stop in samples]
    return SimpleNamespace(request_id="r", finished=finished, outputs=made)


SENT_AWAY = output((None, None), ("error", OVERLOADED + WHY), finished=False)


@pytest.mark.parametrize("sample", [("stop", OVERLOADED + WHY), ("error", None), ("error", 7), ("length", None)])
def test_other_ends_are_no_overloads(sample: tuple[str, Any]) -> None:
    assert overload_of(output(sample)) is None


def test_one_sample_that_was_sent_away_ends_the_call_with_a_503() -> None:
    is_closed = []

    async def outputs() -> AsyncGenerator[Any, None]:
        try:
            yield output((None, None), finished=False)
            yield SENT_AWAY
            raise AssertionError("nobody asks for more")
        finally:
            is_closed.append(True)

    async def call() -> None:
        noted = watch_refusals()
        engine: Any = SimpleNamespace(input_processor=SimpleNamespace(), engine_core=None)
        stream = async_llm._with_refusals(outputs(), engine, {}, HeadgateRequest())
        assert not (await anext(stream)).finished
        with pytest.raises(OverloadedError, match=WHY) as caught:
            await anext(stream)
        assert caught.value.status_code == 503  # type: ignore[attr-defined]
        assert noted == [caught.value]

    asyncio.run(call())

    assert is_closed == [True]


def test_an_llm_raises_when_all_others_have_finished() -> None:
    pending = llm._PendingResults(RequestReader())
    engine = SimpleNamespace(**{llm._PENDING_RESULTS: pending})

    def run(self: Any) -> list[str]:
        pending.asks["r"] = HeadgateRequest()
        pending.take(output(("error", OVERLOADED + WHY)))
        return ["the others"]

    wrapped = llm.run_engine(run)
    with pytest.raises(OverloadedError, match=WHY):
        wrapped(SimpleNamespace(llm_engine=engine))

    pending.asks.clear()
    assert llm.run_engine(lambda self: ["all"])(SimpleNamespace(llm_engine=engine)) == ["all"]


def test_a_streaming_input_session_that_was_ended_takes_no_more_input() -> None:
    """vLLM takes the end for that of one piece of input, and would begin anew with the next one alone."""
    is_closed = []

    async def generate(self: Any, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        try:
            yield output(("length", None), finished=False)
            yield SENT_AWAY
            raise AssertionError("nobody asks for more")
        finally:
            is_closed.append(True)

    async def pieces() -> AsyncGenerator[Any, None]:
        yield "Hi"

    async def call() -> None:
        engine: Any = SimpleNamespace(input_processor=SimpleNamespace(), engine_core=None)
        params = SimpleNamespace(extra_args=None)
        stream: Any = async_llm.generate(generate)(engine, pieces(), params, "r")
        assert not (await anext(stream)).finished
        with pytest.raises(OverloadedError, match=WHY):
            await anext(stream)

    asyncio.run(call())

    assert is_closed == [True]
