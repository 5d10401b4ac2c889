"""What requests cost the API server: ``python -m tests.benchmarks.bench_front_end [MODE ...]``.

No GPU and no engine. vLLM's own application and `AsyncLLM` serve streamed completions, called without sockets; a
stand-in for the engine core takes the encoded requests, and has a token of each at a time. Two processes take turns,
stock and one with headgate in default settings; modes are those of `workload`. All requests arrive at once.

- *burst*: until the last request has been sent to the engine core, in ms of wall time for all of them.
- *request*: CPU of the process until then, and behind the last token until the streams have ended, in us a request.
- *token*: CPU of the process for a token that is streamed, in us.

Results of captures come from a process of their own, as a worker sends them, with the last token. Each figure is the
least of all rounds, as the machine may be busy with other things, and the ratio to stock is that of these. With
``--profile FOLDER``, a last round is profiled, one file of `pstats` for each mode; ``--cold MB`` writes so much memory
before each step and each request, as vLLM's own work and a GPU's driver empty the caches.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from tests.benchmarks.models import ModelSize, write_model
from tests.benchmarks.operations import op_sites
from tests.benchmarks.workload import BASE, MODES, Asked, Shape, receiver

MODEL, HIDDEN, LAYERS, VOCABULARY = "tiny", 2560, 34, 4096
DEFAULT_MODES = (
    BASE,
    "defaults idle",
    "vector shared",
    "1 vector",
    "ablation shared",
    "1 gate",
    "64 configs, 34 sites",
)
DEFAULT_MODES += ("last_prompt", "1 layer", "all layers")
ROUTE = "/v1/completions"


class Core:
    """A client of an engine core, of which `AsyncLLM` needs no more. The event loop's alone."""

    def __init__(self) -> None:
        from vllm.v1.serial_utils import MsgpackEncoder

        self.engine_ranks_managed, self.resources = [0], SimpleNamespace(engine_dead=False)
        self.requests: dict[str, tuple[Any, int]] = {}
        self.on_request = asyncio.Event().set
        self._encoder = MsgpackEncoder()
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()

    async def add_request_async(self, request: Any) -> None:
        self._encoder.encode(request)
        self.requests[request.request_id] = request, request.sampling_params.max_tokens
        self.on_request()

    async def get_output_async(self) -> Any:
        return await self._outputs.get()

    def step(self) -> list[Any]:
        """Give each request a token; return those that have ended."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        made, ended = [], []
        for request_id, (request, left) in list(self.requests.items()):
            made.append(EngineCoreOutput(request_id, [7], finish_reason=FinishReason.LENGTH if left == 1 else None))
            self.requests[request_id] = request, left - 1
            if left == 1:
                ended.append(self.requests.pop(request_id)[0])
        self._outputs.put_nowait(EngineCoreOutputs(outputs=made))
        return ended

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        assert not request_ids

    def shutdown(self, timeout: float | None = None) -> None:
        pass


def send_results(connection: Connection) -> None:
    """A process: send results as a worker does, for each list of addresses and keys that comes."""
    from headgate.capture.links.messages import Result
    from headgate.capture.links.sender import ResultSender
    from headgate.capture.schema.results import CaptureResult

    sender = ResultSender()
    payload = {"paths": ["/tmp/rows/default/cmpl-1.safetensors"], "tag": "default", "layout": "request"}
    result = CaptureResult(status="ok", payload=payload, num_rows=300, num_bytes=300 * 2 * HIDDEN)
    while wanted := connection.recv():
        for reply, key, req_id in wanted:
            sender.send_result(reply, Result(key=key, req_id=req_id, instance="filesystem", result=result))
    sender.close(1.0)


class Served:
    """A server's application, and calls of it."""

    def __init__(self, app: Any, core: Core, results: Connection, cold: int) -> None:
        self._app = app
        self._core = core
        self._results = results
        self._dirt = np.zeros(cold << 17, np.int64)
        self._sent = self._failed = self._dirt_ns = 0
        self._changed = asyncio.Event()
        core.on_request = self._changed.set

    async def measure(self, bodies: list[bytes], profile: cProfile.Profile | None) -> dict[str, float]:
        """Send all bodies at once, and stream their answers to the end."""
        core, count = self._core, len(bodies)
        gc.collect()
        self._sent = self._dirt_ns = 0
        if profile:
            profile.enable()
        began, cpu = time.perf_counter(), time.process_time_ns()
        calls = [asyncio.create_task(self._call(body)) for body in bodies]
        await self._until(lambda: len(core.requests) == count)
        arrived = time.process_time_ns() - self._dirt_ns
        found = {"burst": 1e3 * (time.perf_counter() - began) - 1e-6 * self._dirt_ns}
        before, tokens, ended = self._sent, 0, []
        while not ended:
            self._make_cold()
            ended, tokens = core.step(), tokens + 1
            if ended:
                streamed = time.process_time_ns() - self._dirt_ns
                self._send_results(ended)
            await self._until(lambda: self._sent - before >= tokens * count)  # noqa: B023
        await asyncio.gather(*calls)
        end = time.process_time_ns() - self._dirt_ns
        if profile:
            profile.disable()
        found["request"] = 1e-3 * (end - streamed + arrived - cpu) / count
        return found | {"token": 1e-3 * (streamed - arrived) / (count * (tokens - 1))}

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert not self._failed
            self._changed.clear()
            await self._changed.wait()

    def _make_cold(self) -> None:
        began = time.process_time_ns()
        self._dirt += 1
        self._dirt_ns += time.process_time_ns() - began

    def _send_results(self, ended: list[Any]) -> None:
        wires = [(request.request_id, request.sampling_params.extra_args or {}) for request in ended]
        asked = [
            (wire["headgate"]["capture"], req_id) for req_id, wire in wires if "capture" in wire.get("headgate", {})
        ]
        if asked and self._results is not None:
            self._results.send([(capture["reply"], capture["key"], req_id) for capture, req_id in asked])

    async def _call(self, body: bytes) -> None:
        headers = [(b"host", b"127.0.0.1:8000"), (b"content-type", b"application/json")]
        headers.append((b"content-length", b"%d" % len(body)))
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": ROUTE, "raw_path": ROUTE.encode()}
        scope |= {"headers": headers, "query_string": b"", "client": ("127.0.0.1", 4000), "http_version": "1.1"}
        scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}, "scheme": "http", "server": ("127.0.0.1", 8000)}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._failed += message["status"] != 200
            elif b"text_completion" in message["body"]:
                self._sent += 1
            self._changed.set()

        self._make_cold()
        await self._app(scope, receiver(body), send)


