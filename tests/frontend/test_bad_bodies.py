"""Whatever is wrong with a body is a 400 that names the field, before a stream starts; and the server goes on."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from headgate.steering.client import Client
from tests.deadlines import patience
from tests.fakes.bad_bodies import CAPTURES, HOOKS, ROUTES, STEERS, VECTOR
from tests.fakes.random_fields import fields_of_requests
from tests.fakes.server import Server, known_flags, serving

pytestmark = pytest.mark.engine

COMMAND = ["-c", "from headgate.capture.cli import main; main()", "serve"]
FLAGS = [
    *("--served-model-name", "tiny", "--dtype", "bfloat16", "--load-format", "dummy", "--enforce-eager"),
    *("--worker-cls", "tests.fakes.noting_worker.NotingWorker", "--block-size", "32", "--max-model-len", "1024"),
    *("--distributed-executor-backend", "uni", "--max-num-seqs", "16"),
    *("--capture-consumers", "rows:size=1", "everything", "--capture-sites", '{"post_mlp": [3, 5]}'),
    *("--enable-steering", "--max-steering-slots", "150"),
]
CHAT = [{"role": "user", "content": "Hi"}]
BODIES = {**CAPTURES, **STEERS}


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    command = [*COMMAND, str(model_dir), *FLAGS, *known_flags("--enable-scale-out")]
    with serving(command) as running, Client(running.url) as client:
        client.register("calm", {"post_mlp": {3: VECTOR}})
        yield running
        # What was refused has left nothing behind.
        status = client.status()
        assert set(status.modules) == {"calm"}
        assert status.shared.tiers == {}
        assert [(slots.reserved, slots.waiting) for slots in status.slots] == [(1, 0)]


def send(server: Server, path: str, **fields: Any) -> httpx.Response:
    about: dict[str, Any] = {
        "/v1/completions": {"prompt": "The capital of", "max_tokens": 2},
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    }[path]
    return server.post(path, **{"model": "tiny", **about, **fields})


def assert_refused(response: httpx.Response, field: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")
    assert len(error["message"]) < 1000


def test_the_table_is_long_enough() -> None:
    assert len(BODIES) >= 60


@pytest.mark.parametrize(("fields", "field"), BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize(("path", "stream"), [("/v1/completions", False), ("/v1/chat/completions", True)])
def test_a_bad_field_of_a_request_is_named(server: Server, path: str, stream: bool, fields: Any, field: str) -> None:
    assert_refused(send(server, path, stream=stream, **fields), field)


@pytest.mark.parametrize(("fields", "field"), STEERS.values(), ids=STEERS.keys())
def test_a_bad_field_of_a_response_is_named(server: Server, fields: Any, field: str) -> None:
    assert_refused(send(server, "/v1/responses", stream=True, **fields), field)


@pytest.mark.parametrize(("path", "body", "field"), ROUTES.values(), ids=ROUTES.keys())
def test_a_bad_field_of_a_route_is_named(server: Server, path: str, body: Any, field: str) -> None:
    assert_refused(server.post(path, **body), field)


SERVED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/v1/chat/completions/batch": {"messages": [CHAT, CHAT], "max_tokens": 2},
    "/invocations": {"prompt": "Hi", "max_tokens": 2},
    "/v1/completions/render": {"prompt": "Hi", "max_tokens": 2},
}
STRAY: dict[str, tuple[dict[str, Any], str]] = {
    "clamps": ({"steering_of_tomorrow": [{"feature": 1, "value": 2.0}]}, "steering_of_tomorrow"),
    "a word that we lack": ({"steerings": {"layer": 3}}, "steerings"),
    "features": ({"sae_of_tomorrow": [1]}, "sae_of_tomorrow"),
    "a misspelt field": ({"capture_waits": True}, "capture_waits"),
    "in xargs": ({"vllm_xargs": {"steering_of_tomorrow": "x"}}, "vllm_xargs.steering_of_tomorrow"),
    "in parameters": ({"sampling_params": {"steering_name": "calm"}}, "sampling_params.steering_name"),
    "in extra arguments": ({"extra_args": {"steering_name": "calm"}}, "extra_args.steering_name"),
    "in both": ({"sampling_params": {"extra_args": {"capture": {}}}}, "sampling_params.extra_args.capture"),
}


@pytest.mark.parametrize(("fields", "field"), STRAY.values(), ids=STRAY.keys())
@pytest.mark.parametrize("path", SERVED)
def test_a_field_that_would_be_ignored_is_named(server: Server, path: str, fields: Any, field: str) -> None:
    assert_refused(server.post(path, **{"model": "tiny", **SERVED[path], **fields}), field)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_beam_search_drops_no_field_in_silence(server: Server, path: str) -> None:
    beams = {"use_beam_search": True, "n": 2, "vllm_xargs": {"steering_name": "calm"}}

    assert_refused(server.post(path, **{"model": "tiny", **SERVED[path], **beams}), "vllm_xargs.steering_name")


HALVES: dict[str, tuple[Any, str]] = {
    "a consumer": ({"capture": {"\ud800": HOOKS}}, "capture.\\ud800"),
    "a hook point": ({"steering_vectors": {"\udfff": {"3": VECTOR}}}, "steering_vectors.\\udfff"),
    "a name": ({"steering_name": "\ud800"}, "steering_name"),
    "a key of a spec": ({"capture": {"rows": {**HOOKS, "\ud800": 1}}}, "capture.rows.\\ud800"),
}


@pytest.mark.parametrize(("fields", "field"), HALVES.values(), ids=HALVES.keys())
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_name_that_is_no_text_is_named(server: Server, path: str, fields: Any, field: str) -> None:
    content = json.dumps({"model": "tiny", **SERVED[path], **fields})
    headers = {"Content-Type": "application/json"}

    assert_refused(httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=patience(60)), field)


def test_a_field_whose_name_is_no_text_is_refused_by_vllms_own_model(server: Server) -> None:
    content = json.dumps({"model": "tiny", **SERVED["/v1/completions"], "steering_\ud800": 1})

    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers={"Content-Type": "application/json"})

    assert answer.status_code == 400
    assert "steering_" in answer.json()["error"]["message"]


def test_batches_of_chats_are_steered_and_not_captured(server: Server) -> None:
    def send(**fields: Any) -> httpx.Response:
        body = SERVED["/v1/chat/completions/batch"]
        return server.post("/v1/chat/completions/batch", model="tiny", **body, **fields)

    assert send(steering_name="calm").status_code == 200
    assert send(steering_name="nobody").status_code == 400
    assert_refused(send(capture={"rows": HOOKS}), "capture")
    assert_refused(send(return_steering_trace=True), "return_steering_trace")


def test_invocations_are_served_as_what_they_are(server: Server) -> None:
    ours = {"capture": {"rows": HOOKS}, "capture_wait": True, "steering_name": "calm"}

    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = server.post("/invocations", model="tiny", **SERVED[path], **ours).json()
        assert answer["capture_results"]["rows"]["status"] == "ok", answer


def test_a_rendered_request_is_steered_where_its_tokens_go(server: Server) -> None:
    rendered = server.post("/v1/completions/render", model="tiny", prompt="Hi", max_tokens=2, steering_name="calm")
    (request,) = rendered.json()

    assert request["sampling_params"]["extra_args"] == {"steering_name": "calm"}
    assert server.post("/inference/v1/generate", **request).status_code == 200


PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "beside them": ({"steering_name": "calm", "sampling_params": {}}, "steering_name"),
    "among them": ({"sampling_params": {"steering_name": "calm"}}, "sampling_params.steering_name"),
    "unknown": ({"sampling_params": {"extra_args": {"sae_of_tomorrow": [1]}}}, "extra_args.sae_of_tomorrow"),
    "wrong": ({"sampling_params": {"extra_args": {"steering_name": 7}}}, "steering_name"),
    "without a place in the answer": (
        {"sampling_params": {"extra_args": {"return_steering_trace": True}}},
        "sampling_params.extra_args.return_steering_trace",
    ),
}


@pytest.mark.parametrize(("fields", "field"), PARAMETERS.values(), ids=PARAMETERS.keys())
def test_parameters_that_clients_write_are_read_or_refused(server: Server, fields: Any, field: str) -> None:
    assert_refused(server.post("/inference/v1/generate", model="tiny", token_ids=[5, 6], **fields), field)


@pytest.mark.parametrize("path", sorted({path for path, _, _ in ROUTES.values()}))
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[]", "application/json"),
        (b"null", "application/json"),
        (b'{"name": "a", "vectors": NaN}', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"vectors":' * 5_000, "application/json"),
        (b"\xc1", "application/msgpack"),
        (b"\x81\xa1", "application/msgpack"),
        (b"\xdf\xff\xff\xff\xff", "application/msgpack"),
        (b"\x81\x01\x02", "application/msgpack"),
        (b"\x91" * 100_000, "application/msgpack"),
    ],
    ids=range(13),
)
def test_what_is_no_object_is_refused(server: Server, path: str, content: bytes, kind: str) -> None:
    response = httpx.post(f"{server.url}{path}", content=content, headers={"Content-Type": kind}, timeout=patience(60))

    # Routes that read vectors name the field of a number that is none.
    names_field = b"NaN" in content and response.json()["error"]["param"] == "vectors"
    assert_refused(response, "vectors" if names_field else "body")


@pytest.mark.parametrize("kind", ["", "text/plain", "multipart/form-data", "application/x-python-pickle"])
def test_other_kinds_of_body_are_415(server: Server, kind: str) -> None:
    response = httpx.post(
        f"{server.url}/v1/steering/set", content=b"{}", headers={"Content-Type": kind}, timeout=patience(60)
    )

    assert response.status_code == 415


@pytest.mark.parametrize("name", ["headgate", "capture", "steering_vectors"])
def test_nothing_can_be_brought_along_where_only_we_write(server: Server, name: str) -> None:
    response = send(server, "/v1/completions", vllm_xargs={name: "x"})

    assert response.status_code == 400
    assert response.json()["error"]["param"] in (f"vllm_xargs.{name}", f"extra_args.{name}", name)


@pytest.mark.parametrize("num_examples", [60, pytest.param(300, marks=pytest.mark.extended)])
def test_any_value_of_a_field_is_served_or_refused_by_name(server: Server, num_examples: int) -> None:
    statuses = Counter[int]()

    @settings(max_examples=num_examples, suppress_health_check=list(HealthCheck))
    @given(fields=fields_of_requests)
    def is_served_or_refused(fields: dict[str, Any]) -> None:
        response = send(server, "/v1/completions", **{"max_tokens": 1, **fields})
        statuses[response.status_code] += 1
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            assert re.split(r"[.\[]", response.json()["error"]["param"])[0] in fields

    is_served_or_refused()
    assert statuses[400] > num_examples // 3, statuses


def test_the_server_goes_on(server: Server) -> None:
    answer = send(
        server,
        "/v1/completions",
        capture={"rows": HOOKS},
        capture_wait=True,
        steering_vectors={"post_mlp": {3: VECTOR}},
    )

    assert answer.json()["capture_results"]["rows"]["status"] == "ok"
