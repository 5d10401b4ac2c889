"""The middleware that reads bodies, around an application that tells what reached it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from starlette.exceptions import HTTPException

from headgate.capture.engine.contracts.parts import request_parts
from headgate.capture.engine.requests.call_context import NOTHING, taken
from headgate.capture.engine.requests.request_reader import REQUEST_READER, OpenPart, RequestReader
from headgate.capture.engine.server.bodies.middleware import _MANY_VECTORS, LONG_BODY
from headgate.capture.engine.server.loop_threads import _TURN
from headgate.capture.schema.config import ServerConfig, parse_server, server_config
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import ConfigError
from tests.fakes.body_site import MAX_BYTES, MAX_UPLOAD, Inner, bodies

HIDDEN = 8192
MODEL = ModelInfo(name="tiny", num_layers=4, hidden_size=HIDDEN, dtype="float32", sites=())
VECTORS = np.linspace(-1, 1, 2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN)
PACKED = {"dtype": "float32", "shape": [2, HIDDEN], "layer_indices": [1, 3]}
MSGPACK = {"Content-Type": "application/msgpack"}
FORMS: dict[str, Any] = {
    "lists": {"1": VECTORS[0].tolist(), "3": VECTORS[1].tolist()},
    "base64": {**PACKED, "data": base64.b64encode(VECTORS.tobytes()).decode()},
    "binary": {**PACKED, "data": VECTORS.tobytes()},
}


class Site:
    """The application behind the middleware, over an engine with steering, or without."""

    def __init__(self, *, has_steering: bool = True, max_bytes: int = MAX_BYTES) -> None:
        part = request_parts()["steering"]
        opened = {"steering": OpenPart("steering", part, part.open({}, MODEL))} if has_steering else {}
        engine = SimpleNamespace(input_processor=SimpleNamespace(**{REQUEST_READER: RequestReader(None, opened)}))
        self.inner = Inner()
        middleware = bodies(self.inner, max_bytes)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
            await middleware(scope, receive, send)

        self._app = app

    def post(self, path: str, content: Any, **headers: str) -> httpx.Response:
        async def post() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
                return await client.post(path, content=content, headers=headers)

        return asyncio.run(post())

    def send(self, path: str, form: str, **fields: Any) -> httpx.Response:
        body = {"model": "m", "prompt": "Hi", "steering_vectors": {"post_mlp": FORMS[form]}, **fields}
        if form == "binary":
            return self.post(path, msgspec.msgpack.encode(body), **MSGPACK)
        return self.post(path, json.dumps(body), **{"Content-Type": "application/json; charset=utf-8"})

    @property
    def call(self) -> Any:
        (call,) = self.inner.calls
        return call


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_comes_to_the_same(path: str, form: str) -> None:
    site = Site()

    assert site.send(path, form).status_code == 200

    assert json.loads(site.call.body) == {"model": "m", "prompt": "Hi"}
    assert site.call.headers["content-type"] == "application/json"
    assert site.call.headers["content-length"] == str(len(site.call.body))
    wanted = site.call.taken.wanted["steering"]
    assert wanted.content.prefill.payload == VECTORS.tobytes()
    assert [found.name for found in wanted.content.prefill.sites] == ["1.post_mlp", "3.post_mlp"]
    assert taken() is NOTHING


def test_what_was_read_is_known_for_those_very_values() -> None:
    site = Site()
    site.send("/v1/completions", "binary", steering_name="calm")

    before, fields = site.call.taken, dict(site.call.taken.fields)
    assert set(fields) == {"steering_vectors", "steering_name"}
    assert before.has("steering", fields)
    assert not before.has("steering", {**fields, "steering_vectors": dict(fields["steering_vectors"])})
    assert not before.has("capture", fields)


@pytest.mark.parametrize("num_bytes", [LONG_BODY, 2 * _MANY_VECTORS])
def test_fields_of_bodies_with_few_vectors_are_read_in_the_turn_that_found_them(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, turns = Site(), list[bool]()
    read_parts = RequestReader.read_parts

    def noting(self: RequestReader, values: Any) -> Any:
        turns.append(_TURN.locked())
        return read_parts(self, values)

    monkeypatch.setattr(RequestReader, "read_parts", noting)
    assert site.send("/v1/completions", "base64", prompt="x" * num_bytes).status_code == 200

    assert turns == [num_bytes < _MANY_VECTORS]
    assert not _TURN.locked()
    assert site.call.taken.wanted["steering"].content.prefill.payload == VECTORS.tobytes()


def test_short_json_is_left_alone() -> None:
    site = Site()
    body = json.dumps({"steering_vectors": {"post_mlp": {"1": [1.0]}}})

    site.post("/v1/completions", body, **{"Content-Type": "application/json"})

    assert site.call.body == body.encode()
    assert site.call.taken is NOTHING


@pytest.mark.parametrize(
    ("kind", "headers", "is_looked_at"),
    [
        ("application/json", {}, False),
        ("text/plain", {}, False),
        ("application/json", {"content-encoding": "gzip"}, True),
        ("application/json", {"transfer-encoding": "chunked"}, True),
        ("application/json", {"content-length": str(LONG_BODY)}, True),
        ("application/json", {"content-length": "+2"}, True),
        ("application/json", {"content-length": ""}, True),
        ("application/msgpack", {}, True),
    ],
)
def test_only_bodies_that_are_sure_to_be_short_go_by_unread(
    kind: str, headers: dict[str, str], *, is_looked_at: bool
) -> None:
    given = {"content-length": "2", "content-type": kind, **headers}

    assert is_read_first([(name.encode(), value.encode()) for name, value in given.items()]) == is_looked_at


def test_two_lengths_or_types_are_not_believed() -> None:
    kind, length = (b"content-type", b"application/json"), (b"content-length", b"2")

    assert not is_read_first([kind, length])
    assert is_read_first([kind, length, (b"content-length", b"9")])
    assert is_read_first([kind, (b"content-type", b"multipart/form-data"), length])


def test_a_limit_below_a_short_body_holds() -> None:
    response = Site(max_bytes=10).post("/v1/completions", b"x" * 11, **{"Content-Type": "application/json"})

    assert response.status_code == 413


def is_read_first(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a body with these headers is received before the application is called."""
    order: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        order.append("called")
        assert (await receive())["body"] == b"\x80\x80"

    async def receive() -> Any:
        order.append("received")
        return {"type": "http.request", "body": b"\x80\x80", "more_body": False}

    async def send(message: Any) -> None:
        order.append("refused")

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(bodies(inner)(scope, receive, send))
    return order[0] == "received"


