"""Requests of keys with quotas: what they are charged, however they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.access.access_key import AccessKey, KeyLimits, digest_of
from headgate.capture.engine.access.caller import Usage, current_caller
from headgate.capture.engine.frontends.metering import check_quota, metered, open_meter
from headgate.capture.engine.requests.capture_frontend import FrontEnd
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import BatchedConsumer, CapturedRequest, ModelInfo
from headgate.capture.schema.errors import QuotaError, RequestError
from headgate.capture.schema.sites import HookPoint, Site
from tests.fakes.clients import show
from tests.fakes.driver_consumers import no_drivers

MODEL = ModelInfo(name="tiny", num_layers=1, hidden_size=8, dtype="float32", sites=(Site(0, HookPoint.POST_MLP),))
ROW_BYTES, NUM_PROMPT, MAX_TOKENS = 32, 10, 5
MOST = 2 * (NUM_PROMPT + MAX_TOKENS - 1) * ROW_BYTES
"""Bytes that a request of two samples could capture."""


class Rows(BatchedConsumer):
    def on_capture(self, captured: CapturedRequest) -> Any:
        raise AssertionError("nothing is captured here")


FRONT = FrontEnd(
    CaptureConsumersConfig(consumers=(CaptureConsumerSpec(name="rows"),)),
    MODEL,
    {"rows": Rows},
    num_stages=1,
    open_drivers=no_drivers,
)


@pytest.fixture(autouse=True)
def no_caller() -> Iterator[None]:
    yield
    show()


def client(**limits: int) -> Usage:
    usage = Usage()
    key = AccessKey(name="alice", sha256=digest_of("alice"), roles=("capture",), limits=KeyLimits(**limits))
    show(key, usage=usage)
    return usage


def open_request(kind: str = "FINAL_ONLY", num_prompt: int | None = NUM_PROMPT) -> Any:
    extra = {"capture": {"rows": {"hooks": {"post_mlp": [0]}}}}
    params: Any = SimpleNamespace(extra_args=extra, max_tokens=MAX_TOKENS, n=2, output_kind=SimpleNamespace(name=kind))
    ask = FRONT.capture_reader.read(params, "r")
    assert ask is not None
    caller = current_caller()
    assert caller is not None
    return open_meter(caller, FRONT, FRONT.resolve(ask, NUM_PROMPT, params, None), num_prompt, params)


def output(*counts: int, finished: bool = False) -> Any:
    samples = [SimpleNamespace(index=index, token_ids=[7] * count) for index, count in enumerate(counts)]
    return SimpleNamespace(outputs=samples, finished=finished)


async def run(outputs: list[Any], meter: Any, *, stop_after: int | None = None, error: Exception | None = None) -> None:
    async def generate() -> AsyncGenerator[Any, None]:
        for found in outputs:
            yield found
        if error is not None:
            raise error

    watched = metered(generate(), meter)
    seen = 0
    try:
        async for _ in watched:
            seen += 1
            if seen == stop_after:
                break
    finally:
        await watched.aclose()


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [
        ("FINAL_ONLY", [output(3, 1, finished=True)]),
        ("CUMULATIVE", [output(1), output(2, 1), output(3, 1, finished=True)]),
        ("DELTA", [output(1), output(1, 1), output(1, 0, finished=True)]),
    ],
)
def test_it_is_charged_what_it_captured(kind: str, outputs: list[Any]) -> None:
    usage = client(max_bytes_per_day=MOST, max_concurrent_requests=1)
    meter = open_request(kind)
    assert usage.used("alice") == (MOST, 1, 1)
    with pytest.raises(QuotaError, match=r"capture\.rows: .* used 896 of its 896 bytes today"):
        open_request(kind)

    asyncio.run(run(outputs, meter))

    rows = (NUM_PROMPT + 3 - 1) + (NUM_PROMPT + 1 - 1)
    assert usage.used("alice") == (rows * ROW_BYTES, 1, 0)


def test_a_client_that_goes_away_is_charged_all_it_could_have_captured() -> None:
    usage = client(max_bytes_per_day=10 * MOST)

    asyncio.run(run([output(1), output(2, finished=True)], open_request("CUMULATIVE"), stop_after=1))
    assert usage.used("alice") == (MOST, 1, 0)


@pytest.mark.parametrize(("outputs", "num_bytes", "requests"), [([output(1)], NUM_PROMPT * ROW_BYTES, 1), ([], 0, 0)])
def test_one_that_fails_is_charged_what_it_had_captured(outputs: list[Any], num_bytes: int, requests: int) -> None:
    usage = client(max_bytes_per_day=10 * MOST)

    with pytest.raises(RuntimeError, match="too many wait"):
        asyncio.run(run(outputs, open_request("CUMULATIVE"), error=RuntimeError("too many wait")))

    assert usage.used("alice") == (num_bytes, requests, 0)


def test_one_that_never_ran_is_charged_nothing() -> None:
    usage = client(max_bytes_per_day=10 * MOST, max_concurrent_requests=1)

    async def refuse() -> None:
        async def generate() -> AsyncGenerator[Any, None]:
            yield output(1)

        watched = metered(generate(), open_request())
        assert usage.used("alice") == (MOST, 1, 1)
        del watched

    asyncio.run(refuse())

    assert usage.used("alice") == (0, 0, 0)


def test_only_what_clients_with_quotas_capture_is_counted() -> None:
    client(max_request_rows=100)
    assert open_request() is None
    client(max_bytes_per_day=1)
    with pytest.raises(RequestError, match="only prompts of tokens can be counted"):
        open_request(num_prompt=None)


def test_before_an_answer_begins_a_quota_is_looked_at_without_being_used() -> None:
    usage = client(max_bytes_per_day=MOST)
    params: Any = SimpleNamespace(
        extra_args={"capture": {"rows": {"hooks": {"post_mlp": [0]}}}}, max_tokens=MAX_TOKENS, n=2
    )
    ask = FRONT.capture_reader.read(params, "r")
    assert ask is not None
    resolved = FRONT.resolve(ask, NUM_PROMPT, params, None)

    check_quota(FRONT, resolved, NUM_PROMPT, params)
    assert usage.used("alice") == (0, 0, 0)
    params.max_tokens += 1
    with pytest.raises(QuotaError, match="this could take 960 more"):
        check_quota(FRONT, resolved, NUM_PROMPT, params)
