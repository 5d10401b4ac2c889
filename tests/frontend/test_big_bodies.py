"""Long and binary bodies, limits, and the key to capture, on the real server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.deadlines import patience
from tests.fakes.server import Server, known_flags, serving
from tests.fakes.steering_forms import HIDDEN, LAYERS
from tests.frontend.test_http import CHAT, FLAGS, MODULE

pytestmark = pytest.mark.engine

MAX_BYTES = 2 << 20
MAX_ROWS = 80
SETTINGS = {"headgate": {"server": {"max_body_bytes": MAX_BYTES}, "capture": {"max_request_rows": MAX_ROWS}}}
ROWS = {"rows": {"hooks": {"post_mlp": [3]}}}
HOOKS = ("pre_attn", "post_mlp")
VECTORS = np.random.default_rng(0).normal(size=(len(HOOKS), LAYERS, HIDDEN)).astype(np.float32)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The capital of", "max_tokens": 3},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
}


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    flags = [
        *("--worker-cls", "tests.fakes.noting_worker.NotingWorker", "--enable-steering"),
        *("--max-steering-configs", "4", "--steering-sites", '{"post_mlp": "all", "pre_attn": "all"}'),
        *("--additional-config", json.dumps(SETTINGS)),
    ]
    command = [*MODULE, str(model_dir), *FLAGS, *flags, *known_flags("--enable-scale-out")]
    with serving(
        command, VLLM_PLUGINS="headgate,fake_worker", HEADGATE_CAPTURE_KEYS="other-key,capture-key"
    ) as running:
        yield running


def vectors(form: str) -> dict[str, Any]:
    if form == "lists":
        rows = zip(HOOKS, VECTORS, strict=True)
        return {hook: {str(layer): row.tolist() for layer, row in enumerate(of_hook)} for hook, of_hook in rows}
    head = {"dtype": "float32", "shape": [LAYERS, HIDDEN], "layer_indices": list(range(LAYERS))}
    data = [rows.tobytes() for rows in VECTORS]
    given = data if form == "binary" else [base64.b64encode(item).decode() for item in data]
    return {hook: {**head, "data": item} for hook, item in zip(HOOKS, given, strict=True)}


def post(server: Server, path: str, form: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "capture": ROWS, "capture_wait": True, **BODIES[path], **fields}
    content = msgspec.msgpack.encode(body) if form == "binary" else json.dumps(body).encode()
    kind = "application/msgpack" if form == "binary" else "application/json"
    headers = {"Content-Type": kind, "X-Headgate-Key": "capture-key"}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=patience(60))


def steered(response: httpx.Response) -> str:
    """A digest of what reached the worker."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("application/json"):
        answer = response.json()
    else:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        answer = json.loads(lines[-1])
        answer = answer.get("response", answer)
    return str(answer["capture_results"]["rows"]["payload"]["steered"])


@pytest.mark.parametrize("path", BODIES)
def test_every_form_reaches_the_worker_alike(server: Server, path: str) -> None:
    forms = {form: steered(post(server, path, form, steering_vectors=vectors(form))) for form in ("lists", "base64")}
    forms["binary"] = steered(post(server, path, "binary", steering_vectors=vectors("binary")))
    forms["streamed"] = steered(post(server, path, "binary", steering_vectors=vectors("binary"), stream=True))

    assert len(set(forms.values())) == 1, forms
    assert steered(post(server, path, "binary")) != forms["binary"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("form", ["lists", "base64", "binary"])
@pytest.mark.parametrize("path", BODIES)
def test_what_is_wrong_in_a_long_body_is_a_400(server: Server, path: str, form: str, stream: bool) -> None:
    wrong = vectors(form)
    wrong["post_mlp"] = {"99": [1.0] * HIDDEN} if form == "lists" else {**wrong["post_mlp"], "shape": [1, HIDDEN]}

    response = post(server, path, form, steering_vectors=wrong, stream=stream)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == ("steering_vectors.post_mlp" if form == "lists" else "steering_vectors.post_mlp.shape")
    assert error["message"].startswith(error["param"])


@pytest.mark.parametrize("path", [*BODIES, "/v1/steering/set", "/tokenize"])
def test_a_body_above_the_limit_is_a_413(server: Server, path: str) -> None:
    for content in (b" " * (MAX_BYTES + 1), iter([b" " * MAX_BYTES, b" "])):
        headers = {"Content-Type": "application/json"}
        response = httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=patience(60))

        assert response.status_code == 413
        assert response.json()["error"]["code"] == 413


@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_msgpack_body_is_a_400(server: Server, path: str) -> None:
    headers = {"Content-Type": "application/msgpack"}
    for content in (b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"model": b"x"})):
        response = httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=patience(60))

        assert response.status_code == 400, response.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
def test_more_than_the_quota_is_a_400(server: Server, path: str, stream: bool) -> None:
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"

    response = post(server, path, "lists", stream=stream, **{name: 100})

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "capture.rows"
    assert f"at most {MAX_ROWS} are allowed" in error["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_prompts_of_one_body_share_the_quota(server: Server, stream: bool) -> None:
    fields = {"max_tokens": 30, "stream": stream}

    for prompt, status in ((["Hi"] * 2, 200), (["Hi"] * 4, 400)):
        response = post(server, "/v1/completions", "lists", prompt=prompt, **fields)

        assert response.status_code == status, response.text
    assert f"at most {MAX_ROWS} are allowed" in response.json()["error"]["message"]


FORGED: dict[str, dict[str, Any]] = {
    "a wire form": {"vllm_xargs": {"headgate": "x"}},
    "raw fields": {"vllm_xargs": {"headgate": ["reply", "ipc:///tmp/x"]}},
}


@pytest.mark.parametrize("form", ["lists", "binary"])
@pytest.mark.parametrize("fields", FORGED.values(), ids=FORGED.keys())
@pytest.mark.parametrize("path", BODIES)
def test_internal_fields_cannot_be_forged(server: Server, path: str, fields: dict[str, Any], form: str) -> None:
    response = post(server, path, form, **fields)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "extra_args.headgate"


CAPTURING: dict[str, dict[str, Any]] = {
    **{path: {**body, "capture": ROWS} for path, body in BODIES.items()},
    "/invocations": {**BODIES["/v1/completions"], "capture": ROWS},
    "/inference/v1/generate": {
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 1, "extra_args": {"capture": ROWS}},
    },
}


@pytest.mark.parametrize("key", ["", "a-key", "other-key", "capture-key"])
@pytest.mark.parametrize("path", CAPTURING)
def test_capturing_needs_a_key(server: Server, path: str, key: str) -> None:
    body = {"model": "tiny", **CAPTURING[path]}
    for headers in ({"X-Headgate-Key": key}, {"Authorization": f"Bearer {key}"}):
        response = httpx.post(f"{server.url}{path}", json=body, headers=headers if key else {}, timeout=patience(60))

        is_known = key in ("other-key", "capture-key")
        assert response.status_code == (200 if is_known else 403), response.text
        if not is_known:
            assert "HEADGATE_CAPTURE_KEYS" in response.text
        assert "capture-key" not in response.text


def test_the_consumers_are_shown_with_a_key(server: Server) -> None:
    url = f"{server.url}/v1/capture/consumers"

    assert httpx.get(url, timeout=patience(60)).status_code == 403
    assert httpx.get(url, headers={"X-Headgate-Key": "capture-key"}, timeout=patience(60)).status_code == 200


def test_what_asks_for_nothing_needs_no_key(server: Server) -> None:
    assert server.post("/v1/completions", model="tiny", **BODIES["/v1/completions"]).status_code == 200