@pytest.mark.parametrize(
    "body", ["x" * 2 * LONG_BODY, json.dumps({"prompt": "x" * 2 * LONG_BODY}), "[1]" * LONG_BODY], ids=range(3)
)
def test_long_bodies_without_our_fields_are_left_alone(body: str) -> None:
    site = Site()

    site.post("/v1/completions", body, **{"Content-Type": "application/json"})

    assert site.call.body == body.encode()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/steering/set", "/v1/completions/render"])
def test_other_routes_get_their_bodies_as_they_are(path: str) -> None:
    site = Site()

    site.send(path, "binary")

    assert site.call.headers["content-type"] == "application/msgpack"
    assert msgspec.msgpack.decode(site.call.body)["model"] == "m"


WRONG = {
    "no object": (msgspec.msgpack.encode([1]), MSGPACK, "body"),
    "bytes elsewhere": (msgspec.msgpack.encode({"prompt": b"x"}), MSGPACK, "prompt"),
    "a wrong vector": (
        msgspec.msgpack.encode({"steering_vectors": {"post_mlp": {**PACKED, "data": b"short"}}}),
        MSGPACK,
        "steering_vectors.post_mlp.data",
    ),
    "a short list": (
        json.dumps({"steering_vectors": {"post_mlp": {"1": VECTORS[0].tolist()[:-1]}}}),
        {"Content-Type": "application/json"},
        "steering_vectors.post_mlp.1",
    ),
}


