"""Two tenants and an operator on a real server over HTTP, over a worker without a model: tags, quotas, rotation."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load, load_file

from headgate.capture.engine.access.access_key import digest_of
from tests.deadlines import patience
from tests.fakes.capturing import capturing
from tests.fakes.routes_server import FLAGS, PLUGINS
from tests.fakes.server import Server, serving

pytestmark = pytest.mark.engine

COMMAND = ["-c", "from headgate.capture.cli import main; main()", "serve"]
HIDDEN_BYTES = 2
"""Of one value in bfloat16."""


def entry(name: str, role: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": digest_of(f"key-of-{name}"), "roles": [role], **fields}


ALICE = entry("alice", "capture", tags=["alice-*"], default_tag="alice-runs", sites={"post_mlp": [3]})
BOB = entry("bob", "capture", tags=["bob-*"], consumers=["rows"])
CAROL = entry("carol", "capture", sites={"post_mlp": [3]})
DAVE = entry("dave", "capture")
FILES = "filesystem"
TWICE = entry("twice", "capture", limits={"max_requests_per_day": 2})
SMALL = entry("small", "capture", limits={"max_request_rows": 4})
KEYS = (ALICE, BOB, CAROL, DAVE, TWICE, SMALL, entry("root", "admin"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.write_text(json.dumps({"keys": KEYS}))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def server(model_dir: Path, keys: Path, root: Path) -> Iterator[Server]:
    at = FLAGS.index("--capture-sites")
    flags = [*FLAGS[:at], f"filesystem:root={root}", *FLAGS[at:], "--headgate-keys", str(keys)]
    with serving([*COMMAND, str(model_dir), *flags], **PLUGINS, HEADGATE_CAPTURE_KEYS="key-of-environment") as running:
        yield running


def ask(server: Server, who: str | None, path: str, **body: Any) -> httpx.Response:
    headers = {} if who is None else {"X-Headgate-Key": f"key-of-{who}"}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=patience(60))


def complete(server: Server, who: str | None, *layers: int, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "capture_wait": True}
    body |= {name: fields.pop(name) for name in ("stream",) if name in fields}
    wanted = {"hooks": {"post_mlp": list(layers or (3,))}, "positions": "all_generated", **fields}
    return ask(server, who, "/v1/completions", **body, capture={"rows": wanted})


def chat(server: Server, who: str, **fields: Any) -> httpx.Response:
    wanted = {"hooks": {"post_mlp": [3]}, **fields}
    messages = [{"role": "user", "content": "Hi"}]
    return ask(
        server, who, "/v1/chat/completions", model="tiny", messages=messages, max_tokens=2, capture={"rows": wanted}
    )


def respond(server: Server, who: str, **fields: Any) -> httpx.Response:
    wanted = {"hooks": {"post_mlp": [3]}, **fields}
    return ask(server, who, "/v1/responses", model="tiny", input="Hi", max_output_tokens=16, capture={"rows": wanted})


def refusal(response: httpx.Response) -> tuple[int, str | None]:
    error = response.json()["error"]
    assert error["code"] == response.status_code
    return response.status_code, error["param"]


def test_each_tenant_captures_under_its_own_tag_and_sites(server: Server) -> None:
    for send in (complete, chat, respond):
        assert send(server, "alice").status_code == 200
        assert send(server, "alice", tag="alice-2").status_code == 200
        assert send(server, "bob", tag="bob-1").status_code == 200
        assert refusal(send(server, "alice", tag="bob-1")) == (403, "capture.rows.tag")
        assert refusal(send(server, "bob")) == (403, "capture.rows.tag")
        assert send(server, "root", tag="anything").status_code == 200
    for stream in (False, True):
        assert refusal(complete(server, "alice", 3, 5, stream=stream)) == (403, "capture.rows.hooks.post_mlp")
    assert complete(server, "bob", 3, 5, tag="bob-1").status_code == 200
    assert complete(server, None).status_code == 403
    assert ask(server, None, "/v1/completions", model="tiny", prompt="Hi", max_tokens=2).status_code == 200


def test_a_tenant_is_told_what_its_key_allows(server: Server) -> None:
    def consumers(who: str) -> Any:
        return httpx.get(f"{server.url}/v1/capture/consumers", headers={"X-Headgate-Key": f"key-of-{who}"}).json()

    assert consumers("alice")["sites"] == {"post_mlp": [3]}
    assert [consumer["name"] for consumer in consumers("bob")["consumers"]] == ["rows"]
    assert consumers("root")["sites"] == {"post_mlp": [3, 5]}
    assert consumers("root")["count"] == 3
    assert [consumer["name"] for consumer in consumers("root")["consumers"] if consumer["is_browsable"]] == [FILES]


def test_a_used_up_quota_is_a_429_that_says_when_it_is_whole_again(server: Server) -> None:
    """Three prompts at once are one too many: then none of them counts."""
    assert refusal(complete(server, "twice", prompt=["one", "two", "three"])) == (429, "capture.rows")
    for send in (chat, respond):
        assert send(server, "twice").status_code == 200

    for send in (complete, chat, respond):
        refused = send(server, "twice")
        assert refusal(refused) == (429, "capture.rows")
        assert 0 < int(refused.headers["Retry-After"]) <= 86401
        message = refused.json()["error"]["message"]
        assert "'twice' has used 2 of its 2 requests today" in message
        assert "the count begins anew at 2" in message
    assert refusal(complete(server, "twice", stream=True)) == (429, "capture.rows")
    assert complete(server, "bob", tag="bob-1").status_code == 200


def test_the_size_of_a_call_is_limited_by_its_key(server: Server) -> None:
    assert complete(server, "small", prompt=["one", "two"]).status_code == 200
    assert refusal(complete(server, "small", positions="all", prompt=["one two three four five six", "two"])) == (
        400,
        "capture.rows",
    )


def read(server: Server, who: str, path: str) -> httpx.Response:
    headers = {"X-Headgate-Key": f"key-of-{who}"}
    return httpx.get(f"{server.url}/v1/capture/{FILES}/captures{path}", headers=headers, timeout=patience(60))


def test_clients_browse_their_own_captures_alone(server: Server, root: Path) -> None:
    """Carol and Dave may use the same tags; an administrator sees all, and Bob may not use the consumer.

    The worker without a model captures nothing, so the files are written here.
    """
    with capturing(root) as files:
        for who, name, layers in (("carol", "hers", [3]), ("dave", "his", [1, 3])):
            raw = {"hooks": {"post_mlp": layers}, "request_id": name}
            files.feed.whole(files.request(raw, client_id=name, owner=who))
    (root / "default" / "link.safetensors").symlink_to(root / "default" / "hers.safetensors")

    def listed(who: str, query: str = "") -> list[str]:
        return [capture["name"] for capture in read(server, who, query).json()["captures"]]

    assert listed("carol") == ["hers.safetensors"]
    assert listed("dave") == ["his.safetensors"]
    assert listed("root") == ["his.safetensors", "hers.safetensors"]
    assert listed("root", "?site=1.post_mlp&tag=default") == ["his.safetensors"]
    assert listed("alice") == []  # the tag is none of hers
    for who in ("bob", "environment", "nobody"):
        assert read(server, who, "").status_code == 403
    own = read(server, "dave", "/default/his.safetensors")
    assert own.json()["metadata"]["owner"] == "dave"
    assert own.json()["sites"] == {"post_mlp": [1, 3]}
    assert own.json()["tokens"] is None  # of another model than this server's
    sent = read(server, "dave", "/default/his.safetensors/rows")
    assert sent.headers["Content-Type"] == "application/octet-stream"
    rows, stored = load(sent.content), load_file(root / "default" / "his.safetensors")
    assert rows.keys() == stored.keys()
    assert all(torch.equal(rows[name], stored[name]) for name in stored)
    for path in ("/default/his.safetensors", "/default/link.safetensors", "/default/none"):
        for end in ("", "/rows"):
            assert read(server, "carol", path + end).status_code == 404
    for name in ("%2e%2e", "..%2f..%2fetc", ".tmp", "his.safetensors%00"):
        assert read(server, "root", f"/default/{name}/rows").status_code in (404, 405)
        assert read(server, "root", f"/{name}/his.safetensors/rows").status_code in (404, 405)
    assert refusal(read(server, "dave", "?colour=red")) == (400, "colour")
    assert refusal(read(server, "dave", "/default/his.safetensors/rows?sites=4.post_mlp")) == (400, "sites")


def test_keys_are_rotated_by_a_signal_and_the_server_goes_on(server: Server, keys: Path) -> None:
    """The new content has the old one's length, inode and time: nothing but the signal tells of it."""
    before = keys.stat()
    new = {**BOB, "sha256": digest_of("another")}
    keys.write_text(json.dumps({"keys": [new if key is BOB else key for key in KEYS]}))
    os.utime(keys, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert complete(server, "bob", tag="bob-1").status_code == 200

    os.kill(server.pid, signal.SIGHUP)
    # The next request is read after the signal: both are the event loop's, and the signal was there first.
    refused = complete(server, "bob", tag="bob-1")

    assert refused.status_code == 403
    assert complete(server, "alice").status_code == 200
    headers = {"X-Headgate-Key": "another"}
    assert httpx.get(f"{server.url}/v1/capture/consumers", headers=headers).status_code == 200
