"""Keys of a file on vLLM's own application: roles, owners of modules, the audit, and a file that changes; no engine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.capture.engine.access.access_key import digest_of
from tests.frontend import test_app
from tests.frontend.test_app import CLEAR, ONE, REGISTER, SET, UNREGISTER, VECTOR, Server

pytestmark = pytest.mark.engine

AUDIT = "/v1/steering/audit"
OTHER = {"post_mlp": {"1": VECTOR}}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    for part in ("STEERING", "CAPTURE", "ADMIN"):
        monkeypatch.delenv(f"HEADGATE_{part}_KEYS", raising=False)
    return test_app.starter(monkeypatch)


def write(path: Path, *entries: dict[str, Any]) -> str:
    """Put a file of keys in the place of what is there, as editors and secret stores do."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"keys": entries}))
    new.chmod(0o600)
    new.replace(path)
    return str(path)


def entry(name: str, *roles: str) -> dict[str, Any]:
    return {"name": name, "sha256": digest_of(f"key-of-{name}"), "roles": roles}


def ask(server: Server, who: str | None, path: str, body: Any = None) -> httpx.Response:
    headers = {} if who is None else {"X-Headgate-Key": f"key-of-{who}"}
    return server.ask("GET" if body is None else "POST", path, body, **headers)


def test_each_role_does_what_is_its_own_even_on_the_same_machine(
    started: Callable[..., Server], tmp_path: Path
) -> None:
    entries = [entry("alice", "capture"), entry("bob", "steer"), entry("root", "admin")]
    server = started("--headgate-keys", write(tmp_path / "keys.json", *entries))
    changes = {SET: {"vectors": ONE}, REGISTER: {"name": "a", "vectors": ONE}, CLEAR: {}, UNREGISTER: {"name": "a"}}
    captures = "/v1/capture/consumers"  # a 404 here: this server captures nothing

    for who, steers, captured, reads in (
        (None, 403, 403, 403),
        ("nobody", 403, 403, 403),
        ("alice", 403, 404, 403),
        ("bob", 200, 403, 403),
        ("root", 200, 404, 200),
    ):
        assert [ask(server, who, path, body).status_code for path, body in changes.items()] == [steers] * 4
        assert ask(server, who, captures).status_code == captured
        assert ask(server, who, AUDIT).status_code == reads
        assert ask(server, who, "/v1/steering").status_code == 200
    error = ask(server, "alice", SET, {"vectors": ONE}).json()["error"]
    assert error == {
        "message": "this needs a key with the role 'steer'; 'alice' has capture",
        "type": "Forbidden",
        "param": None,
        "code": 403,
    }


def test_a_module_is_its_own_clients_to_change_and_everybodys_to_use(
    started: Callable[..., Server], tmp_path: Path
) -> None:
    entries = [entry("alice", "steer"), entry("bob", "steer"), entry("root", "admin")]
    path = write(tmp_path / "keys.json", *entries)
    server = started("--headgate-keys", path, HEADGATE_STEERING_KEYS="key-of-environment")
    assert ask(server, "alice", REGISTER, {"name": "calm", "vectors": ONE}).status_code == 200

    for path, body in ((REGISTER, {"name": "calm", "vectors": OTHER}), (UNREGISTER, {"name": "calm"})):
        refused = ask(server, "bob", path, body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "name")
        assert "use another name" in refused.json()["error"]["message"]
    assert ask(server, "alice", REGISTER, {"name": "calm", "vectors": OTHER}).status_code == 200
    assert ask(server, "bob", "/v1/steering/modules").json()["modules"] == ["calm"]
    assert ask(server, "bob", REGISTER, {"name": "joy", "vectors": ONE}).status_code == 200

    assert ask(server, "root", REGISTER, {"name": "calm", "vectors": ONE}).status_code == 200
    assert ask(server, "alice", UNREGISTER, {"name": "calm"}).status_code == 403
    assert ask(server, "environment", UNREGISTER, {"name": "calm"}).status_code == 200
    assert ask(server, "bob", REGISTER, {"name": "calm", "vectors": ONE}).status_code == 200


