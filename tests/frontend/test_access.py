"""Keys of a file on vLLM's own application: roles, owners of modules, the audit, and a file that changes; no engine."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.capture.engine.access.access_key import digest_of
from headgate.capture.schema.errors import RequestError
from tests.fakes.saes import TinySae
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


def test_the_audit_has_the_connection_and_what_it_says_of_itself(started: Callable[..., Server]) -> None:
    """uvicorn puts what a client on this machine writes into the place of its address."""
    from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

    server = started()
    server.app, app = ProxyHeadersMiddleware(server.app), server.app

    server.ask("POST", SET, {"vectors": ONE}, **{"X-Forwarded-For": "203.0.113.7"})
    server.ask("POST", SET, {"vectors": ONE}, **{"X-Forwarded-For": "x" * 5000})
    server.app = app
    server.ask("POST", CLEAR, {})

    lines = ask(server, None, AUDIT).json()["entries"]
    assert [(line["address"], line["forwarded_for"]) for line in lines] == [
        ("127.0.0.1", "203.0.113.7"),
        ("127.0.0.1", "x" * 200),
        ("127.0.0.1", None),
    ]


def roles_in_the_table() -> dict[str, str]:
    """The routes that the documentation names, each with the role that it needs; empty for none."""
    text = (Path(__file__).parents[2] / "docs/security.md").read_text()
    rows = [line for line in text.partition("## Who may do what")[2].partition("##")[0].splitlines() if "`" in line]
    found: dict[str, str] = {}
    for row in (line for line in rows if line.startswith("| ")):
        _, what, needs, _ = row.split("|")
        role = re.search(r"the role `(\w+)`", needs)
        for route in re.findall(r"`((?:GET|POST) /v1/[^`]+)`", what):
            assert route not in found
            found[route] = role[1] if role else ""
    return found


def test_every_route_needs_the_role_that_the_documentation_says(started: Callable[..., Server], tmp_path: Path) -> None:
    roles = ("steer", "capture", "admin")
    server = started("--headgate-keys", write(tmp_path / "keys.json", *(entry(role, role) for role in roles)))
    described = roles_in_the_table()
    served = {
        f"{method.upper()} {path}"
        for path, methods in server.get("/openapi.json").json()["paths"].items()
        for method in methods
        if path.startswith(("/v1/steering", "/v1/capture", "/v1/patch_sweep"))
    }
    assert served == set(described)

    for route, needed in described.items():
        if route == "POST /v1/patch_sweep":
            continue  # it asks for the role where it looks for kept rows, after its body was read
        method, path = route.split()
        for who in (None, *roles):
            answer = server.ask(
                method,
                path.replace("{consumer}", "rows").replace("{name}", "none").replace("{tag}", "none"),
                {} if method == "POST" else None,
                **({} if who is None else {"X-Headgate-Key": f"key-of-{who}"}),
            )
            may = not needed or who in (needed, "admin")
            assert (answer.status_code == 403) is not may, (route, who, answer.text)


def test_a_client_without_a_key_is_told_no_paths_and_no_names_of_rules(
    started: Callable[..., Server], tmp_path: Path
) -> None:
    keys = write(tmp_path / "keys.json", entry("bob", "steer"), entry("root", "admin"))
    sae = TinySae(architecture="jumprelu", width=8).save(tmp_path / "saes" / "tiny")
    section = {"op_sites": {"post_mlp": [2]}, "sae_root": str(tmp_path / "saes")}
    server = started("--headgate-keys", keys, section=section)
    given = {"name": "tiny", "path": str(sae), "site": "2.post_mlp"}
    registered = ask(server, "root", "/v1/steering/saes/register", given)
    assert registered.status_code == 200, registered.text

    for who, told in ((None, "tiny"), ("bob", str(sae))):
        assert [one["source"] for one in ask(server, who, "/v1/steering/saes").json()["saes"]] == [told]
    ring = server.engine.engine_core.cores[b"0"].state.rules
    with pytest.raises(RequestError, match=r"unknown rule 'other'; GET /v1/steering/rules lists"):
        ring.add("r", ("other",), 4)
