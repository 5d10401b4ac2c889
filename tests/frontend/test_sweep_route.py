"""``/v1/patch_sweep`` in vLLM's own application, over an engine that is played: its events, its errors, its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from headgate.capture.engine.client_errors import overloaded
from headgate.capture.engine.requests.request_reader import REQUEST_READER
from headgate.capture.schema.errors import OverloadedError, RequestError
from tests.fakes.heads import runs_loop
from tests.frontend.test_app import Engine, Server, started  # noqa: F401  (a fixture)

pytestmark = pytest.mark.engine

CLEAN, CORRUPT = [9, 1, 2], [9, 1, 7]
SWEEP = "/v1/patch_sweep"
BODY: dict[str, Any] = {"prompt": CORRUPT, "source": "clean", "at": "2.post_mlp", "answer": 5, "metric": "recovered"}


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not runs_loop()
        return [len(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        assert not runs_loop()
        return f"<{tokens[0]}>"


class Kept:
    """The clean run of a client that may capture."""

    prompt_token_ids = np.array(CLEAN)
    columns: Mapping[Any, Any] = {}

    def find_kept(self, name: str, sample_index: int, field: str) -> Kept:
        if name != "clean":
            raise RequestError(f"{field}.request", "nothing is kept")
        return self

    def row(self, site: Any, position: int, field: str) -> torch.Tensor:
        return torch.full((8,), float(position + 1))


class Player:
    """Generates: -1 for the clean prompt, -5 for the corrupted one, more with a row; fails at one of the calls."""

    def __init__(self, engine: Engine) -> None:
        self.num_calls, self.fail_at = 0, 0
        self.error: Exception = overloaded(OverloadedError("too many wait"))
        model = SimpleNamespace(logprobs_mode="raw_logprobs", get_vocab_size=lambda: 100, max_model_len=100)
        engine.vllm_config.model_config = model
        engine.vllm_config.speculative_config = None
        engine.get_tokenizer = Tokenizer  # type: ignore[attr-defined]
        engine.generate = self.generate  # type: ignore[attr-defined]
        reader = getattr(engine.input_processor, REQUEST_READER)
        reader.capture = Kept()

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        self.num_calls += 1
        number = self.num_calls
        await asyncio.sleep(0)
        if number == self.fail_at:
            raise self.error
        value = -1.0 if prompt["prompt_token_ids"] == CLEAN else -5.0
        for operation in getattr(params, "prefill_steering_ops", None) or ():
            value += float(operation["vector"][0])
        step = {token: SimpleNamespace(logprob=value) for token in params.logprob_token_ids}
        yield SimpleNamespace(outputs=[SimpleNamespace(logprobs=[step], finish_reason="length")])


@pytest.fixture
def server(started: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> Server:  # noqa: F811
    from headgate.capture.engine.contracts.parts import request_parts
    from headgate.capture.engine.requests.request_reader import OpenPart
    from tests.frontend.test_app import MODEL

    running = started()
    part = request_parts()["steering"]
    opened = OpenPart("steering", part, part.open({"op_sites": {"post_mlp": "all"}}, MODEL))
    getattr(running.engine.input_processor, REQUEST_READER).parts["steering"] = opened
    return running


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_sweep_is_streamed_cell_by_cell(server: Server) -> None:
    player = Player(server.engine)

    answer = server.post(SWEEP, **BODY)

    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    first, *cells = events(answer)
    assert first == {
        "metric": "recovered",
        "sites": ["2.post_mlp"],
        "positions": [0, 1, 2],
        "source_positions": [0, 1, 2],
        "tokens": ["<9>", "<1>", "<7>"],
        "skipped": [],
        "clean": -1.0,
        "corrupt": -5.0,
        "num_cells": 3,
    }
    assert sorted((cell["site"], cell["position"], cell["value"]) for cell in cells) == [
        ("2.post_mlp", 0, 0.25),
        ("2.post_mlp", 1, 0.5),
        ("2.post_mlp", 2, 0.75),
    ]
    assert player.num_calls == 5


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"source": "other"}, "source.request"),
        ({"answer": "two words"}, "answer"),
        ({"at": "2.mlp_in"}, "at"),
        ({"layers": [2]}, "layers"),
    ],
)
def test_a_wrong_body_is_a_400_before_anything_runs(server: Server, changes: dict[str, Any], field: str) -> None:
    player = Player(server.engine)

    refused = server.post(SWEEP, **{**BODY, **changes})

    assert (refused.status_code, refused.json()["error"]["param"], player.num_calls) == (400, field, 0)


def test_a_server_that_is_full_says_so_before_the_stream_or_in_it(server: Server) -> None:
    player = Player(server.engine)
    player.fail_at = 1
    before = server.post(SWEEP, **BODY)
    player.num_calls, player.fail_at = 0, 3
    within = events(server.post(SWEEP, **BODY))

    assert (before.status_code, "too many wait" in before.text) == (503, True)
    assert within[-1]["error"] == {"message": "too many wait", "param": None, "code": 503}


def test_with_drafts_a_sweep_is_refused_before_anything_runs(server: Server) -> None:
    player = Player(server.engine)
    server.engine.vllm_config.speculative_config = SimpleNamespace(method="ngram")

    refused = server.post(SWEEP, **BODY)

    assert (refused.status_code, refused.json()["error"]["param"], player.num_calls) == (400, "metric", 0)


def test_a_cell_that_is_refused_names_its_field(server: Server) -> None:
    player = Player(server.engine)
    player.fail_at, player.error = 4, RequestError("prefill_steering_ops", "takes too many rows")

    found = events(server.post(SWEEP, **BODY))

    assert (found[-1]["error"]["code"], found[-1]["error"]["param"]) == (400, "prefill_steering_ops")


def test_where_it_is_not_served_the_reason_is_told(started: Callable[..., Server]) -> None:  # noqa: F811
    without_steering = started(is_steering=False).post(SWEEP, **BODY)
    without_plugin = started(plugins=None, VLLM_PLUGINS="").post(SWEEP, **BODY)

    assert (without_steering.status_code, "--enable-steering" in without_steering.text) == (404, True)
    assert (without_plugin.status_code, "VLLM_PLUGINS=headgate" in without_plugin.text) == (404, True)
