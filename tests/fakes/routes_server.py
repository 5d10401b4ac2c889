"""The server that the tests of our routes run: its flags, and how they ask it."""

from __future__ import annotations

from typing import Any

import httpx

from tests.deadlines import patience
from tests.fakes.server import Server
from tests.fakes.steering_forms import ROW, listed

COMMAND = ["-m", "vllm.entrypoints.openai.api_server", "--model"]
FLAGS = [
    *("--served-model-name", "tiny", "--dtype", "bfloat16", "--load-format", "dummy", "--enforce-eager"),
    *("--worker-cls", "tests.fakes.noting_worker.NotingWorker", "--block-size", "32", "--max-model-len", "1024"),
    *("--distributed-executor-backend", "uni", "--max-num-seqs", "16"),
    *("--enable-steering", "--max-steering-slots", "150"),
    *("--capture-consumers", "rows:size=1", "everything", "--capture-sites", '{"post_mlp": [3, 5]}'),
]
PLUGINS = {"VLLM_PLUGINS": "headgate,fake_worker"}
VECTOR = listed(ROW)
ONE = {"post_mlp": {"14": VECTOR}}
SET, REGISTER, UNREGISTER = "/v1/steering/set", "/v1/steering/modules/register", "/v1/steering/modules/unregister"


def get(server: Server, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=patience(60))


def post(server: Server, path: str, content: bytes | str, kind: str | None = "application/json") -> httpx.Response:
    headers = {} if kind is None else {"content-type": kind}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=patience(60))


def complete(server: Server, **body: Any) -> httpx.Response:
    return server.post("/v1/completions", **{"model": "tiny", "prompt": "Hi", "max_tokens": 2, **body})
