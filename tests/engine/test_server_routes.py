"""Steering over HTTP on the real model, with two API servers before one engine: global vectors, modules, metrics."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headgate.consumers.filesystem.formats.layout import MessagePlace
from headgate.consumers.reader import open_capture
from headgate.steering.client import extra_body
from tests.deadlines import patience
from tests.fakes.server import Server, serving

COMMAND = ["-c", "from headgate.capture.cli import main; main()", "serve"]
FLAGS = [
    *("--served-model-name", "smol", "--enforce-eager", "--block-size", "32", "--max-model-len", "4096"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--api-server-count", "2"),
    *("--enable-steering", "--max-steering-slots", "64", "--capture-sites", '{"post_mlp": [3]}'),
    *("--max-steering-waiting", "1", "--max-steering-wait-s", "2"),
]
PROMPT = "The capital of France is"
ONE = {"post_mlp": {"12": [float(value) for value in np.random.default_rng(7).normal(0, 6, 576).astype(np.float16)]}}
CAPTURE = {"filesystem": {"hooks": {"post_mlp": [3]}, "positions": "all_prompt"}}


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("captures")
    command = [*COMMAND, str(model_dir), *FLAGS, "--capture-consumers", f"filesystem:root={root}"]
    with serving(command, num_servers=2, VLLM_PLUGINS="headgate") as running:
        yield running


@pytest.fixture(autouse=True)
def left_clean(server: Server) -> Iterator[None]:
    """Nothing is left set or registered, and no slot stays reserved."""
    yield
    assert server.post("/v1/steering/clear").status_code == 200
    for name in get(server, "/v1/steering/modules").json()["modules"]:
        server.post("/v1/steering/modules/unregister", name=name)
    assert [slots["reserved"] for slots in get(server, "/v1/steering").json()["slots"]] == [0]


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", timeout=patience(60))


def complete(server: Server, **body: Any) -> httpx.Response:
    wanted = {"model": "smol", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **body}
    return server.post("/v1/completions", **wanted)


def texts(server: Server, count: int = 6, **body: Any) -> set[str]:
    """What several requests are answered; each is a connection of its own, which either server takes."""
    return {complete(server, **body).json()["choices"][0]["text"] for _ in range(count)}


def in_order(labels: dict[str, str]) -> list[str]:
    return [labels[name] for name in ("engine", "worker", "consumer", "le") if name in labels]


def values(server: Server, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(get(server, "/metrics").text)
    return {
        ",".join([sample.name.removeprefix(family.name), *in_order(sample.labels)]): sample.value
        for family in families
        if family.name == name
        for sample in family.samples
    }


def test_global_vectors_act_on_everybody_until_they_are_cleared(server: Server) -> None:
    (plain,) = texts(server)
    (steered,) = texts(server, steering_vectors=ONE)
    assert steered != plain

    assert server.post("/v1/steering/set", vectors=ONE).json()["layers_updated"] == [12]
    assert texts(server) == {steered}
    seen = [get(server, "/v1/steering").text for _ in range(6)]
    assert len(set(seen)) == 1
    assert server.post("/v1/steering/clear").json() == {"status": "ok"}
    assert texts(server) == {plain}


def test_a_decode_vector_leaves_the_first_token_alone(server: Server) -> None:
    (plain,) = texts(server, count=1, max_tokens=1)
    server.post("/v1/steering/set", decode_vectors=ONE)

    assert texts(server, max_tokens=1) == {plain}
    assert texts(server, count=1) != texts(server, count=1, max_tokens=1)


def test_a_module_is_known_to_both_servers_and_means_its_vectors(server: Server) -> None:
    (steered,) = texts(server, steering_vectors=ONE)
    (plain,) = texts(server)

    assert server.post("/v1/steering/modules/register", name="strong", vectors=ONE).status_code == 200
    assert texts(server, steering_name="strong") == {steered}
    assert texts(server) == {plain}
    assert server.post("/v1/steering/modules/unregister", name="strong").status_code == 200
    assert {complete(server, steering_name="strong").status_code for _ in range(6)} == {400}


def many(value: float) -> dict[str, Any]:
    """Vectors at more sites than two of the engine's slots can hold."""
    row = [value, *ONE["post_mlp"]["12"][1:]]
    return {hook: {str(layer): row for layer in range(20)} for hook in ("pre_attn", "post_mlp")}


