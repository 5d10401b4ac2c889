"""What comes with the answer: hidden states, captures inline, on every route of the server, whole and streamed."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.fakes.server import Server, serving
from tests.frontend.test_http import CHAT, FLAGS, MODULE, events

pytestmark = pytest.mark.engine

HIDDEN = 576
ROWS = {"rows": {"hooks": {"post_mlp": [3, 5]}, "positions": "all_generated"}}


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    flags = ["--enable-return-hidden-states", "--capture-consumers", "inline"]
    with serving([*MODULE, str(model_dir), *FLAGS, *flags], VLLM_PLUGINS="headgate,fake_worker") as running:
        yield running


def complete(server: Server, prompt: Any = "The capital of", **body: Any) -> httpx.Response:
    given = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "return_hidden_states": True, **body}
    return server.post("/v1/completions", **given)


def chat(server: Server, **body: Any) -> httpx.Response:
    given = {"model": "tiny", "messages": CHAT, "max_tokens": 5, "return_hidden_states": True, **body}
    return server.post("/v1/chat/completions", **given)


def respond(server: Server, **body: Any) -> httpx.Response:
    given = {"model": "tiny", "input": "Hi", "max_output_tokens": 5, "return_hidden_states": True, **body}
    return server.post("/v1/responses", **given)


def position_of(state: Any) -> int:
    """The fake worker's rows hold their position everywhere."""
    if isinstance(state, dict):
        assert (state["dtype"], state["shape"]) == ("bfloat16", [HIDDEN])
        words = np.frombuffer(base64.b64decode(state["data"]), "<u2")
        state = (words.astype("<u4") << 16).view("<f4").tolist()
    assert len(state) == HIDDEN
    (position,) = set(state)
    return int(position)


def last_position(answer: Any) -> int:
    """Of the last token that was forwarded."""
    usage = answer["usage"]
    tokens = usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]
    prompt = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]
    return int(prompt) + int(tokens) - 2


@pytest.mark.parametrize("form", [True, "list", "base64"])
@pytest.mark.parametrize("send", [complete, chat], ids=["completion", "chat"])
def test_a_choice_carries_its_state(server: Server, send: Any, form: Any) -> None:
    answer = send(server, return_hidden_states=form).json()

    assert position_of(answer["choices"][0]["hidden_states"]) == last_position(answer)
    assert "capture_results" not in answer


ENDS = {
    "length": ({}, "length"),
    "one token": ({"max_tokens": 1}, "length"),
    "eos": ({"vllm_xargs": {"script": [1000, 1001, 2]}, "max_tokens": 9}, "stop"),
    "stop token": ({"vllm_xargs": {"script": [1000, 1001, 1002]}, "stop_token_ids": [1002], "max_tokens": 9}, "stop"),
    "stop string": ({"vllm_xargs": {"script": [504, 3575, 282]}, "stop": [" of"], "max_tokens": 40}, "stop"),
}


@pytest.mark.parametrize(("body", "reason"), ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("send", [complete, chat], ids=["completion", "chat"])
def test_however_the_answer_ends(server: Server, send: Any, body: dict[str, Any], reason: str) -> None:
    answer = send(server, **body).json()

    (choice,) = answer["choices"]
    assert choice["finish_reason"] == reason
    assert position_of(choice["hidden_states"]) == last_position(answer)


@pytest.mark.parametrize("send", [complete, chat], ids=["completion", "chat"])
def test_a_stream_ends_with_the_states(server: Server, send: Any) -> None:
    whole = send(server).json()
    chunks = events(send(server, stream=True))

    (choice,) = chunks[-1]["choices"]
    assert choice["index"] == 0
    assert position_of(choice["hidden_states"]) == last_position(whole)
    assert ("delta" in choice) == (send is chat)
    assert all("hidden_states" not in choice for chunk in chunks[:-1] for choice in chunk["choices"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_every_choice_of_every_prompt_has_one(server: Server, stream: bool) -> None:
    prompts = ["One", "Two words", "And three words"]
    answer = complete(server, prompt=prompts, n=2, temperature=1.0, stream=stream)

    choices = events(answer)[-1]["choices"] if stream else answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [position_of(choice["hidden_states"]) for choice in choices] == [4, 4, 5, 5, 6, 6]


def test_the_openai_client_reads_them(server: Server) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        body = {"return_hidden_states": True}
        whole = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=3, extra_body=body)
        chunks = list(
            client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=3, stream=True, extra_body=body)
        )
        responded = client.responses.create(model="tiny", input="Hi", max_output_tokens=3, extra_body=body)

    expected = whole.choices[0].model_extra["hidden_states"]
    assert chunks[-1].choices[0].model_extra["hidden_states"] == expected
    assert len(responded.model_extra["hidden_states"]) == HIDDEN


def test_captures_come_along(server: Server) -> None:
    answer = chat(server, capture=ROWS).json()

    assert list(answer["capture_results"]) == ["rows"]
    assert answer["capture_results"]["rows"]["status"] == "ok"
    assert position_of(answer["choices"][0]["hidden_states"]) == last_position(answer)


def test_false_is_as_if_it_were_not_there(server: Server) -> None:
    for form in (False, None):
        answer = complete(server, return_hidden_states=form).json()
        assert "hidden_states" not in answer["choices"][0]
        assert "capture_results" not in answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("send", [complete, chat, respond], ids=["completion", "chat", "response"])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"return_hidden_states": "yes"}, "return_hidden_states"),
        ({"return_hidden_states": 1.5}, "return_hidden_states"),
        ({"vllm_xargs": {"return_hidden_states": "list"}}, "vllm_xargs.return_hidden_states"),
        ({"capture": {"hidden_states": {}}}, "capture.hidden_states"),
        ({"capture": {"inline": {"hooks": {"post_mlp": [3]}, "root": "/"}}}, "capture.inline.root"),
        ({"capture": {"inline": {"hooks": {"post_mlp": [3]}, "positions": [-999]}}}, "capture.inline.positions"),
    ],
    ids=["text", "number", "by another way", "named", "unknown option", "no such position"],
)
def test_what_is_wrong_is_a_400(server: Server, send: Any, body: dict[str, Any], field: str, stream: bool) -> None:
    response = send(server, stream=stream, **body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_a_response_carries_results_and_the_state(server: Server) -> None:
    answer = respond(server, capture=ROWS).json()

    assert answer["status"] in ("completed", "incomplete")
    assert answer["capture_results"]["rows"]["status"] == "ok"
    assert position_of(answer["hidden_states"]) == last_position(answer)


def test_a_streamed_response_carries_them_in_its_last_event(server: Server) -> None:
    body = respond(server, capture=ROWS, stream=True).text

    told = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: {")]
    assert told[-1]["type"] in ("response.completed", "response.incomplete")
    response = told[-1]["response"]
    assert response["capture_results"]["rows"]["status"] == "ok"
    assert position_of(response["hidden_states"]) == last_position(response)
    assert all("capture_results" not in (event.get("response") or {}) for event in told[:-1])


def test_a_response_without_our_fields_is_stock(server: Server) -> None:
    answer = respond(server, return_hidden_states=None).json()

    assert "capture_results" not in answer
    assert "hidden_states" not in answer


def test_a_response_in_the_background_cannot_capture(server: Server) -> None:
    response = respond(server, background=True, store=True)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "background"


def test_a_message_selector_in_a_response_is_a_400(server: Server) -> None:
    capture = {"rows": {**ROWS["rows"], "positions": {"role": "user", "index": 0}}}
    response = respond(server, capture=capture, stream=True)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "capture.rows.positions"
