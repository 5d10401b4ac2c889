"""What headgate costs requests that ask for nothing of it: ``python -m tests.benchmarks.bench_idle [SECTION ...]``.

No GPU. 256 requests run and decode a token each in every step; stock's functions and the same with headgate's patches
take turns in one process, and every line has the time of both and their difference.

- *outputs*: the API server makes its outputs of the engine core's (`OutputProcessor`), and their readers keep up.
- *merged*: the same, where readers are slow, so that every second output is merged with the one before it.
- *chunks*: one piece of a streamed answer goes through the server's middleware.
- *requests*: one short HTTP request goes through it, to the handler and back.
- *core*: a step of the engine core's scheduler, steering configured.
- *worker*: what is called around a step of the model runner, capture and steering configured. Stock's calls do nothing.

Times are the lowest of many turns: the machine may be busy with other things.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.sites import HookPoint, Site
from tests.benchmarks.models import write_model
from tests.benchmarks.workload import receiver

RUNNING, PROMPT = 256, 16
TURNS, STEPS = 24, 12
CHUNKS = 2000


def least(runs: dict[str, Callable[[], float]], turns: int = TURNS) -> dict[str, float]:
    """The least seconds that each of `runs` returned, which take turns."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(turns):
        for name, run in runs.items():
            found[name] = min(found[name], run())
    return found


def show(section: str, found: dict[str, float], count: int, unit: str) -> None:
    """Print a section's line: `found` are seconds of stock and ours for `count` units."""
    stock, ours = (1e6 * found[name] / count for name in ("stock", "ours"))
    print(f"{section:10}{stock:10.2f}{ours:10.2f}{ours - stock:+10.2f} us {unit:24}{100 * (ours / stock - 1):+7.1f} %")


@contextmanager
def patched(is_patched: bool) -> Iterator[None]:
    """vLLM with headgate's patches in it, or without."""
    from headgate.capture.engine.plugin import register, unregister

    if is_patched:
        register()
    try:
        yield
    finally:
        if is_patched:
            assert unregister() == []


@contextmanager
def quiet_gc() -> Iterator[None]:
    """No garbage collection within."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Outputs:
    """256 requests in an `OutputProcessor` whose outputs are read at once, or after every second step."""

    def __init__(self, model: Path, *, is_slow: bool) -> None:
        from vllm.tokenizers import get_tokenizer

        self._tokenizer = get_tokenizer(str(model))
        self._is_slow = is_slow

    def run(self, is_patched: bool) -> float:
        """Return the least seconds of a step."""
        with patched(is_patched), quiet_gc():
            return self._steps()

    def _steps(self) -> float:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
        from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

        processor = OutputProcessor(self._tokenizer, log_stats=False)
        params = SamplingParams(max_tokens=4096, output_kind=RequestOutputKind.DELTA)
        queues = []
        for index in range(RUNNING):
            req_id = f"cmpl-{index:032d}-0"
            request = EngineCoreRequest(
                req_id, [5] * PROMPT, None, params.clone(), None, 0.0, None, None, None, external_req_id=req_id
            )
            queues.append(RequestOutputCollector(params.output_kind, req_id))
            processor.add_request(request, None, None, 0, queues[-1])
        best = float("inf")
        for step in range(STEPS):
            made = [EngineCoreOutput(queue.request_id, [10 + step]) for queue in queues]
            if not self._is_slow:
                start = time.perf_counter()
                self._step(processor, made, queues)
            else:
                more = [EngineCoreOutput(queue.request_id, [11 + step]) for queue in queues]
                start = time.perf_counter()
                processor.process_outputs(made)
                self._step(processor, more, queues)
            best = min(best, time.perf_counter() - start)
        return best

    def _step(self, processor: Any, made: list[Any], queues: list[Any]) -> None:
        processor.process_outputs(made)
        for queue in queues:
            output = queue.get_nowait()
            assert output.outputs[0].token_ids


def outputs(model: Path) -> None:
    for name, is_slow in (("outputs", False), ("merged", True)):
        each = Outputs(model, is_slow=is_slow)
        found = least({"stock": lambda: each.run(False), "ours": lambda: each.run(True)})  # noqa: B023
        show(name, found, RUNNING * (1 + is_slow), "a token")


def application(*, is_ours: bool) -> Any:
    """A server whose one route streams `CHUNKS` pieces, or answers at once; with our middleware or without."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response, StreamingResponse

    app = FastAPI()

    async def pieces() -> Any:
        for _ in range(CHUNKS):
            yield "data: {}\n\n"

    async def answer(request: Request) -> Response:
        body = await request.json()
        return StreamingResponse(pieces()) if body["stream"] else JSONResponse({})

    answer.__annotations__ = {"request": Request, "return": Response}
    app.post("/v1/completions")(answer)
    if is_ours:
        from vllm.entrypoints.cli.serve import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from headgate.capture.engine.server.plugin_routes import Endpoints

        app.state.args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--host", "127.0.0.1"])
        Endpoints().attach_router(app)
    return app


