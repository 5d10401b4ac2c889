"""Keys of clients on vLLM's server: the headers that carry them, and where none is needed."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.engine.access.access_key import digest_of
from headgate.capture.engine.server import openai_routes
from headgate.capture.engine.server.access_keys import HttpClient, is_local, require_role
from headgate.capture.engine.setup.cli_flags import read_server_args
from headgate.capture.schema.errors import UnknownKeyError


def request_of(headers: dict[str, str], host: str = "127.0.0.1") -> Any:
    app = Namespace(state=Namespace(args=Namespace(host=host, uds=None)))
    return Namespace(app=app, headers=headers)


def client_of(headers: dict[str, str], **args: Any) -> HttpClient:
    app = Namespace(state=Namespace(args=Namespace(host="127.0.0.1", uds=None, **args)))
    return HttpClient({"app": app, "headers": [(name.encode(), value.encode()) for name, value in headers.items()]})


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

    caller = client_of(headers).caller
    assert caller is not None
    assert caller.keys == (found,)
    assert client_of(headers).owner("field") == caller.name


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
    assert client_of(headers).caller is None


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


@pytest.mark.parametrize("headers", [{}, {"x-headgate-key": "made-up"}])
def test_without_keys_other_machines_are_not(headers: dict[str, str]) -> None:
    from fastapi import HTTPException

    with pytest.raises(HTTPException, match=r"beyond its own machine .* the operator sets HEADGATE_STEERING_KEYS"):
        require_role("steer", request_of(headers, "0.0.0.0"))


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


def write_keys(path: Path, **entries: Any) -> str:
    keys = [{"name": name, "sha256": digest_of(name), **entry} for name, entry in entries.items()]
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)
    return str(path)


def test_a_client_is_the_same_one_whatever_it_asks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its name must not depend on the role that a request needs: its conversations and kept rows go by it."""
    monkeypatch.setenv("HEADGATE_STEERING_KEYS", "both,steers")
    monkeypatch.setenv("HEADGATE_CAPTURE_KEYS", "captures,both")

    both = client_of({"x-headgate-key": "both"})
    assert (both.owner("field"), both.require_role("steer"), both.require_role("capture")) == (
        "env.capture.2",
        both.caller.keys[1],
        both.caller.keys[0],
    )
    two = client_of({"x-headgate-key": "steers", "authorization": "Bearer captures"})
    assert two.owner("field") == "env.steer.2"
    assert two.caller.key_with("capture").name == "env.capture.1"
    assert two.caller.key_with("admin") is None


@pytest.mark.parametrize(
    ("headers", "api_key", "why"),
    [
        ({"x-headgate-key": "wrong"}, None, "X-Headgate-Key is not known"),
        ({"x-headgate-key": "wrong", "authorization": "Bearer served"}, ["served"], "X-Headgate-Key is not known"),
        ({"authorization": "Bearer wrong"}, None, "Authorization is not known"),
        ({"x-headgate-key": "old"}, None, r"X-Headgate-Key \('old'\) has expired"),
        ({"authorization": "Bearer served"}, ["served"], None),
        ({"authorization": "Basic wrong"}, None, None),
        ({"x-headgate-key": ""}, None, None),
        ({}, None, None),
    ],
)
def test_who_has_shown_a_key_that_is_none_owns_nothing(
    tmp_path: Path, headers: dict[str, str], api_key: list[str] | None, why: str | None
) -> None:
    entries = {"alice": {"roles": ["capture"]}, "old": {"roles": ["capture"], "expires": "2020-01-01T00:00:00Z"}}
    config = {"headgate": {"server": {"keys_file": write_keys(tmp_path / "keys.json", **entries)}}}
    client = client_of(headers, api_key=api_key, additional_config=config)

    if why is None:
        assert client.owner("field") is None
        return
    with pytest.raises(UnknownKeyError, match=f"field: would belong .* {why}") as raised:
        client.owner("field")
    assert raised.value.status == 401


def test_where_nobody_has_a_key_what_is_shown_says_nothing() -> None:
    assert client_of({"x-headgate-key": "any", "authorization": "Bearer EMPTY"}).owner("field") is None


def test_who_asks_is_found_once_and_only_if_somebody_wants_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_STEERING_KEYS", "k")
    scope = {"headers": [(b"x-headgate-key", b"k")]}
    client = HttpClient(scope)  # no application: nothing was looked for
    scope["app"] = Namespace(state=Namespace(args=Namespace(host="127.0.0.1", uds=None)))
    first = client.caller
    scope["headers"] = []

    assert client.caller is first
    assert client.owner("field") == "env.steer.1"