@pytest.mark.parametrize(("body", "headers", "param"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_a_400_as_the_server_writes_it(body: Any, headers: dict[str, str], param: str) -> None:
    site = Site()

    response = site.post("/v1/completions", body, **headers)

    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", param, 400)
    assert error["message"].startswith(param)
    assert site.inner.calls == []


def test_an_engine_without_steering_says_how_to_start_it() -> None:
    response = Site(has_steering=False).send("/v1/completions", "binary")

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "steering_vectors"
    assert "--enable-steering" in response.json()["error"]["message"]


async def pieces(size: int) -> AsyncIterator[bytes]:
    for start in range(0, size, 10_000):
        yield b"x" * min(10_000, size - start)


@pytest.mark.parametrize("kind", ["application/json", "application/msgpack", "text/plain"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["declared", "chunked"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/steering/set", "/tokenize"])
@pytest.mark.parametrize("size", [MAX_BYTES + 1, 5 * MAX_BYTES])
def test_a_body_above_the_limit_is_a_413(path: str, is_chunked: bool, kind: str, size: int) -> None:
    site = Site()

    response = site.post(path, pieces(size) if is_chunked else b"x" * size, **{"Content-Type": kind})

    assert response.status_code == 413
    assert response.json()["error"]["code"] == 413
    assert str(MAX_BYTES) in response.json()["error"]["message"]
    assert site.inner.calls == []


@pytest.mark.parametrize("is_chunked", [False, True], ids=["declared", "chunked"])
def test_a_body_of_just_the_limit_passes(is_chunked: bool) -> None:
    site = Site()

    content = pieces(MAX_BYTES) if is_chunked else b"x" * MAX_BYTES
    assert site.post("/v1/completions", content, **{"Content-Type": "text/plain"}).status_code == 200
    assert len(site.call.body) == MAX_BYTES


def test_half_a_body_reaches_nobody() -> None:
    inner, sent = Inner(), []
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(bodies(inner)(scope, receive, send))

    assert inner.calls == sent == []


MULTIPART = {"Content-Type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_uploads_to_audio_routes_have_a_limit_of_their_own(path: str) -> None:
    site = Site()

    assert site.post(path, b"x" * MAX_UPLOAD, **MULTIPART).status_code == 200
    assert len(site.call.body) == MAX_UPLOAD
    assert site.post(path, b"x" * (MAX_UPLOAD + 1), **MULTIPART).status_code == 413
    assert len(site.inner.calls) == 1
    with pytest.raises(HTTPException) as caught:  # vLLM's server answers it
        site.post(path, pieces(MAX_UPLOAD + 1), **MULTIPART)
    assert (caught.value.status_code, len(site.inner.calls)) == (413, 1)


@pytest.mark.parametrize("is_chunked", [False, True], ids=["declared", "chunked"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/steering/set", "/tokenize", "/v1/of_a_later_vllm"])
def test_a_form_is_as_limited_as_any_body_elsewhere(path: str, is_chunked: bool) -> None:
    site, size = Site(), MAX_BYTES + 1

    assert site.post(path, pieces(size) if is_chunked else b"x" * size, **MULTIPART).status_code == 413
    assert site.inner.calls == []


def test_the_section_is_read() -> None:
    assert server_config(None) == server_config({"headgate": {}}) == ServerConfig()
    assert server_config({"headgate": {"server": {"max_body_bytes": 5}}}).max_body_bytes == 5
    assert parse_server({"max_body_bytes": 5, "max_buffered_bytes": 5}).max_buffered_bytes == 5


@pytest.mark.parametrize(
    "document", [{"max_body_bytes": 0}, {"max_body_bytes": "1"}, {"max_buffered_bytes": 1}, {"other": 1}, [1]], ids=repr
)
def test_a_wrong_section_is_refused(document: Any) -> None:
    with pytest.raises(ConfigError, match=r"\['server'\]"):
        parse_server(document)
