"""Whose a conversation is: over HTTP, whatever the route, the body's type and length, and what else is asked for.

The worker notes what reaches it, and so under whose name the engine core remembers what a gate has latched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headgate.capture.engine.access.access_key import digest_of
from tests.fakes.routes_server import FLAGS, PLUGINS
from tests.fakes.server import Server, serving
from tests.fakes.steering_forms import ROW
from tests.frontend.test_tenants import COMMAND

pytestmark = pytest.mark.engine

LONG = 80 << 10
"""Bytes of a body that is read on a thread."""
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
}
FORMS = ("short", "long", "msgpack")
GATE = {
    "when": {"probe": {"at": "14.post_mlp", "weight": ROW.tolist()}, "above": 0.5},
    "then": {"vectors": {"post_mlp": {"14": ROW.tolist()}}},
    "scope": "rest_of_conversation",
    "conversation_id": "ticket-1",
}
CAPTURE = {"rows": {"hooks": {"post_mlp": [3]}}}


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    roles = {"alice": ["capture", "steer"], "bob": ["capture"]}
    keys = [{"name": name, "sha256": digest_of(f"key-of-{name}"), "roles": has} for name, has in roles.items()]
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)
    flags = ["--steering-op-sites", '{"post_mlp": [14]}', "--headgate-keys", str(path)]
    with serving([*COMMAND, str(model_dir), *FLAGS, *flags], **PLUGINS, VLLM_SERVER_DEV_MODE="1") as running:
        yield running


def ask(
    server: Server, who: str | None, path: str, form: str, *, bearer: bool = False, **fields: Any
) -> httpx.Response:
    body = {"model": "tiny", **ROUTES[path], "steering_gates": [GATE], **fields}
    if form == "long":
        body["user"] = "x" * LONG
    content = msgspec.msgpack.encode(body) if form == "msgpack" else json.dumps(body).encode()
    headers = {"content-type": "application/msgpack" if form == "msgpack" else "application/json"}
    if who is not None:
        headers |= {"Authorization": f"Bearer key-of-{who}"} if bearer else {"X-Headgate-Key": f"key-of-{who}"}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=60)


def owners(server: Server) -> list[str | None]:
    """Under whose names the conversations of the requests since the last call are kept."""
    (found,) = server.post("/collective_rpc", method="take_owners").json()["results"]
    return list(found)


@pytest.mark.parametrize("captures", [False, True], ids=["plain", "captures"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", ROUTES)
def test_a_conversation_is_its_clients(server: Server, path: str, form: str, *, stream: bool, captures: bool) -> None:
    owners(server)
    fields: dict[str, Any] = {"stream": stream, **({"capture": CAPTURE} if captures else {})}
    clients = ["alice", "bob", *([] if captures else [None])]

    for turn in range(2):
        for who in clients:
            answer = ask(server, who, path, form, bearer=turn == 1, **fields)
            assert answer.status_code == 200, answer.text

    assert owners(server) == 2 * clients


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", ROUTES)
def test_a_key_that_is_none_beside_a_conversation_is_a_401(
    server: Server, path: str, form: str, *, stream: bool
) -> None:
    owners(server)
    for bearer in (False, True):
        refused = ask(server, "mallory", path, form, bearer=bearer, stream=stream)

        assert refused.status_code == 401, refused.text
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == (401, "steering_gates[0].conversation_id")
    own = [{**GATE, "scope": "rest_of_request", "conversation_id": None}]
    assert ask(server, "mallory", path, form, bearer=True, steering_gates=own).status_code == 200
    assert owners(server) == [None]