async def ask(app: Any, body: bytes) -> float:
    """Return the seconds that a call takes."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    path = "/v1/completions"
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    scope["asgi"] = {"version": "3.0", "spec_version": "2.3"}

    async def send(message: dict[str, Any]) -> None:
        assert message["type"] != "http.response.start" or message["status"] == 200

    start = time.perf_counter()
    await app(scope, receiver(body), send)
    return time.perf_counter() - start


def server(_: Path) -> None:
    import uvloop

    apps = {name: application(is_ours=name == "ours") for name in ("stock", "ours")}
    long, short = (b'{"prompt": "The capital of", "stream": %s}' % word for word in (b"true", b"false"))

    async def several(app: Any, body: bytes, count: int) -> float:
        return min([await ask(app, body) for _ in range(count)])

    def runs(body: bytes, count: int) -> dict[str, Callable[[], float]]:
        return {name: (lambda app=app: uvloop.run(several(app, body, count))) for name, app in apps.items()}

    with quiet_gc():
        show("chunks", least(runs(long, 2)), CHUNKS, "a piece of an answer")
        show("requests", least(runs(short, 100)), 1, "a request")


class Scheduled:
    """256 requests in the scheduler of an engine core; with steering configured, or without anything of ours."""

    def __init__(self, model: Path, *, is_ours: bool) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        from tests.fakes.steered_core import engine_config, engine_request
        from tests.frontend.conftest import ENGINE

        limits = {"max_num_seqs": RUNNING, "max_num_batched_tokens": 8192, "max_model_len": 1024}
        if is_ours:
            config = engine_config(model, **limits)
        else:
            config = EngineArgs(**{**ENGINE, **limits, "model": str(model)}).create_engine_config()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        for index in range(RUNNING):
            request = engine_request(f"cmpl-{index:032d}-0", [5 + index] * PROMPT, max_tokens=900)
            self._core.add_request(self._core.preprocess_add_request(request)[0])

    def run(self) -> float:
        """Return the least seconds of a step."""
        with quiet_gc():
            return min(self._step() for _ in range(STEPS))

    def _step(self) -> float:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self._core.scheduler
        start = time.perf_counter()
        step = scheduler.schedule()
        seconds = time.perf_counter() - start
        ids = list(step.num_scheduled_tokens)
        assert len(ids) == RUNNING
        index = {req_id: place for place, req_id in enumerate(ids)}
        made = ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=[[7] for _ in ids])
        start = time.perf_counter()
        scheduler.update_from_output(step, made)
        return seconds + time.perf_counter() - start

    def close(self) -> None:
        self._core.shutdown()


def core(model: Path) -> None:
    from headgate.capture.engine.plugin import unregister
    from headgate.capture.engine.worker import install

    cores = {"stock": Scheduled(model, is_ours=False)}
    unregister()  # vLLM has loaded its plugins
    real, install.install = install.install, lambda worker: None  # type: ignore[assignment]
    with patched(True):
        cores["ours"] = Scheduled(model, is_ours=True)
    install.install = real

    def run(name: str) -> float:
        with patched(name == "ours"):
            return cores[name].run()

    show("core", least({name: partial(run, name) for name in ("stock", "ours")}), 1, "a step")
    for each in cores.values():
        each.close()


class Runner:
    """The methods of a model runner that are called in a step; they do nothing."""

    def execute_model(self, scheduler_output: Any) -> None:
        self._prepare_inputs(scheduler_output, None)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled: Any) -> None:
        pass

    def sample_tokens(self, grammar_output: Any) -> None:
        pass

    def _dummy_run(self, num_tokens: int) -> None:
        raise AssertionError("not here")


@contextmanager
def parts(folder: Path) -> Iterator[Any]:
    """The hooks of capture and steering in a worker; a consumer is open."""
    from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
    from headgate.capture.engine.worker.capture_part import CapturePart
    from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
    from headgate.steering.config import parse_config
    from headgate.steering.worker.steering_part import SteeringPart

    sites = (Site(1, HookPoint.POST_MLP),)
    facts = WorkerFacts(
        model=ModelInfo(name="m", num_layers=2, hidden_size=64, dtype="float32", sites=sites),
        owned_layers=(0, 1),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_tokens=2048,
        max_num_seqs=RUNNING,
        is_compiled=False,
    )
    consumer = CaptureConsumerSpec(name="filesystem", params={"root": str(folder)})
    config = CaptureConsumersConfig(consumers=[consumer], staging_bytes=64 << 20)
    steering = SteeringPart(parse_config({"op_sites": {"post_mlp": "all"}}))
    parts = {"steering": steering, "capture": CapturePart(config)}
    for part in parts.values():
        part.headgate_allocate(facts)
    for part in parts.values():
        part.headgate_start(facts)
    yield parts
    for part in parts.values():
        part.headgate_close()


def worker(folder: Path) -> None:
    from headgate.capture.engine.worker.runner import RunnerAdapter

    runners: dict[str, Any] = {"stock": Runner(), "ours": Runner()}
    params = SimpleNamespace(extra_args=None)
    new = [
        SimpleNamespace(req_id=f"cmpl-{index:032d}-0", sampling_params=params, prompt_token_ids=[1])
        for index in range(RUNNING)
    ]
    step = SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[])

    def run(name: str) -> float:
        start = time.perf_counter()
        for _ in range(1000):
            runners[name].execute_model(step)
            runners[name].sample_tokens(None)
        return time.perf_counter() - start

    with parts(folder / "rows") as opened:
        RunnerAdapter(runners["ours"], opened)
        runners["ours"].execute_model(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=new))
        show("worker", least({name: partial(run, name) for name in runners}), 1000, "a step")


SECTIONS = {"outputs": outputs, "server": server, "core": core, "worker": worker}


def main() -> None:
    parser = argparse.ArgumentParser(description="What headgate costs requests that ask for nothing of it.")
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all if none is named")
    chosen = parser.parse_args().sections or list(SECTIONS)
    os.environ.update(VLLM_PLUGINS="headgate", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="WARNING")
    print(f"{'':10}{'stock':>10}{'ours':>10}{'more':>10}")
    with tempfile.TemporaryDirectory() as folder:
        write_model("tiny", Path(folder))
        for name in chosen:
            SECTIONS[name](Path(folder))


if __name__ == "__main__":
    main()
