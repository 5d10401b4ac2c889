"""Fields of ours on routes that would ignore them: a 400 with the field's name, whatever the body's type."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from headgate.capture.engine.server.bodies.field_guard import FieldGuard

REFUSED = "/v1/messages"
BODY = {"model": "m", "max_tokens": 4}
LATER = "/v1/of_a_later_vllm"
FIELDS = (
    *("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors", "steering_name"),
    *("steering", "steering_clamps", "sae_clamp_specs", "capture", "capture_wait", "capture_everything"),
    *("return_hidden_states", "return_hidden_states_of"),
)


class Inner:
    """The application: keeps the bodies that reached it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, is_more = b"", True
        while is_more:
            message = await receive()
            body, is_more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def post(path: str, *, inner: Inner | None = None, method: str = "POST", **content: Any) -> httpx.Response:
    guard = FieldGuard(inner or Inner(), own=("/v1/steering/",))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **content)

    return asyncio.run(ask())


def assert_refused(response: httpx.Response, field: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", field, 400)
    assert error["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("path", [REFUSED, "/v1/systemone", "/v1/embeddings", "/inference/v1/generate", LATER])
def test_a_field_is_refused_by_its_name(path: str, name: str) -> None:
    inner = Inner()

    assert_refused(post(path, inner=inner, json={**BODY, name: {"any": "thing"}}), name)
    assert inner.bodies == []


@pytest.mark.parametrize("name", ["vllm_xargs", "extra_args", "sampling_params"])
@pytest.mark.parametrize("path", [REFUSED, LATER])
def test_so_is_one_within_another(path: str, name: str) -> None:
    assert_refused(post(path, json={**BODY, name: {"a": 1, "steering_name": "calm"}}), f"{name}.steering_name")


def test_where_clients_write_parameters_the_engine_reads_what_is_in_extra_args() -> None:
    inner, path = Inner(), "/inference/v1/generate"
    body = {**BODY, "sampling_params": {"max_tokens": 1, "extra_args": {"steering_name": "calm"}}}

    assert post(path, inner=inner, json=body).status_code == 200
    assert json.loads(inner.bodies[0]) == body
    for wrong in ({"steering_name": "calm"}, {"vllm_xargs": {"steering_name": "calm"}}):
        (field,) = wrong
        inside = ".steering_name" if field == "vllm_xargs" else ""
        refused = post(path, json={**BODY, "sampling_params": wrong})
        assert_refused(refused, f"sampling_params.{field}{inside}")
        assert "sampling_params.extra_args" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({**BODY, "steering_name": "calm"}).encode("utf-16"),
        b'{"steering_n\\u0061me": "calm"}',
        b'{"steering_name": NaN}',
        b'{"prompt": "\\ud800", "steering_name": "calm"}',
        b'{"n": NaN, "steering_name": "calm"}',
        b'{"steering_name": null, "steering_name": "calm"}',
    ],
    ids=["UTF-16", "escaped", "not a number", "lone surrogate", "NaN elsewhere", "twice"],
)
def test_no_way_of_writing_json_gets_by(content: bytes) -> None:
    assert_refused(post(REFUSED, content=content, headers={"Content-Type": "application/json"}), "steering_name")


@pytest.mark.parametrize(
    "form",
    [
        {"data": {"steering_name": "calm"}},
        {"data": {"steering_name": "calm"}, "files": {"file": b"RIFF"}},
        {"data": {"a": "b"}, "files": {"steering_vectors": b"RIFF"}},
    ],
    ids=["urlencoded", "multipart", "a file"],
)
def test_a_form_to_a_route_that_is_unknown_is_looked_at(form: dict[str, Any]) -> None:
    assert_refused(post(LATER, **form), "steering_vectors" if "a" in form["data"] else "steering_name")


def test_a_form_may_hold_objects_as_json() -> None:
    given = {"vllm_xargs": json.dumps({"return_hidden_states": "last"})}

    assert_refused(post(LATER, data=given), "vllm_xargs.return_hidden_states")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"steering_name": None, "capture": None, "return_hidden_states": False, "vllm_xargs": None},
        {"messages": [{"steering_name": "calm"}], "metadata": {"capture": 1}, "steer": 1, "sae": 2, "vllm_xargs": "x"},
    ],
    ids=["none", "defaults", "in other places"],
)
def test_what_says_nothing_passes(body: dict[str, Any]) -> None:
    inner = Inner()

    assert post(REFUSED, inner=inner, json=body).status_code == 200
    assert json.loads(inner.bodies[0]) == body


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a":' * 50_000], ids=range(6))
def test_what_is_no_object_is_left_to_the_server(content: bytes) -> None:
    inner = Inner()

    assert post(REFUSED, inner=inner, content=content).status_code == 200
    assert inner.bodies == [content]


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/responses/resp_1/cancel", "/tokenize", "/v1/steering/set", "/v1/audio/translations"],
)
def test_other_routes_read_their_bodies_themselves(path: str) -> None:
    assert post(path, json={"steering_name": "calm"}).status_code == 200


def test_requests_without_a_body_pass() -> None:
    inner = Inner()

    assert post(REFUSED, inner=inner, method="GET", json={"steering_name": "calm"}).status_code == 200
    assert post(LATER, inner=inner, method="PUT", json={"steering_name": "calm"}).status_code == 400


EVENTS = [
    {"type": "session.update", "model": "m", "steering_name": "calm"},
    {"type": "session.update", "session": {"model": "m", "capture": {"memory": {}}}},
    {"type": "session.update", "model": "m", "vllm_xargs": {"sae_clamp_specs": []}},
]


def test_events_of_a_websocket_with_a_field_are_answered_and_dropped() -> None:
    good = [{"type": "session.update", "model": "m"}, {"type": "input_audio_buffer.commit", "final": True}]
    seen, sent = converse([EVENTS[0], good[0], *EVENTS[1:], good[1]])

    assert seen == good
    assert [event["type"] for event in sent] == ["error"] * 3
    fields = ["steering_name", "session.capture", "vllm_xargs.sae_clamp_specs"]
    assert [event["error"].partition(":")[0] for event in sent] == fields


def converse(events: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Events that reach the application, and those that the client gets."""
    seen, sent = [], []
    messages = [{"type": "websocket.connect"}]
    for number, event in enumerate(events):
        text = json.dumps(event)
        messages.append({"type": "websocket.receive", **({"bytes": text.encode()} if number % 2 else {"text": text})})
    messages.append({"type": "websocket.disconnect"})

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] != "websocket.disconnect":
            if message["type"] == "websocket.receive":
                seen.append(json.loads(message.get("text") or message["bytes"]))

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        assert message["type"] == "websocket.send"
        sent.append(msgspec.json.decode(message["text"]))

    asyncio.run(FieldGuard(inner, own=())({"type": "websocket", "path": "/v1/realtime"}, receive, send))
    return seen, sent
