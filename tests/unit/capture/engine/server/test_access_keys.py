"""Keys: who may pass, in every way that a key can be sent."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

import pytest

from headgate.capture.engine.server import access_keys, openai_routes
from headgate.capture.engine.server.access_keys import Keys, access_of, is_local, keys_of
from headgate.capture.schema.errors import ForbiddenError

KEYS = Keys("HEADGATE_X_KEYS", ["old-key", "new-key"])


@pytest.fixture(autouse=True)
def read_anew() -> Any:
    keys_of.cache_clear()
    yield
    keys_of.cache_clear()


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
@pytest.mark.parametrize("local", [True, False])
def test_each_key_lets_a_request_pass(headers: dict[str, str], local: bool) -> None:
    KEYS.check(headers, is_local=local)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-headgate-key": ""},
        {"x-headgate-key": "old-key,new-key"},
        {"x-headgate-key": "OLD-KEY"},
        {"x-headgate-key": "old-kez"},
        {"x-headgate-key": "schl\u00fcssel"},
        {"authorization": "old-key"},
        {"authorization": "Basic old-key"},
        {"authorization": "Bearer "},
    ],
)
def test_without_one_it_does_not_pass_even_from_the_same_machine(headers: dict[str, str]) -> None:
    with pytest.raises(ForbiddenError, match="HEADGATE_X_KEYS") as raised:
        KEYS.check(headers, is_local=True)

    assert "old-key" not in str(raised.value)
    assert "new-key" not in str(raised.value)


def test_without_configured_keys_the_own_machine_is_let_in_alone() -> None:
    none = Keys("HEADGATE_X_KEYS", [])

    none.check({}, is_local=True)
    with pytest.raises(ForbiddenError, match="the operator sets HEADGATE_X_KEYS"):
        none.check({"x-headgate-key": ""}, is_local=False)


def test_all_keys_are_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = access_keys.secrets.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return real(one, other)

    monkeypatch.setattr(access_keys.secrets, "compare_digest", compare)
    KEYS.check({"x-headgate-key": "old-key"}, is_local=False)

    assert len(compared) == 2


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_STEERING_KEYS", " a ,b,,")

    assert len(keys_of("steering")) == 2
    assert len(keys_of("capture")) == 0
    assert "a" not in repr(keys_of("steering")).replace("HEADGATE_STEERING_KEYS", "").replace("<2 keys of >", "")
    keys_of("steering").check({"x-headgate-key": "b"}, is_local=False)


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


def test_the_log_says_who_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_STEERING_KEYS", "a,b")
    everywhere, here = Namespace(host="0.0.0.0", uds=None), Namespace(host="127.0.0.1", uds=None)

    assert access_of("steering", everywhere) == "2 keys"
    assert access_of("capture", everywhere) == "closed, HEADGATE_CAPTURE_KEYS is not set"
    assert access_of("capture", here) == "open, on this machine alone"


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
