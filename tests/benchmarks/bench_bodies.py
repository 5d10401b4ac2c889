"""Event-loop time of one steered HTTP request, from its body to the bytes for the engine core: no engine runs.

    chrt -r 10 .venv/bin/python -m tests.benchmarks.bench_bodies [asyncio] [--burst 64]

The application is FastAPI with vLLM's own request model: stock, with headgate's fields of JSON bodies alone, and with
the middleware that ``VLLM_PLUGINS`` brings. It runs on uvloop, as vLLM's server does; with ``asyncio``, on Python's own
loop.

`loop` is CPU time of the loop's thread from before the request's task is made until after it has ended, whatever that
thread did meanwhile, waiting for its selector and for the GIL included. `stall` is the longest that anything else
on the loop had to wait, and has rounds of its own, since what measures it takes time of the loop. `total` is latency.

The machine's own speed changes by a factor of two within minutes. So servers take turns, request by request, in several
sittings with new processes; a row shows the lowest, the middle and the highest of the sittings' medians, and by how
much a request took longer than the stock server's ``plain`` one of the same round (``above``, likewise).

With ``--burst``, so many clients ask at once instead, each with the operations of `operations.operations`: shown is
when the middle and the last of them are on their way to the engine core. ``again`` are the same bytes a second time.

Rows that steer nothing say what vLLM itself takes: ``plain`` is a short body, ``as long`` one of the length of
``base64`` in a field that vLLM does not know.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headgate.capture.schema.consumer import ModelInfo
from tests.benchmarks.models import ModelSize
from tests.benchmarks.operations import op_sites, operations

LAYERS, HIDDEN, HOOKS = 34, 2560, ("pre_attn", "post_attn", "post_mlp")
SITTINGS = 5
WARM_UPS = 4
REPEATS = 40
NUM_BODIES = 8
BURSTS = 4
PIECE = 1 << 16
MODEL = ModelInfo(name="tiny", num_layers=LAYERS, hidden_size=HIDDEN, dtype="bfloat16", sites=())
SIZE = ModelSize(LAYERS, HIDDEN, 262208)
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
"""Makers of bodies from seeds, and the servers that they are sent to."""


@cache
def made(name: str, number: int) -> tuple[bytes, str]:
    """A body and its type. Nothing in a server knows that it has seen the same bytes before."""
    return BODIES[name][0](len(HOOKS) * number)


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
        from headgate.capture.engine.server.bodies.middleware import install_bodies
        from headgate.capture.schema.config import ServerConfig

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
        yield SimpleNamespace(
            finished=True, outputs=[SimpleNamespace(finish_reason="stop", stop_reason=None)], size=size
        )

    async def create_completion(serving: Any, request: Any, *_: object) -> dict[str, int]:
        params = request.to_sampling_params(16, {})
        outputs = serving.engine_client.generate(serving.engine_client, {"prompt_token_ids": [1, 2, 3]}, params, "r")
        async for output in outputs:
            size = output.size
        return {"bytes": size}

    return process_inputs, generate, create_completion


def patched(engine: Any) -> tuple[Any, Any, Any]:
    """The same three in headgate's wrappers, for an engine that steers and knows the module ``calm``."""
    from headgate.capture.engine.contracts.parts import request_parts
    from headgate.capture.engine.frontends import async_llm, input_processor
    from headgate.capture.engine.requests.capture_frontend import FRONT_END
    from headgate.capture.engine.requests.request_reader import REQUEST_READER, OpenPart, RequestReader
    from headgate.capture.engine.server import openai_routes

    part = request_parts()["steering"]
    opened = OpenPart("steering", part, part.open({"op_sites": op_sites(SIZE)}, MODEL))
    opened.known = {"calm": {"name": "calm", "peak": 1.0}}
    vars(engine.input_processor).update({REQUEST_READER: RequestReader(None, {"steering": opened}), FRONT_END: None})
    process_inputs, generate, create_completion = handlers(engine)
    return (
        input_processor.process_inputs(process_inputs),
        async_llm.generate(generate),
        openai_routes.create_completion(create_completion),
    )


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


class Took(NamedTuple):
    """What one request took, in ms."""

    size: int
    loop: float
    total: float
    stall: float


class Row(NamedTuple):
    """Medians of one sitting for one body and one server, in ms."""

    size: int
    quiet: float
    loop: float
    above: float
    stall: float
    total: float


async def ask(app: Any, body: bytes, kind: str, *, is_ticking: bool) -> Took:
    """Ask once, like a server that has been idle for a while. `is_ticking`: look for stalls, and for nothing else."""
    client, late = Client(body, kind), [0.0]
    ticker = asyncio.create_task(tick(late)) if is_ticking else None
    await asyncio.sleep(0.003)
    late[0], started = 0.0, time.thread_time()
    total = await asyncio.create_task(client.ask(app))
    loop = time.thread_time() - started
    if ticker is not None:
        await asyncio.sleep(0.003)
        ticker.cancel()
    return Took(len(body), loop * 1e3, total * 1e3, late[0] * 1e3)


