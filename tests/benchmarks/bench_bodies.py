"""Event-loop time of one steered HTTP request, from its body to the bytes for the engine core: no engine runs.

    .venv/bin/python -m tests.benchmarks.bench_bodies

The application is FastAPI with vLLM's own request model: stock, with headgate's fields of JSON bodies alone, and with
the middleware that ``VLLM_PLUGINS`` brings. `loop` is CPU time of the event loop's callbacks, `stall` the longest that
anything else on the loop had to wait, `total` the request's latency; `stall` has rounds of its own, since what measures
it takes time of the loop. `quiet` is the first decile of `loop`: what is above it is owed to others on the cores.

Rows that steer nothing say what vLLM itself takes: ``plain`` is a short body, ``as long`` one of the length of
``base64`` in a field that vLLM does not know.
"""

from __future__ import annotations

import asyncio
import base64
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from headgate.capture.consumer import ModelInfo

LAYERS, HIDDEN, HOOKS = 34, 2560, ("pre_attn", "post_attn", "post_mlp")
REPEATS = 20
PIECE = 1 << 16
MODEL = ModelInfo(name="tiny", num_layers=LAYERS, hidden_size=HIDDEN, dtype="bfloat16", sites=())
STOCK, FIELDS, PLUGIN = "stock", "fields", "plugin"

Make = Callable[[int], tuple[bytes, str]]


def packed(seed: int, *, as_text: bool) -> dict[str, Any]:
    """Vectors of every site in the packed form, others for each seed."""
    made = {}
    for index, hook in enumerate(HOOKS):
        data = rows(seed + index).tobytes()
        given = base64.b64encode(data).decode() if as_text else data
        shape, layers = [LAYERS, HIDDEN], list(range(LAYERS))
        made[hook] = {"dtype": "float32", "shape": shape, "layer_indices": layers, "data": given}
    return made


def lists(seed: int) -> dict[str, Any]:
    """The same as lists."""
    return {
        hook: {str(layer): row.tolist() for layer, row in enumerate(rows(seed + index))}
        for index, hook in enumerate(HOOKS)
    }


def rows(seed: int) -> Any:
    """``[LAYERS, HIDDEN]``, float32."""
    return np.random.default_rng(seed).normal(size=(LAYERS, HIDDEN)).astype(np.float32)


PLAIN = {"model": "m", "prompt": "The capital of", "max_tokens": 8}


def as_json(**fields: Any) -> tuple[bytes, str]:
    """A body and its type."""
    return json.dumps({**PLAIN, **fields}).encode(), "application/json"


def as_msgpack(**fields: Any) -> tuple[bytes, str]:
    """A body and its type."""
    return msgspec.msgpack.encode({**PLAIN, **fields}), "application/msgpack"


BODIES: dict[str, tuple[Make, tuple[str, ...]]] = {
    "plain": (lambda seed: as_json(), (STOCK, PLUGIN)),
    "as long": (lambda seed: as_json(unknown=packed(seed, as_text=True)), (STOCK, PLUGIN)),
    "a name": (lambda seed: as_json(steering_name="calm"), (PLUGIN,)),
    "msgpack": (lambda seed: as_msgpack(steering_vectors=packed(seed, as_text=False)), (PLUGIN,)),
    "base64": (lambda seed: as_json(steering_vectors=packed(seed, as_text=True)), (FIELDS, PLUGIN)),
    "lists": (lambda seed: as_json(steering_vectors=lists(seed)), (FIELDS, PLUGIN)),
}
"""Makers of bodies with other vectors each time, and the servers that they are sent to."""


def application(server: str) -> Any:
    """FastAPI around a handler that does with a request what vLLM's does, up to what the engine core gets."""
    if server != STOCK:
        from headgate.capture.engine.plugin import register

        register()
    from fastapi import FastAPI
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    app = FastAPI()
    engine = SimpleNamespace(input_processor=SimpleNamespace(), engine_core=None)
    process, generate, create = handlers(engine) if server == STOCK else patched(engine)
    engine.process, engine.generate = process, generate
    app.state.engine_client = engine
    serving = SimpleNamespace(engine_client=engine)

    async def complete(request: Any) -> dict[str, int]:
        return await create(serving, request)  # type: ignore[no-any-return]

    complete.__annotations__ = {"request": CompletionRequest, "return": dict[str, int]}
    app.post("/v1/completions")(complete)
    if server == PLUGIN:
        from headgate.capture.engine.bodies import install_bodies
        from headgate.capture.server_config import ServerConfig

        install_bodies(app, ServerConfig())
    return app


