"""The OpenAI-compatible server over the model-free worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.server import Server, serving

pytestmark = pytest.mark.engine

MODULE = ["-m", "vllm.entrypoints.openai.api_server", "--model"]
COMMAND = ["-c", "from headgate.capture.cli import main; main()", "serve"]
FLAGS = [
    *("--served-model-name", "tiny", "--dtype", "bfloat16", "--load-format", "dummy", "--enforce-eager"),
    *("--worker-cls", "tests.fakes.worker.FakeWorker", "--block-size", "32", "--max-model-len", "1024"),
    *("--distributed-executor-backend", "uni"),
    *("--max-num-seqs", "16", "--capture-consumers", "rows:size=1", "broken"),
    *("--capture-sites", '{"post_mlp": [3, 5]}'),
]
CAPTURE = {"rows": {"hooks": {"post_mlp": [3, 5]}}}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "?"}]


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    with serving([*MODULE, str(model_dir), *FLAGS]) as running:
        yield running


def complete(server: Server, prompt: Any = "The capital of", **body: Any) -> httpx.Response:
    return server.post(
        "/v1/completions",
        **{"model": "tiny", "prompt": prompt, "max_tokens": 5, "capture": CAPTURE, "capture_wait": True, **body},
    )


def chat(server: Server, **body: Any) -> httpx.Response:
    return server.post(
        "/v1/chat/completions",
        **{"model": "tiny", "messages": CHAT, "max_tokens": 5, "capture": CAPTURE, "capture_wait": True, **body},
    )


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_carries_its_results(server: Server) -> None:
    answer = complete(server).json()

    result = answer["capture_results"]["rows"]
    assert result["status"] == "ok"
    num_tokens = answer["usage"]["prompt_tokens"] + 5
    assert result["payload"]["rows"] == list(range(num_tokens - 1))
    assert result["num_rows"] == num_tokens - 1
    assert result["payload"]["wire"]["id"].startswith("cmpl-")


def test_a_chat_carries_its_results(server: Server) -> None:
    answer = chat(server).json()

    result = answer["capture_results"]["rows"]
    assert result["payload"]["rows"] == list(range(answer["usage"]["prompt_tokens"] + 4))
    assert result["payload"]["wire"]["id"] == answer["id"]


@pytest.mark.parametrize("send", [complete, chat], ids=["completion", "chat"])
def test_a_stream_ends_with_its_results(server: Server, send: Any) -> None:
    chunks = events(send(server, stream=True))

    last = chunks[-1]
    assert last["choices"] == []
    assert (last["id"], last["object"], last["model"]) == (chunks[0]["id"], chunks[0]["object"], "tiny")
    assert last["capture_results"]["rows"]["status"] == "ok"
    assert all("capture_results" not in chunk for chunk in chunks[:-1])


def test_the_openai_client_reads_a_stream_with_results(server: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=3, stream=True, extra_body={"capture": CAPTURE}
        )
    )

    assert chunks[-1].model_extra["capture_results"]["rows"]["status"] in ("ok", "pending")
    client.close()


def test_several_prompts_have_a_list_of_results(server: Server) -> None:
    answer = complete(server, prompt=["One", "Two words", "And three words"], n=2, temperature=1.0).json()

    results = answer["capture_results"]
    assert [len(result["rows"]["payload"]) for result in results] == [2, 2, 2]
    assert [result["rows"]["payload"][0]["num_prompt"] for result in results] == [1, 2, 3]


def test_a_request_without_capture_has_stock_answers(server: Server) -> None:
    answer = complete(server, capture=None, capture_wait=None).json()
    chunks = events(complete(server, capture=None, capture_wait=None, stream=True))

    assert "capture_results" not in answer
    assert all("capture_results" not in chunk and chunk["choices"] for chunk in chunks)


BAD = {
    "an unknown consumer": ({"nobody": {}}, "capture.nobody"),
    "a layer that is not configured": ({"rows": {"hooks": {"post_mlp": [4]}}}, "capture.rows.hooks.post_mlp"),
    "no hooks": ({"rows": {}}, "capture.rows.hooks"),
    "not an object": ([1], "capture"),
    "a position before the prompt": ({"rows": {**CAPTURE["rows"], "positions": [-99]}}, "capture.rows.positions"),
    "no such message": (
        {"rows": {**CAPTURE["rows"], "positions": {"role": "tool", "index": 0}}},
        "capture.rows.positions",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("send", [complete, chat], ids=["completion", "chat"])
@pytest.mark.parametrize(("capture", "field"), BAD.values(), ids=BAD.keys())
def test_a_bad_spec_is_a_400_that_names_its_field(
    server: Server, send: Any, capture: Any, field: str, stream: bool
) -> None:
    response = send(server, capture=capture, stream=stream)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(field)


def test_a_wrong_capture_wait_is_a_400(server: Server) -> None:
    response = complete(server, capture_wait="yes")

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "capture_wait"


@pytest.mark.parametrize("send", [complete, chat], ids=["completion", "chat"])
def test_beam_search_is_a_400(server: Server, send: Any) -> None:
    response = send(server, use_beam_search=True, n=2)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "capture"


def test_a_consumer_that_fails_to_check_is_a_500_and_the_server_goes_on(server: Server) -> None:
    assert complete(server, capture={"broken": {}}).status_code == 500
    assert complete(server).status_code == 200


def test_a_message_of_a_chat_is_selected(server: Server) -> None:
    whole = chat(server).json()["capture_results"]["rows"]["payload"]
    capture = {"rows": {**CAPTURE["rows"], "positions": {"role": "user", "index": -1}}}
    told = chat(server, capture=capture).json()["capture_results"]["rows"]["payload"]

    span = told["spec"]["positions"]
    tokens = whole["token_ids"][span["start"] : span["stop"]]
    assert tokens[0] == 1  # <|im_start|>
    assert whole["token_ids"][: span["start"]][-2] == 2  # <|im_end|>, and a line break
    assert span["stop"] < whole["num_prompt"]  # what invites the model to speak belongs to no message


def test_results_tell_where_the_messages_of_a_chat_lie(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    answer = chat(server, capture_messages=True, tools=[tool], tool_choice="none").json()
    result = answer["capture_results"]["rows"]
    tokens = result["payload"]["token_ids"]

    spans = result["messages"]

    assert [span["role"] for span in spans] == [message["role"] for message in CHAT]
    assert all(span["token_ids"] == tokens[span["start"] : span["stop"]] for span in spans)
    assert [after["start"] - before["stop"] for before, after in pairwise(spans)] == [0, 0]
    told = [{key: span[key] for key in ("role", "start", "stop")} for span in spans]
    assert result["payload"]["spec"]["options"]["messages"] == told  # consumers that keep them have them
    assert spans[0]["start"] > 0  # SmolLM2's own system message comes before
    assert spans[-1]["stop"] < result["payload"]["num_prompt"]
    plain = chat(server).json()["capture_results"]["rows"]
    assert plain["messages"] is None
    assert "messages" not in plain["payload"]["spec"]["options"]


def test_messages_of_what_is_no_chat_or_a_very_long_one_are_a_400(server: Server) -> None:
    for response in (
        complete(server, capture_messages=True),
        chat(server, capture_messages=True, messages=CHAT * 50),
        server.post("/v1/responses", model="tiny", input="Hi", capture=CAPTURE, capture_messages=True),
    ):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "capture_messages"


def test_two_api_servers_each_get_their_own_results(model_dir: Path) -> None:
    with serving([*COMMAND, str(model_dir), *FLAGS, "--api-server-count", "2"], num_servers=2) as server:
        answers = [complete(server, prompt=f"Number {i}").json() for i in range(16)]

    assert [answer["capture_results"]["rows"]["status"] for answer in answers] == ["ok"] * 16


def test_steering_on_a_server_without_it_is_a_400(server: Server) -> None:
    for send in (complete, chat):
        response = send(server, capture=None, capture_wait=None, steering_name="calm", stream=True)

        assert response.status_code == 400
        assert response.json()["error"]["param"] == "steering_name"
        assert "--enable-steering" in response.json()["error"]["message"]
