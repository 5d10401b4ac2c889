"""Keys of clients on vLLM's server: the headers that carry them, and where none is needed."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

import pytest

from headgate.capture.engine.access.caller import current_caller, set_caller
from headgate.capture.engine.server import openai_routes
from headgate.capture.engine.server.access_keys import is_local, require_role


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
    assert is_local(Namespace(host=host, uds=uds)) is expected


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