def handlers(engine: Any) -> tuple[Any, Any, Any]:
    """``InputProcessor.process_inputs``, ``AsyncLLM.generate`` and ``create_completion`` as far as they matter here."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    encoder = MsgpackEncoder()

    def process_inputs(processor: Any, request_id: str, prompt: Any, params: Any) -> Any:
        tokens = prompt["prompt_token_ids"]
        return EngineCoreRequest(request_id, tokens, None, params.clone(), None, 0.0, None, None, None)

    async def generate(engine: Any, prompt: Any, sampling_params: Any, request_id: str) -> Any:
        request = engine.process(engine.input_processor, request_id, prompt, sampling_params)
        size = sum(len(buffer) for buffer in encoder.encode(request))
        yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(finish_reason="stop")], size=size)

    async def create_completion(serving: Any, request: Any) -> dict[str, int]:
        params = request.to_sampling_params(16, {})
        outputs = serving.engine_client.generate(serving.engine_client, {"prompt_token_ids": [1, 2, 3]}, params, "r")
        async for output in outputs:
            size = output.size
        return {"bytes": size}

    return process_inputs, generate, create_completion


def patched(engine: Any) -> tuple[Any, Any, Any]:
    """The same three in headgate's wrappers, for an engine that steers and knows the module ``calm``."""
    from headgate.capture.engine import http, inputs, online
    from headgate.capture.engine.frontend import FRONT_END
    from headgate.capture.engine.reception import RECEPTION, OpenPart, Reception
    from headgate.capture.engine.request_seam import request_parts

    part = request_parts()["steering"]
    opened = OpenPart("steering", part, part.open({}, MODEL))
    opened.known = {"calm": {"name": "calm", "peak": 1.0}}
    vars(engine.input_processor).update({RECEPTION: Reception(None, {"steering": opened}), FRONT_END: None})
    process_inputs, generate, create_completion = handlers(engine)
    return inputs.process_inputs(process_inputs), online.generate(generate), http.create_completion(create_completion)


class Client:
    """One request. Its pieces are cut beforehand: a server gets them from the network one by one."""

    def __init__(self, body: bytes, kind: str) -> None:
        self._pieces = [body[start : start + PIECE] for start in range(0, len(body), PIECE)]
        self._sent: list[Any] = []
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        self._scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        self._scope["query_string"] = b""

    async def ask(self, app: Any) -> float:
        """The seconds that it takes."""
        started = time.perf_counter()
        await app(self._scope, self._receive, self._send)
        took = time.perf_counter() - started
        assert self._sent[0]["status"] == 200, self._sent
        return took

    async def _receive(self) -> dict[str, Any]:
        return {"type": "http.request", "body": self._pieces.pop(0), "more_body": bool(self._pieces)}

    async def _send(self, message: dict[str, Any]) -> None:
        self._sent.append(message)


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


class Figures:
    """What was measured of one body, in ms."""

    def __init__(self) -> None:
        self.size = 0
        self.loop: list[float] = []
        self.stall: list[float] = []
        self.total: list[float] = []

    async def add(self, app: Any, body: bytes, kind: str, watch: Watch, *, is_ticking: bool) -> None:
        """Ask once."""
        self.size, client = len(body), Client(body, kind)
        ticker = asyncio.create_task(watch.tick()) if is_ticking else None
        await asyncio.sleep(0.003)  # like a server between requests; and no call that made the body is counted
        watch.busy_s = watch.stall_s = 0.0
        took = await asyncio.create_task(client.ask(app))
        if ticker is None:
            self.loop.append(watch.busy_s * 1e3)
            self.total.append(took * 1e3)
        else:
            await asyncio.sleep(0.002)
            ticker.cancel()
            self.stall.append(watch.stall_s * 1e3)


async def measure(app: Any, names: list[str], watch: Watch) -> dict[str, Figures]:
    """Figures of each body; they take turns, so that they meet the same machine."""
    found = {name: Figures() for name in names}
    for repeat in range(-2, 2 * REPEATS):
        for name, figures in found.items():
            if repeat == 0:
                found[name] = figures = Figures()  # what came before was to warm up
            body, kind = BODIES[name][0](10 * repeat + 20)
            await figures.add(app, body, kind, watch, is_ticking=bool(repeat % 2))
    return found


def run(server: str) -> None:
    """Print the rows of one server; in a process of its own, since headgate's patches stay."""
    names = [name for name, (_, servers) in BODIES.items() if server in servers]
    found = asyncio.run(measure(application(server), names, Watch()))
    for name, figures in found.items():
        loop, stall, total = map(statistics.median, (figures.loop, figures.stall, figures.total))
        shown = " ".join(f"{found:7.2f}" for found in (np.quantile(figures.loop, 0.1), loop, stall, total))
        print(f"{name:8} {server:>8} {figures.size / 1e6:6.2f} {shown}", flush=True)


def main() -> None:
    print(f"{LAYERS} layers x {len(HOOKS)} hooks x {HIDDEN}; medians in ms")
    print(f"{'body':8} {'server':>8} {'MB':>6} {'quiet':>7} {'loop':>7} {'stall':>7} {'total':>7}", flush=True)
    for server in (STOCK, FIELDS, PLUGIN):
        process = multiprocessing.get_context("spawn").Process(target=run, args=(server,))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
