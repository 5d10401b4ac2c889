"""Who may use our routes, and that several API servers and engine cores are one; real servers without a model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headgate.capture.engine.access.access_key import digest_of
from tests.fakes.routes_server import COMMAND, FLAGS, ONE, PLUGINS, REGISTER, SET, UNREGISTER, complete, get, post
from tests.fakes.server import Server, known_flags, serving

pytestmark = [pytest.mark.engine, pytest.mark.extended]

KEYED = [*FLAGS, "--api-key", "the-api-key", *known_flags("--enable-scale-out")]
ENVIRONMENT = {"HEADGATE_STEERING_KEYS": "old-steering-key,steering-key", "HEADGATE_CAPTURE_KEYS": "capture-key"}
API = {"Authorization": "Bearer the-api-key"}
CAPTURE = {"rows": {"hooks": {"post_mlp": [3]}}}


def ask(server: Server, path: str, body: dict[str, Any] | None, **headers: str) -> tuple[int, str]:
    headers = {**API, **headers}
    url = f"{server.url}{path}"
    answer = httpx.get(url, headers=headers) if body is None else httpx.post(url, json=body, headers=headers)
    return answer.status_code, answer.text


def test_two_servers_of_two_engine_cores_are_one(model_dir: Path, tmp_path: Path) -> None:
    """Keys, and that every API server sees what another one changed, in every engine core."""
    keys = write_keys(tmp_path / "keys.json", "tenant-key")
    files = ["--headgate-keys", str(keys), "--headgate-usage", str(tmp_path / "usage.sqlite")]
    flags = [*KEYED, "--api-server-count", "2", "--data-parallel-size", "2", *files]
    serve = ["-c", "from headgate.capture.cli import main; main()", "serve"]
    environment = {**PLUGINS, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO"}
    with serving([*serve, str(model_dir), *flags], num_servers=2, **environment) as server:
        log = "".join(server.log)
        check_api_key(server)
        check_steering_keys(server)
        check_capture_keys(server)
        check_agreement(server)
        check_metrics(server)
        check_quota(server)
        check_rotation(server, keys)

    for key in ("steering-key", "capture-key"):
        assert key not in log
    assert "consumer rows (in the worker, block when its queue of 256 MiB is full)" in log
    assert "what can be captured: post_mlp of 2 layers" in log
    assert "steering: room for 149 vectors at a time, 0 of them taken by named modules: none" in log
    assert "/v1/steering is served; 2 keys" in log
    assert "/v1/capture is served; 2 keys" in log


def write_keys(path: Path, key: str) -> Path:
    """Put a file with one tenant in the place of what is there."""
    limits = {"max_requests_per_day": 5}
    tenant = {"name": "tenant", "sha256": digest_of(key), "roles": ["capture"], "limits": limits}
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode({"keys": [tenant]}))
    new.chmod(0o600)
    return new.replace(path)


def check_quota(server: Server) -> None:
    """The servers count together, whichever of them takes a connection."""
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 1, "capture": CAPTURE}
    answers = [ask(server, "/v1/completions", body, **{"X-Headgate-Key": "tenant-key"})[0] for _ in range(8)]
    assert answers == [200] * 5 + [429] * 3


def check_rotation(server: Server, keys: Path) -> None:
    """Every server reads the new file, and the signal ends none of their processes."""
    write_keys(keys, "another-key")
    os.killpg(server.pid, signal.SIGHUP)
    for key, expected in (("tenant-key", 403), ("another-key", 200), ("capture-key", 200)):
        answers = {ask(server, "/v1/capture/consumers", None, **{"X-Headgate-Key": key})[0] for _ in range(6)}
        assert answers == {expected}
    assert ask(server, "/v1/steering", None)[0] == 200


def check_api_key(server: Server) -> None:
    for path in ("/v1/steering", "/v1/steering/layers", "/v1/steering/modules", "/v1/capture/consumers"):
        assert get(server, path).status_code == 401
        assert get(server, path, **{"X-Headgate-Key": "capture-key"}).status_code == 401
    for path in (SET, "/v1/steering/clear", REGISTER, UNREGISTER):
        assert post(server, path, b"{}").status_code == 401


def check_steering_keys(server: Server) -> None:
    body = {"vectors": ONE, "name": "calm"}
    for path in (SET, "/v1/steering/clear", REGISTER, UNREGISTER):
        for key in ({}, {"X-Headgate-Key": "capture-key"}, {"X-Headgate-Key": "the-api-key"}):
            status, text = ask(server, path, body, **key)
            assert (status, msgspec.json.decode(text)["error"]["code"]) == (403, 403)
            assert "role 'steer'" in text
    for key in ("old-steering-key", "steering-key"):
        assert ask(server, SET, {"vectors": ONE}, **{"X-Headgate-Key": key})[0] == 200
    assert ask(server, "/v1/steering/clear", {}, **{"X-Headgate-Key": "steering-key"})[0] == 200
    assert ask(server, "/v1/steering", None)[0] == 200
    inline = {"model": "tiny", "prompt": "Hi", "max_tokens": 1, "steering_vectors": ONE}
    assert ask(server, "/v1/completions", inline)[0] == 200


def check_capture_keys(server: Server) -> None:
    bodies = {
        "/v1/capture/consumers": None,
        "/v1/completions": {"model": "tiny", "prompt": "Hi", "max_tokens": 1, "capture": CAPTURE},
        "/v1/chat/completions": {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 1,
            "capture": CAPTURE,
        },
        "/invocations": {"model": "tiny", "prompt": "Hi", "max_tokens": 1, "capture": CAPTURE},
        "/inference/v1/generate": {
            "model": "tiny",
            "token_ids": [5, 6],
            "sampling_params": {"max_tokens": 1, "extra_args": {"capture": CAPTURE}},
        },
    }
    for path, body in bodies.items():
        status, text = ask(server, path, body, **{"X-Headgate-Key": "steering-key"})
        assert status == 403, f"{path}: {text}"
        assert "role 'capture'" in text
        status, text = ask(server, path, body, **{"X-Headgate-Key": "capture-key"})
        assert status == 200, f"{path}: {text}"
    plain = {"model": "tiny", "prompt": "Hi", "max_tokens": 1}
    assert ask(server, "/v1/completions", plain)[0] == 200


def check_agreement(server: Server) -> None:
    """Each request is a new connection, which one of the two takes."""
    key = {"X-Headgate-Key": "steering-key"}
    for number in range(8):
        name = f"module-{number}"
        assert ask(server, REGISTER, {"name": name, "vectors": ONE}, **key)[0] == 200
        named = {"model": "tiny", "prompt": "Hi", "max_tokens": 1, "steering_name": name}
        assert [ask(server, "/v1/completions", named)[0] for _ in range(6)] == [200] * 6
        assert ask(server, UNREGISTER, {"name": name}, **key)[0] == 200
        assert [ask(server, "/v1/completions", named)[0] for _ in range(6)] == [400] * 6
    assert ask(server, SET, {"vectors": ONE}, **key)[0] == 200
    seen = {ask(server, "/v1/steering", None)[1] for _ in range(8)}
    assert len(seen) == 1
    status = msgspec.json.decode(seen.pop())
    assert status["is_consistent"]
    assert [slots["reserved"] for slots in status["slots"]] == [1, 1]


def check_metrics(server: Server) -> None:
    """Both servers say the same, and nothing twice."""
    for _ in range(6):
        page = get(server, "/metrics").text
        assert page.count("# TYPE headgate_steering_slots gauge") == 1
        for engine in ("0", "1"):
            assert page.count(f'headgate_steering_slots{{engine="{engine}"}} 149.0') == 1
        assert "vllm:num_requests_running" in page


def test_beyond_its_own_machine_a_server_without_keys_is_closed_and_says_so(model_dir: Path) -> None:
    with serving([*COMMAND, str(model_dir), *FLAGS], host="0.0.0.0", **PLUGINS) as server:
        for path, variable in ((SET, "HEADGATE_STEERING_KEYS"), (REGISTER, "HEADGATE_STEERING_KEYS")):
            answer = server.post(path, name="a", vectors=ONE)
            assert answer.status_code == 403
            assert f"the operator sets {variable}" in answer.json()["error"]["message"]
        assert get(server, "/v1/steering").status_code == 200
        assert get(server, "/v1/capture/consumers").status_code == 403
        refused = complete(server, capture=CAPTURE)
        assert (refused.status_code, "HEADGATE_CAPTURE_KEYS" in refused.text) == (403, True)
        assert complete(server, steering_vectors=ONE).status_code == 200


def test_without_vllm_plugins_the_server_says_what_to_set(model_dir: Path) -> None:
    with serving([*COMMAND, str(model_dir), *FLAGS]) as server:
        answers = [get(server, "/v1/steering"), server.post(SET, vectors=ONE), get(server, "/v1/capture/consumers")]
        assert [answer.status_code for answer in answers] == [404] * 3
        assert all("VLLM_PLUGINS=headgate" in answer.json()["error"]["message"] for answer in answers)
        binary = post(server, "/v1/completions", msgspec.msgpack.encode({"model": "tiny"}), "application/msgpack")
        assert (binary.status_code, "VLLM_PLUGINS=headgate" in binary.text) == (415, True)
        assert complete(server, capture=CAPTURE, steering_vectors=ONE).status_code == 200
        assert get(server, "/v1/models").status_code == 200
