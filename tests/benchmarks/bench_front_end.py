"""What a request that captures or steers costs the API server: ``python -m tests.benchmarks.bench_front_end``.

No GPU and no engine. A streamed completion goes through headgate's part of the server, from the fields of its body to
the last piece of its answer; stand-ins do vLLM's part, but for its `SamplingParams`. The engine's stand-in yields as
many tokens as ``--tokens`` says, and has the results ready with the last. Shown are the least and the lower quartile of
many turns, in us, and into how many pieces the answer comes, each of which takes the server's HTTP layer some 60 us
more.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec

from headgate.capture.links.messages import Result
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import HookPoint, Site
from headgate.consumers.filesystem import FilesystemConsumer
from headgate.steering.config import SteeringConfig
from headgate.steering.documents.request import SteeringReader
from tests.benchmarks.bench_idle import quiet_gc
from tests.benchmarks.models import ModelSize
from tests.benchmarks.operations import encoded_gate, encoded_operations, encoded_vector, op_sites

LAYERS, PROMPT, TURNS = 34, 256, 600
RESULT = CaptureResult(status="ok", payload={"path": "/tmp/rows/default/cmpl-1.safetensors", "rows": 1})
CHUNK = (
    'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" a"}]}\n\n'
)
SIZE = ModelSize(num_layers=LAYERS, hidden=2560, vocabulary=262208)


def captured(hooks: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"capture": {"filesystem": {"hooks": hooks, "positions": "last_prompt"}}}


ASKED: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "nothing": dict,
    "a row of one layer": lambda: captured({"post_mlp": [17]}),
    "a row of each layer": lambda: captured({"post_mlp": "all"}),
    "a vector at one site": lambda: {"steering_vectors": msgspec.json.decode(encoded_vector(1, SIZE))},
    "a gate": lambda: {"steering_gates": msgspec.json.decode(encoded_gate(1, SIZE, is_loop=False))},
    "an ablation at 8 sites": lambda: {"steering_ops": msgspec.json.decode(encoded_operations(1, SIZE, 1))},
}
"""Fields of the body: new objects in each request, as a parser makes them, with the same content."""


class Body:
    """A parsed body of ``/v1/completions``."""

    vllm_xargs, use_beam_search, n = None, False, 1

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.model_extra = dict(fields)

    def to_sampling_params(self) -> Any:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=128, temperature=0, skip_clone=True)  # as vLLM's routes make it


class Engine:
    """An `AsyncLLM` that has each request's results when its tokens are there."""

    engine_core = None

    def __init__(self, root: str, num_tokens: int) -> None:
        from headgate.capture.engine.frontends import async_llm, input_processor
        from headgate.capture.engine.requests.capture_frontend import FRONT_END, FrontEnd
        from headgate.capture.engine.requests.request_reader import (
            REQUEST_READER,
            OpenPart,
            RequestReader,
            request_parts,
        )
        from headgate.capture.links.driver import DriverHost

        def no_drivers(hub: Any) -> DriverHost:
            raise AssertionError("no consumer is located here")

        sites = tuple(Site(layer, HookPoint.POST_MLP) for layer in range(LAYERS))
        model = ModelInfo(name="m", num_layers=LAYERS, hidden_size=2560, dtype="bfloat16", sites=sites)
        config = CaptureConsumersConfig(consumers=(CaptureConsumerSpec(name="filesystem", params={"root": root}),))
        consumers = {"filesystem": FilesystemConsumer}
        steerable = SteeringConfig(op_sites=op_sites(SIZE)).steerable(
            num_layers=LAYERS, hidden_size=SIZE.hidden, dtype="bfloat16"
        )
        parts = {"steering": OpenPart("steering", request_parts()["steering"], SteeringReader(steerable))}
        self.front = FrontEnd(config, model, consumers, num_stages=1, open_drivers=no_drivers)
        self.input_processor = SimpleNamespace(
            **{FRONT_END: self.front, REQUEST_READER: RequestReader(self.front, parts)}
        )
        sizes = {"data_parallel_size": 1, "data_parallel_size_local": 1, "data_parallel_rank_local": None}
        parallel = SimpleNamespace(local_engines_only=False, **sizes)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self._num_tokens = num_tokens
        self._process = input_processor.process_inputs(made_request)
        self._add = async_llm.add_request(Engine.add_request)
        self.generate = partial(async_llm.generate(Engine.outputs), self)

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> Any:
        return self._process(self.input_processor, request_id, prompt, params)

    async def outputs(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        request = await self._add(self, request_id, prompt, params)
        for _ in range(self._num_tokens - 1):
            yield SimpleNamespace(finished=False, outputs=[])
        if "capture" in (wire := (request.sampling_params.extra_args or {}).get("headgate", {})):
            key = wire["capture"]["key"]
            self.front.hub.deliver(Result(key=key, instance="filesystem", result=RESULT))
        yield SimpleNamespace(
            finished=True, outputs=[SimpleNamespace(index=0, finish_reason="length", stop_reason=None)]
        )


def made_request(processor: object, request_id: str, prompt: Any, params: Any) -> Any:
    """vLLM's ``InputProcessor.process_inputs``."""
    tokens = prompt["prompt_token_ids"]
    return SimpleNamespace(prompt_embeds=None, prompt_token_ids=tokens, resumable=False, sampling_params=params.clone())


class Server:
    """The handler of ``/v1/completions``, for a client of this machine."""

    def __init__(self, engine: Engine) -> None:
        from headgate.capture.engine.server import openai_routes
        from headgate.capture.engine.server.access_keys import open_access

        self._handler = SimpleNamespace(engine_client=engine)
        self._sampling_params = openai_routes.to_sampling_params(Body.to_sampling_params)
        self._create = openai_routes.create_completion(self._answer)
        self._state = SimpleNamespace(args=server_args())
        open_access(self._state)  # type: ignore[arg-type]

    async def _answer(self, handler: Any, body: Body, raw: Any) -> AsyncGenerator[str, None]:
        prompt = {"prompt_token_ids": list(range(PROMPT))}
        outputs = handler.engine_client.generate(prompt, self._sampling_params(body), "cmpl-1")

        async def chunks() -> AsyncGenerator[str, None]:
            async for _ in outputs:
                yield CHUNK
            yield "data: [DONE]\n\n"

        return chunks()

    async def ask(self, fields: Mapping[str, Any]) -> list[str]:
        """Return the pieces of the answer."""
        from starlette.requests import Request

        headers = [(b"host", b"127.0.0.1:8000")]
        raw = Request({"type": "http", "method": "POST", "headers": headers, "app": SimpleNamespace(state=self._state)})
        return [piece async for piece in await self._create(self._handler, Body(fields), raw)]


def server_args() -> Any:
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(["--host", "127.0.0.1"])


async def measure(server: Server) -> None:
    for name, make in ASKED.items():
        seconds = []
        for _ in range(TURNS):
            fields = make()
            start = time.perf_counter()
            pieces = await server.ask(fields)
            seconds.append(time.perf_counter() - start)
        assert ("capture_results" in "".join(pieces)) == ("capture" in fields)
        least, quartile = min(seconds), statistics.quantiles(seconds)[0]
        print(f"{name:24}{1e6 * least:9.0f}{1e6 * quartile:9.0f}{len(pieces):9}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a request costs the API server.")
    parser.add_argument("--tokens", type=int, default=2, help="pieces of the answer")
    given = parser.parse_args()
    from headgate.capture.engine.plugin import register

    register()
    print(f"{'us':24}{'least':>9}{'quartile':>9}{'pieces':>9}")
    with tempfile.TemporaryDirectory() as root, quiet_gc():
        server = Server(Engine(root, given.tokens))
        asyncio.run(measure(server))


if __name__ == "__main__":
    main()