@asynccontextmanager
async def open_server(model: Path, flags: list[str]) -> AsyncIterator[tuple[Any, Core]]:
    """vLLM's application with its `AsyncLLM`, and the stand-in for the engine core."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.entrypoints.openai.api_server import build_app, init_app_state
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient

    core = Core()
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: core)  # type: ignore[method-assign]
    given = ["--model", str(model), "--served-model-name", "bench", "--host", "127.0.0.1", "--load-format", "dummy"]
    given += ["--max-model-len", "1024", "--max-num-seqs", "256", "--enforce-eager", "--block-size", "32", *flags]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    engine = AsyncLLM.from_vllm_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    try:
        yield app, core
    finally:
        engine.shutdown()


def serve(connection: Connection, environment: Mapping[str, str], model: Path, flags: list[str], cold: int) -> None:
    """A process: measure each ``(bodies, file for a profile or None)`` that comes."""
    os.environ.update(environment)
    results, theirs = multiprocessing.get_context("spawn").Pipe()
    sending = multiprocessing.get_context("spawn").Process(target=send_results, args=(theirs,), daemon=True)
    sending.start()

    async def run() -> None:
        async with open_server(model, flags) as (app, core):
            served = Served(app, core, results, cold)
            gc.collect()
            gc.freeze()  # as the server does when it is up
            connection.send("ready")
            while given := connection.recv():
                bodies, target = given
                profile = cProfile.Profile() if target else None
                found = await served.measure(bodies, profile)
                if profile:
                    profile.dump_stats(target)
                connection.send(found)

    import uvloop

    uvloop.run(run())
    results.send(None)
    sending.join(5)


def main() -> None:
    parser = argparse.ArgumentParser(description="What requests cost the API server.")
    parser.add_argument("modes", nargs="*", help=f"of {', '.join(MODES)}")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", type=int, default=0, help="MB to write")
    parser.add_argument("--profile", type=Path, help="folder for profiles")
    given = parser.parse_args()
    modes, size = given.modes or DEFAULT_MODES, ModelSize(LAYERS, HIDDEN, VOCABULARY)
    shape = Shape(given.requests, given.requests, prompt=256, tokens=given.tokens)
    context, servers = multiprocessing.get_context("spawn"), {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(MODEL, Path(folder), hidden_size=HIDDEN, num_hidden_layers=LAYERS)
        ours = ["--enable-steering", "--steering-op-sites", msgspec.json.encode(op_sites(size)).decode()]
        ours += ["--capture-consumers", f"filesystem:root={folder}/rows"]
        for name, flags in (("none", []), ("headgate", ours)):
            connection, theirs = context.Pipe()
            environment = {"VLLM_PLUGINS": name, "VLLM_LOGGING_LEVEL": "WARNING"}
            context.Process(target=serve, args=(theirs, environment, Path(folder), flags, given.cold)).start()
            theirs.close()
            servers[name] = connection
        assert all(connection.recv() == "ready" for connection in servers.values())
        least = {mode: dict[str, float]() for mode in modes}
        for turn in range(given.rounds + 1 + bool(given.profile)):
            for mode in modes:
                asked = Asked(MODES[mode], shape, size, "bench", seed=turn)
                connection = servers["none" if mode == BASE else "headgate"]
                target = given.profile / f"{mode}.pstats" if turn > given.rounds else None
                connection.send(([asked.body(index)[1] for index in range(given.requests)], target))
                for name, value in connection.recv().items():
                    if turn and not target:
                        least[mode][name] = min(least[mode].get(name, value), value)
        for connection in servers.values():
            connection.send(None)
        print(f"{'':24}{'burst ms':>16}{'request us':>16}{'token us':>16}")
        for mode, found in least.items():
            ratios = [f"{found[name]:10.1f}{100 * (found[name] / least[BASE][name] - 1):+5.0f}%" for name in found]
            print(f"{mode:24}{''.join(ratios)}")


if __name__ == "__main__":
    main()
