"""What a worker reads in its steps reaches the answers of the OpenAI-compatible server: over the model-free worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.reading_part import PART, WORKER, installed
from tests.fakes.server import Server, serving
from tests.frontend.test_http import MODULE, events

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def reading_part(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(tmp_path_factory.mktemp("parts")):
        yield


CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    flags = [
        *("--served-model-name", "tiny", "--dtype", "bfloat16", "--load-format", "dummy", "--enforce-eager"),
        *("--worker-cls", WORKER, "--block-size", "32", "--max-model-len", "1024"),
        *("--distributed-executor-backend", "uni", "--max-num-seqs", "16"),
        *("--additional-config", json.dumps({"headgate": {PART: {}}})),
    ]
    with serving([*MODULE, str(model_dir), *flags]) as running:
        yield running


def complete(server: Server, **body: Any) -> httpx.Response:
    given = {"model": "tiny", "prompt": "The capital of", "max_tokens": 5, "return_rows": True, **body}
    return server.post("/v1/completions", **given)


def chat(server: Server, **body: Any) -> httpx.Response:
    given = {"model": "tiny", "messages": CHAT, "max_tokens": 5, "return_rows": True, **body}
    return server.post("/v1/chat/completions", **given)


def respond(server: Server, **body: Any) -> httpx.Response:
    given = {"model": "tiny", "input": "Hi", "max_output_tokens": 5, "return_rows": True, **body}
    return server.post("/v1/responses", **given)


@pytest.mark.parametrize("send", [complete, chat], ids=["completion", "chat"])
def test_a_choice_carries_its_rows(server: Server, send: Any) -> None:
    answer = send(server).json()

    assert answer["choices"][0]["rows"] == list(range(answer["usage"]["prompt_tokens"] + 5 - 1))
    assert answer.get("kv_transfer_params") is None


@pytest.mark.parametrize("send", [complete, chat], ids=["completion", "chat"])
def test_chunks_carry_theirs(server: Server, send: Any) -> None:
    whole = send(server).json()["choices"][0]["rows"]

    chunks = events(send(server, stream=True))

    pieces = [choice["rows"] for chunk in chunks for choice in chunk["choices"] if "rows" in choice]
    assert [row for piece in pieces for row in piece] == whole
    assert len(pieces) > 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_every_choice_of_every_prompt_carries_its_own(server: Server, stream: bool) -> None:
    answer = complete(server, prompt=["One", "Two words", "And three"], n=2, temperature=1.0, stream=stream)

    told: dict[int, list[int]] = {index: [] for index in range(6)}
    for chunk in events(answer) if stream else [answer.json()]:
        for choice in chunk["choices"]:
            told[choice["index"]] += choice.get("rows", [])
    assert [told[index] for index in range(6)] == [list(range(size)) for size in (5, 5, 6, 6, 6, 6)]


def test_a_response_carries_them_whole_and_in_its_last_event(server: Server) -> None:
    answer = respond(server).json()
    text = respond(server, stream=True).text

    usage = answer["usage"]
    assert answer["rows"] == list(range(usage["input_tokens"] + usage["output_tokens"] - 1))
    told = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert told[-1]["response"]["rows"] == answer["rows"]
    assert all("rows" not in (event.get("response") or {}) for event in told[:-1])


@pytest.mark.parametrize("send", [complete, chat, respond], ids=["completion", "chat", "response"])
@pytest.mark.parametrize("asks", [None, False])
def test_who_does_not_ask_gets_stock_answers(server: Server, send: Any, asks: Any) -> None:
    assert '"rows"' not in send(server, return_rows=asks).text
    assert '"rows"' not in send(server, return_rows=asks, stream=True).text


BAD = {
    "no flag": ({"return_rows": "yes"}, "return_rows"),
    "by another way": ({"return_rows": None, "vllm_xargs": {"return_rows": 1}}, "vllm_xargs.return_rows"),
    "no such field": ({"return_steering_rows": True}, "return_steering_rows"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("send", [complete, chat, respond], ids=["completion", "chat", "response"])
@pytest.mark.parametrize(("body", "field"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_answered_is_a_400(server: Server, send: Any, body: Any, field: str, stream: bool) -> None:
    response = send(server, stream=stream, **body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_a_response_in_the_background_has_no_place_for_them(server: Server) -> None:
    response = respond(server, background=True, store=True)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "background"
