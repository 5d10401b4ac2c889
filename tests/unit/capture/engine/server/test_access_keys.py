"""Keys of clients on vLLM's server: the headers that carry them, and where none is needed."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

import pytest

from headgate.capture.engine.access.caller import current_caller, set_caller
from headgate.capture.engine.server import openai_routes
from headgate.capture.engine.server.access_keys import is_local, require_role
from headgate.capture.engine.setup.server_args import read_server_args


@pytest.fixture(autouse=True)
def no_caller() -> Any:
    set_caller(None)
    yield
    set_caller(None)


def request_of(headers: dict[str, str], host: str = "127.0.0.1") -> Any:
    app = Namespace(state=Namespace(args=Namespace(host=host, uds=None)))
    return Namespace(app=app, headers=headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-headgate-key": "old-key"},
        {"x-headgate-key": "new-key"},
        {"authorization": "Bearer new-key"},
        {"authorization": "bearer  old-key "},
        {"authorization": "Bearer the-api-key", "x-headgate-key": "old-key"},
        {"authorization": "Bearer old-key", "x-headgate-key": "wrong"},
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_each_key_lets_a_request_pass(monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], host: str) -> None:
    monkeypatch.setenv("HEADGATE_STEERING_KEYS", "old-key,new-key")

    found = require_role("steer", request_of(headers, host))

    caller = current_caller()
    assert caller is not None
    assert caller.key is found


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-headgate-key": ""},
        {"x-headgate-key": "old-key,new-key"},
        {"authorization": "old-key"},
        {"authorization": "Basic old-key"},
        {"authorization": "Bearer "},
    ],
)
def test_without_one_the_answer_is_403(monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]) -> None:
    from fastapi import HTTPException

    monkeypatch.setenv("HEADGATE_STEERING_KEYS", "old-key,new-key")

    with pytest.raises(HTTPException, match="HEADGATE_STEERING_KEYS") as raised:
        require_role("steer", request_of(headers))
    assert raised.value.status_code == 403
    assert current_caller() is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:8000"},
        {"host": "127.0.0.1"},
        {"host": "[::1]:8000", "origin": "http://[::1]:8000"},
        {"host": "LOCALHOST", "origin": "http://localhost:3000"},
    ],
)
def test_without_keys_the_own_machine_is_let_in(headers: dict[str, str]) -> None:
    assert require_role("capture", request_of(headers)) is None


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"host": "evil.example:8000"}, "Host"),  # a name that means 127.0.0.1 for a moment
        ({"host": "localhost.evil.example"}, "Host"),
        ({"host": "127.0.0.1.evil.example"}, "Host"),
        ({"host": ""}, "Host"),
        ({"host": "[::1"}, "Host"),
        ({"host": "localhost@evil.example"}, "Host"),
        ({"host": "localhost", "origin": "https://evil.example"}, "Origin"),
        ({"host": "localhost", "origin": "null"}, "Origin"),
        ({"origin": "http://localhost.evil.example"}, "Origin"),
    ],
)
def test_without_keys_web_pages_of_other_sites_are_not(headers: dict[str, str], named: str) -> None:
    from fastapi import HTTPException

    with pytest.raises(HTTPException, match=rf"header {named} names .* the operator sets HEADGATE_STEERING_KEYS"):
        require_role("steer", request_of(headers))


def test_with_a_key_every_host_and_site_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_STEERING_KEYS", "k")
    headers = {"host": "models.example", "origin": "https://lab.example", "x-headgate-key": "k"}

    assert require_role("steer", request_of(headers)) is not None


def test_a_unix_socket_is_out_of_reach_for_web_pages() -> None:
    request = request_of({"host": "anything"})
    request.app.state.args.uds = "/run/vllm.sock"

    assert require_role("steer", request) is None


@pytest.mark.parametrize(
    ("host", "uds", "expected"),
    [
        ("127.0.0.1", None, True),
        ("127.8.8.8", None, True),
        ("::1", None, True),
        ("[::1]", None, True),
        ("localhost", None, True),
        (None, "/run/vllm.sock", True),
        (None, None, False),
        ("", None, False),
        ("0.0.0.0", None, False),
        ("::", None, False),
        ("10.0.0.1", None, False),
        ("localhost.example.org", None, False),
    ],
)
def test_where_a_server_listens(host: str | None, uds: str | None, expected: bool) -> None:
    assert is_local(read_server_args(Namespace(host=host, uds=uds))) is expected


@pytest.mark.parametrize(
    ("extra", "key", "status"),
    [
        ({"capture": {"files": {}}}, None, 403),
        ({"capture_wait": True}, None, 403),
        ({"capture": {"files": {}}}, "k", None),
        ({"steering_name": "calm"}, None, None),
        (None, None, None),
    ],
)
def test_clients_who_write_sampling_params_need_the_key_too(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any] | None, key: str | None, status: int | None
) -> None:
    from fastapi import HTTPException

    async def serve(self: Any, request: Any, raw_request: Any = None) -> str:
        return "served"

    monkeypatch.setenv("HEADGATE_CAPTURE_KEYS", "k")
    app = Namespace(state=Namespace(args=Namespace(host="127.0.0.1", uds=None)))
    raw = Namespace(app=app, headers={} if key is None else {"x-headgate-key": key})
    wrapped = openai_routes.serve_tokens(serve)
    request = Namespace(sampling_params=Namespace(extra_args=extra))

    if status is None:
        assert asyncio.run(wrapped(None, request, raw)) == "served"
        return
    with pytest.raises(HTTPException, match="HEADGATE_CAPTURE_KEYS") as raised:
        asyncio.run(wrapped(None, request, raw_request=raw))
    assert raised.value.status_code == status