def test_who_waits_too_long_or_comes_when_too_many_wait_is_a_503(server: Server) -> None:
    def send(index: int) -> httpx.Response:
        return complete(server, steering_vectors=many(index), stream=index % 2 == 0, max_tokens=2)

    body = {"model": "smol", "prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    taking = httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "steering_vectors": many(0)}, timeout=patience(60)
    )
    with taking as running, ThreadPoolExecutor(4) as pool:  # it would take a minute: leaving ends it
        events = running.iter_lines()  # held: the connection is closed when it goes
        next(events)
        answers = list(pool.map(send, range(1, 5)))
        same = complete(server, steering_vectors=many(0), max_tokens=2)
        plain = complete(server, max_tokens=2)

    assert [answer.status_code for answer in answers] == [503] * 4
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers)
    errors = [answer.json()["error"] for answer in answers]
    assert {error["code"] for error in errors} == {503}
    told = ["max_waiting" in error["message"] for error in errors]
    assert 0 < sum(told) < 4, errors  # one waits; when it has left, another may
    assert "no vector slots were free for 2 s" in errors[told.index(False)]["message"]
    assert (same.status_code, plain.status_code) == (200, 200)
    assert "retry-after" not in plain.headers
    assert send(5).status_code == 200


def test_a_request_that_runs_goes_on_through_changes(server: Server) -> None:
    body = {"model": "smol", "prompt": PROMPT, "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}
    chunks = 0
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=patience(120)) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunks += 1
            if chunks == 10:
                assert server.post("/v1/steering/set", vectors=ONE).status_code == 200
            if chunks == 30:
                assert server.post("/v1/steering/clear").status_code == 200
    assert chunks >= 120


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_and_the_openai_client_are_answered_alike(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "How was your day?"}], "max_tokens": 8, "temperature": 0}
    ours = {"steering_vectors": ONE, "capture": CAPTURE, "capture_wait": True, "capture_messages": True}
    command = ["curl", "-sS", "--fail-with-body", "-H", "Content-Type: application/json", "--data-binary", "@-"]
    told = subprocess.run(
        [*command, f"{server.url}/v1/chat/completions"],
        input=json.dumps({"model": "smol", **chat, **ours}).encode(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=patience(60),
    )
    curled = json.loads(told.stdout)

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        plain = client.chat.completions.create(model="smol", **chat)
        steered = client.chat.completions.create(model="smol", **chat, extra_body=extra_body(**ours))

    assert steered.choices[0].message.content == curled["choices"][0]["message"]["content"]
    assert steered.choices[0].message.content != plain.choices[0].message.content
    for results in (steered.model_extra["capture_results"], curled["capture_results"]):
        result = results["filesystem"]
        assert (result["status"], result["num_rows"]) == ("ok", steered.usage.prompt_tokens)
        stored = open_capture(result["payload"]["paths"][0])
        (span,) = result["messages"]
        assert stored.messages == [MessagePlace(span["role"], span["start"], span["stop"])]
        assert stored.token_ids[stored.in_role("user")].tolist() == span["token_ids"]


def test_metrics_count_what_was_captured_and_steered(server: Server) -> None:
    before = values(server, "headgate_capture_consumer_rows").get("_total,0,0,filesystem", 0)
    answers = [complete(server, capture=CAPTURE, capture_wait=True, steering_vectors=ONE).json() for _ in range(4)]
    server.post("/v1/steering/modules/register", name="strong", vectors=ONE)
    server.post("/v1/steering/set", vectors=ONE)
    rows = sum(answer["capture_results"]["filesystem"]["num_rows"] for answer in answers)
    assert rows > 0

    wait_until_fresh(server)
    for _ in range(4):  # whichever server answers
        assert values(server, "headgate_capture_consumer_rows")["_total,0,0,filesystem"] == before + rows
    found = values(server, "headgate_capture_consumer_result_seconds")
    assert found["_count,0,0,filesystem"] >= 4
    assert values(server, "headgate_steering_modules") == {",0": 1}
    assert values(server, "headgate_steering_global_vectors") == {",0": 2}
    assert values(server, "headgate_steering_requests_waiting") == {",0": 0}
    assert values(server, "headgate_steering_slots") == {",0": 63}
    assert values(server, "headgate_capture_dropped_rows") == {"_total,0,0": 0}


def wait_until_fresh(server: Server) -> None:
    """Both servers have fetched since the last change; each does so at most once a second."""
    import time

    until = time.monotonic() + 1.1
    while time.monotonic() < until:
        get(server, "/health")
