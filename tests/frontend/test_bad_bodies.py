"""Whatever is wrong with a body is a 400 that names the field, before a stream starts; and the server goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.steering.client import Client
from tests.fakes.bad_bodies import CAPTURES, HOOKS, ROUTES, STEERS, VECTOR
from tests.fakes.server import Server, serving

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
    with serving([*COMMAND, str(model_dir), *FLAGS]) as running, Client(running.url) as client:
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
    response = httpx.post(f"{server.url}{path}", content=content, headers={"Content-Type": kind}, timeout=60)

    assert_refused(response, "body")


@pytest.mark.parametrize("kind", ["", "text/plain", "multipart/form-data", "application/x-python-pickle"])
def test_other_kinds_of_body_are_415(server: Server, kind: str) -> None:
    response = httpx.post(f"{server.url}/v1/steering/set", content=b"{}", headers={"Content-Type": kind}, timeout=60)

    assert response.status_code == 415


@pytest.mark.parametrize("name", ["headgate", "capture", "steering_vectors"])
def test_nothing_can_be_brought_along_where_only_we_write(server: Server, name: str) -> None:
    response = send(server, "/v1/completions", vllm_xargs={name: "x"})

    assert response.status_code == 400
    assert response.json()["error"]["param"] in (f"vllm_xargs.{name}", f"extra_args.{name}", name)


def test_the_server_goes_on(server: Server) -> None:
    answer = send(
        server,
        "/v1/completions",
        capture={"rows": HOOKS},
        capture_wait=True,
        steering_vectors={"post_mlp": {3: VECTOR}},
    )

    assert answer.json()["capture_results"]["rows"]["status"] == "ok"
