"""Event-loop time of one steered HTTP request, from its body to the bytes for the engine core: no engine runs.

    .venv/bin/python -m tests.benchmarks.bench_bodies

The application is FastAPI with vLLM's own request model, our patches and middleware. `loop` is the CPU time of the
event loop's callbacks, `stall` the longest that anything else on the loop had to wait, `total` the request's latency.
"""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from headgate.capture.consumer import ModelInfo

LAYERS, HIDDEN, HOOKS = 34, 2560, ("pre_attn", "post_attn", "post_mlp")
REPEATS = 30
MODEL = ModelInfo(name="tiny", num_layers=LAYERS, hidden_size=HIDDEN, dtype="bfloat16", sites=())


def bodies() -> dict[str, Callable[[int], tuple[bytes, str]]]:
    """Makers of bodies with other vectors each time."""

    def rows(seed: int) -> Any:
        return np.random.default_rng(seed).normal(size=(LAYERS, HIDDEN)).astype(np.float32)

    def packed(seed: int, as_text: bool) -> dict[str, Any]:
        made = {}
        for index, hook in enumerate(HOOKS):
            data = rows(seed + index).tobytes()
            given = base64.b64encode(data).decode() if as_text else data
            shape, layers = [LAYERS, HIDDEN], list(range(LAYERS))
            made[hook] = {"dtype": "float32", "shape": shape, "layer_indices": layers, "data": given}
        return made

    def lists(seed: int) -> dict[str, Any]:
        return {
            hook: {str(layer): row.tolist() for layer, row in enumerate(rows(seed + index))}
            for index, hook in enumerate(HOOKS)
        }

    def body(vectors: Any) -> dict[str, Any]:
        return {"model": "m", "prompt": "The capital of", "max_tokens": 8, "steering_vectors": vectors}

    plain = json.dumps({**body({}), "steering_vectors": None, "steering_name": "calm"}).encode()
    return {
        "a name": lambda seed: (plain, "application/json"),
        "lists": lambda seed: (json.dumps(body(lists(seed))).encode(), "application/json"),
        "base64": lambda seed: (json.dumps(body(packed(seed, True))).encode(), "application/json"),
        "msgpack": lambda seed: (msgspec.msgpack.encode(body(packed(seed, False))), "application/msgpack"),
    }


def application(*, has_middleware: bool) -> Any:
    """The application: it does with a request what the server does up to the engine core."""
    from headgate.capture.engine.plugin import register

    register()
    from fastapi import FastAPI
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    from headgate.capture.engine.bodies import install_bodies
    from headgate.capture.engine.reception import RECEPTION, OpenPart, Reception
    from headgate.capture.engine.request_seam import request_parts
    from headgate.capture.engine.wire import attach, fold
    from headgate.capture.server_config import ServerConfig

    part = request_parts()["steering"]
    reception = Reception(None, {"steering": OpenPart("steering", part, part.open({}, MODEL))})
    encoder = MsgpackEncoder()
    app = FastAPI()
    app.state.engine_client = SimpleNamespace(input_processor=SimpleNamespace(**{RECEPTION: reception}))

    async def complete(request: Any) -> dict[str, int]:
        params = request.to_sampling_params(16, {})
        asked = reception.read(params, "r")
        assert asked is not None
        made = EngineCoreRequest("r", [1, 2, 3], None, attach(params, asked).clone(), None, 0.0, None, None, None)
        fold(made, asked, "r")
        return {"bytes": sum(len(buffer) for buffer in encoder.encode(made))}

    complete.__annotations__ = {"request": CompletionRequest, "return": dict[str, int]}
    app.post("/v1/completions")(complete)
    if has_middleware:
        install_bodies(app, ServerConfig())
    return app


async def one(app: Any, body: bytes, kind: str) -> float:
    """The seconds that a request takes; its body arrives in pieces of 64 KiB."""
    pieces = [body[start : start + 65536] for start in range(0, len(body), 65536)]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    started = time.perf_counter()
    await app(scope, receive, send)
    took = time.perf_counter() - started
    assert sent[0]["status"] == 200, sent
    return took


class Watch:
    """Adds up what callbacks of the loop take, and how late a timer of every millisecond is."""

    def __init__(self) -> None:
        self.busy_s = self.stall_s = 0.0
        original = asyncio.events.Handle._run

        def run(handle: Any) -> None:
            started = time.thread_time()
            original(handle)
            self.busy_s += time.thread_time() - started

        asyncio.events.Handle._run = run  # type: ignore[method-assign]

    async def tick(self) -> None:
        """Until it is cancelled."""
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.stall_s = max(self.stall_s, time.perf_counter() - due)


async def measure(app: Any, make: Callable[[int], tuple[bytes, str]], watch: Watch) -> tuple[float, float, float, int]:
    """Medians in ms, and the body's size."""
    found = []
    body = b""
    for repeat in range(REPEATS):
        body, kind = make(10 * repeat)
        await asyncio.sleep(0)  # what made the body is one callback, and not of the request
        watch.busy_s = watch.stall_s = 0.0
        ticker = asyncio.create_task(watch.tick())
        took = await one(app, body, kind)
        await asyncio.sleep(0.002)
        ticker.cancel()
        found.append((watch.busy_s * 1e3, watch.stall_s * 1e3, took * 1e3))
    busy, stall, total = (statistics.median(column) for column in zip(*found[5:], strict=True))
    return busy, stall, total, len(body)


def main() -> None:
    watch = Watch()
    print(f"{LAYERS} layers x {len(HOOKS)} hooks x {HIDDEN}; medians in ms")
    print(f"{'body':8} {'middleware':>10} {'MB':>6} {'loop':>7} {'stall':>7} {'total':>7}")
    for has_middleware in (False, True):
        app = application(has_middleware=has_middleware)
        for name, make in bodies().items():
            if name == "msgpack" and not has_middleware:
                continue
            busy, stall, total, size = asyncio.run(measure(app, make, watch))
            shown = "yes" if has_middleware else "no"
            print(f"{name:8} {shown:>10} {size / 1e6:6.2f} {busy:7.2f} {stall:7.2f} {total:7.2f}")


if __name__ == "__main__":
    main()