def test_what_one_engine_core_refuses_leaves_the_module_its_owner(
    started: Callable[..., Server], tmp_path: Path
) -> None:
    entries = [entry("alice", "steer"), entry("bob", "steer"), entry("root", "admin")]
    server = started("--headgate-keys", write(tmp_path / "keys.json", *entries))
    ask(server, "alice", REGISTER, {"name": "calm", "vectors": ONE})
    server.engine.engine_core.services[b"1"].failing = "keep_module"

    assert ask(server, "root", REGISTER, {"name": "calm", "vectors": OTHER}).status_code == 400

    assert ask(server, "bob", UNREGISTER, {"name": "calm"}).status_code == 403
    last = ask(server, "root", AUDIT).json()["entries"][-2:]
    assert [(line["key"], line["action"], line["is_undo"]) for line in last] == [
        ("root", "register", False),
        ("root", "register", True),
    ]
    assert ask(server, "alice", UNREGISTER, {"name": "calm"}).status_code == 200


def test_every_change_leaves_a_line(started: Callable[..., Server], tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.json", entry("alice", "steer"), entry("root", "admin"))
    server = started("--headgate-keys", keys, audit_file=str(tmp_path / "audit.jsonl"))

    registered = ask(server, "alice", REGISTER, {"name": "calm", "vectors": ONE}).json()
    ask(server, "alice", SET, {"vectors": ONE, "decode_vectors": OTHER})
    shared = ask(server, "alice", "/v1/steering").json()["global"]
    ask(server, "alice", UNREGISTER, {"name": "unknown"})
    ask(server, "alice", SET, {"vectors": {"nonsense": {}}})
    ask(server, "root", UNREGISTER, {"name": "calm"})
    ask(server, "root", CLEAR, {})

    described = server.get("/openapi.json").json()["paths"][AUDIT]["get"]["responses"]["200"]
    content = described["content"]["application/json"]
    answer = ask(server, "root", AUDIT).json()
    for value in (answer, content["example"]):
        test_app.conforms(value, content["schema"], AUDIT)
    lines = answer["entries"]
    assert [(line["key"], line["action"], line["name"]) for line in lines] == [
        ("alice", "register", "calm"),
        ("alice", "set", None),
        ("root", "unregister", "calm"),
        ("root", "clear", None),
    ]
    hashes = [(line["prefill"], line["decode"]) for line in lines]
    module = (registered["prefill"]["hash"], registered["decode"]["hash"])
    assert hashes == [module, (shared["prefill"]["hash"], shared["decode"]["hash"]), module, (None, None)]
    assert all(line["time"].endswith("Z") and line["address"] == "127.0.0.1" for line in lines)
    written = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line for line in written if line["engine"] == 0] == lines
    assert len(written) == 2 * len(lines)  # of both engine cores
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_without_keys_the_own_machine_reads_the_audit_alone(started: Callable[..., Server]) -> None:
    server = started()
    ask(server, None, SET, {"vectors": ONE})
    (line,) = ask(server, None, AUDIT).json()["entries"]
    assert (line["key"], line["action"]) == (None, "set")

    refused = ask(started("--host", "0.0.0.0"), None, AUDIT)
    assert (refused.status_code, "HEADGATE_ADMIN_KEYS" in refused.text) == (403, True)


def test_a_changed_file_counts_at_once_and_a_broken_one_not_at_all(
    started: Callable[..., Server], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    server = started("--headgate-keys", write(path, entry("alice", "steer")))
    assert ask(server, "alice", CLEAR, {}).status_code == 200

    write(path, entry("bob", "steer"))
    assert [ask(server, who, CLEAR, {}).status_code for who in ("alice", "bob")] == [403, 200]

    write(path, entry("alice", "conductor"))
    assert [ask(server, who, CLEAR, {}).status_code for who in ("alice", "bob")] == [403, 200]
    assert "unknown role 'conductor'" in caplog.text
    path.chmod(0o644)
    assert ask(server, "bob", CLEAR, {}).status_code == 200


def test_a_server_does_not_start_with_a_file_that_everybody_reads(
    started: Callable[..., Server], tmp_path: Path
) -> None:
    path = write(tmp_path / "keys.json", entry("alice", "steer"))
    os.chmod(path, 0o644)

    with pytest.raises(ValueError, match=f"chmod 600 {path}"):
        started("--headgate-keys", path)


def test_the_signal_keeps_its_effect_where_no_file_is_named(started: Callable[..., Server]) -> None:
    before = signal.getsignal(signal.SIGHUP)
    started()

    assert signal.getsignal(signal.SIGHUP) == before
