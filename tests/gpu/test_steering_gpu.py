"""Steering takes effect in replayed CUDA graphs, equals the eager kernel, and leaves batch-mates alone.

One process per engine. The eager run gets the tokens that the graph run generated as prompts, so that both compute the
same positions from the same tokens: what decode graphs computed is compared with an eager prefill. Needs a folder with
a model of Gemma-3-4B's sizes: GPU_TEST_MODEL, random weights will do.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import MODEL
from steering_runs import HIDDEN, LAYERS, STRENGTH, is_steered

RUNS = Path(__file__).with_name("steering_runs.py")
MIN_COSINE = 0.999


class Run:
    """One engine in `mode`, in a process of its own, from construction on."""

    def __init__(self, mode: str, folder: Path, **environment: str) -> None:
        self._out, self._log = folder / f"{mode}.pt", folder / f"{mode}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(RUNS), mode, str(self._out)],
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def result(self) -> dict[str, Any]:
        """What it saw."""
        assert self._process.wait(400) == 0, self._log.read_text()[-6000:]
        print(self._log.read_text().strip().splitlines()[-1])
        loaded: dict[str, Any] = torch.load(self._out, weights_only=False)
        return loaded


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What stock vLLM, steering under graphs, and steering in eager mode saw."""
    folder = tmp_path_factory.mktemp("runs")
    stock, graphs = Run("stock", folder), Run("graphs", folder)
    seen = {"graphs": graphs.result()}
    eager = Run("eager", folder, GPU_TEST_REPLAY=str(folder / "graphs.pt"))
    return {**seen, "stock": stock.result(), "eager": eager.result()}


def tokens(requests: list[dict[str, Any]]) -> list[list[int]]:
    return [request["tokens"] for request in requests]


def test_idle_steering_generates_stocks_tokens(runs):
    assert tokens(runs["graphs"]["plain"]) == tokens(runs["stock"]["plain"])


def test_batch_mates_of_steered_requests_generate_stocks_tokens(runs):
    stock, mixed = tokens(runs["stock"]["plain"]), tokens(runs["graphs"]["steered"])
    mates = [index for index in range(len(stock)) if not is_steered(index)]

    assert len(mates) > 10
    assert [mixed[index] for index in mates] == [stock[index] for index in mates]


def test_steered_requests_generate_something_else(runs):
    stock, mixed = tokens(runs["stock"]["plain"]), tokens(runs["graphs"]["steered"])
    steered = [index for index in range(len(stock)) if is_steered(index)]

    assert sum(mixed[index] != stock[index] for index in steered) > 0.9 * len(steered)


def test_rows_under_graphs_equal_those_of_the_eager_kernel(runs):
    pairs = list(zip(runs["graphs"]["steered"], runs["eager"]["steered"], strict=True))
    for replayed, eager in pairs:
        assert (replayed["status"], eager["status"]) == ("ok", "ok"), (replayed["error"], eager["error"])
        for site, rows in replayed["rows"].items():
            cosine = torch.nn.functional.cosine_similarity(rows.float(), eager["rows"][site].float(), dim=1)
            assert float(cosine.min()) >= MIN_COSINE, site


def test_every_site_ran_in_every_replay(runs):
    (stats,) = runs["graphs"]["stats"]
    run_counts = set(stats["steering"]["run_counts"].values())

    assert len(run_counts) == 1, "every site runs in every forward"
    assert run_counts.pop() > 48


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's server with steering; yields its URL."""
    log = tmp_path_factory.mktemp("server") / "log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "m", "--load-format", "dummy", "--max-model-len", "4096"]
    command += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(4 << 30), "--enable-steering"]
    with log.open("wb") as target:
        process = subprocess.Popen(command, stdout=target, stderr=subprocess.STDOUT)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while not _is_ready(url):
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
                pytest.fail(log.read_text()[-6000:])
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def complete(url: str, **fields: Any) -> str:
    """The text of one completion."""
    body = {"model": "m", "prompt": "w5000 w6000 w7000", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def packed(seed: int) -> dict[str, Any]:
    """Vectors in the packed form of a JSON body."""
    rows = np.random.default_rng(seed).normal(0, STRENGTH, (len(LAYERS), HIDDEN)).astype(np.float16)
    data = base64.b64encode(rows.tobytes()).decode()
    return {"post_mlp": {"dtype": "float16", "shape": list(rows.shape), "layer_indices": list(LAYERS), "data": data}}


def test_the_server_steers_in_replayed_graphs(server):
    plain, one = complete(server), complete(server, steering_vectors=packed(1))
    with ThreadPoolExecutor(8) as pool:
        asked = [{}, {"steering_vectors": packed(1)}, {"steering_vectors": packed(2)}] * 3
        texts = list(pool.map(lambda fields: complete(server, **fields), asked))

    assert plain != one
    assert len({texts[2], one, plain}) == 3
    assert texts[::3] == [plain] * 3