async def tick(late: list[float]) -> None:
    """Note how late a timer of every millisecond is at most, until cancelled."""
    while True:
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        late[0] = max(late[0], time.perf_counter() - due)


def serve(server: str, loop: str, link: Connection) -> None:
    """One server, in a process of its own, since headgate's patches stay. Bodies come by a pipe, as from a network."""
    app = application(server)

    async def take_turns() -> None:
        while (turn := link.recv()) is not None:  # this stops the loop, which has nothing to do
            kind, is_ticking = turn
            link.send(await ask(app, link.recv_bytes(), kind, is_ticking=is_ticking))

    if loop == "uvloop":
        import uvloop

        uvloop.run(take_turns())
    else:
        asyncio.run(take_turns())


async def burst(app: Any, bodies: Sequence[bytes]) -> tuple[float, float]:
    """The ms after which the middle and the last of `bodies`, sent at once, have been served."""
    began = time.perf_counter()

    async def served(body: bytes) -> float:
        await Client(body, "application/json").ask(app)
        return (time.perf_counter() - began) * 1e3

    took = await asyncio.gather(*(served(body) for body in bodies))
    return statistics.median(took), max(took)


def show_bursts(count: int) -> None:
    """Bursts of requests without steering, with sets that are new, and with the same again."""
    import uvloop

    app = application(PLUGIN)
    plain = [as_json()[0]] * count
    sets = [
        as_json(steering_ops=operations(number, SIZE, 4, as_text=True))[0] for number in range((BURSTS + 1) * count)
    ]
    bursts = [sets[start : start + count] for start in range(0, len(sets), count)]

    async def show() -> None:
        await burst(app, bursts[0])  # warms up
        for name, several in (("plain", [plain] * BURSTS), ("new", bursts[1:]), ("again", bursts[1:])):
            found = [await burst(app, bodies) for bodies in several]
            middle, last = (spread(column) for column in zip(*found, strict=True))
            print(f"{name:8} {len(several[0][0]) / 1e3:7.1f} kB   middle {middle} ms   last {last} ms", flush=True)

    uvloop.run(show())


def sit(loop: str) -> dict[tuple[str, str], Row]:
    """One sitting, by body and server."""
    context = multiprocessing.get_context("spawn")
    links = {}
    for server in (STOCK, FIELDS, PLUGIN):
        links[server], end = context.Pipe()
        context.Process(target=serve, args=(server, loop, end), daemon=True).start()
    rows = [(name, server) for name, (_, servers) in BODIES.items() for server in servers]
    took: dict[tuple[str, str], list[Took]] = {row: [] for row in rows}
    for repeat in range(WARM_UPS + 2 * REPEATS):
        for name, server in rows:
            body, kind = made(name, repeat % NUM_BODIES)
            links[server].send((kind, bool(repeat % 2)))
            links[server].send_bytes(body)
            found = links[server].recv()
            if repeat >= WARM_UPS:
                took[name, server].append(found)
    for link in links.values():
        link.send(None)
    plain = [each.loop for each in took["plain", STOCK][::2]]
    return {row: medians(found[::2], found[1::2], plain) for row, found in took.items()}


def medians(quiet: list[Took], ticking: list[Took], plain: list[float]) -> Row:
    """Of the rounds without a ticker, of those with one, and against what stock's plain requests took in the former."""
    loop = [took.loop for took in quiet]
    return Row(
        size=quiet[0].size,
        quiet=float(np.quantile(loop, 0.1)),
        loop=statistics.median(loop),
        above=statistics.median(took - stock for took, stock in zip(loop, plain, strict=True)),
        stall=statistics.median(took.stall for took in ticking),
        total=statistics.median(took.total for took in quiet),
    )


def spread(values: Iterable[float]) -> str:
    """Lowest, middle, highest."""
    found = sorted(values)
    return f"{found[0]:7.2f}{statistics.median(found):6.2f}{found[-1]:6.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_bodies")
    parser.add_argument("loop", nargs="?", default="uvloop", choices=("uvloop", "asyncio"))
    parser.add_argument("--burst", type=int, default=0, help="so many requests at once")
    arguments = parser.parse_args()
    if arguments.burst:
        show_bursts(arguments.burst)
        return
    loop = arguments.loop
    print(f"{LAYERS} layers x {len(HOOKS)} hooks x {HIDDEN}; {loop}; ms; medians of {SITTINGS} sittings")
    columns = ("quiet", "loop", "above", "stall", "total")
    print(f"{'body':8} {'server':>8} {'MB':>6}" + "".join(f"{column:>20}" for column in columns), flush=True)
    sittings = [sit(loop) for _ in range(SITTINGS)]
    for name, server in sittings[0]:
        found = [sitting[name, server] for sitting in sittings]
        shown = " ".join(spread(getattr(row, column) for row in found) for column in columns)
        print(f"{name:8} {server:>8} {found[0].size / 1e6:6.2f} {shown}", flush=True)


if __name__ == "__main__":
    main()
