"""What a worker reads in its steps reaches the outputs of the requests that ask: over the model-free worker."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.reading_part import ENTRY_POINTS, PART
from tests.fakes.server import Server, serving
from tests.frontend.conftest import ENGINE, stop

pytestmark = pytest.mark.engine

SETTINGS: dict[str, Any] = {
    **ENGINE,
    "additional_config": {"headgate": {PART: {}}},
    "worker_cls": "tests.fakes.reading_worker.ReadingWorker",
    "num_gpu_blocks_override": 66,
}
"""Room for little more than the longest request, so that several preempt each other."""
PROMPT = list(range(100, 120))


@pytest.fixture(scope="module", autouse=True)
def reading_part(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An installed package with the part, for this process and those that it starts."""
    site = tmp_path_factory.mktemp("parts")
    info = site / "headgate_reading-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headgate-reading\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    before = os.environ.get("PYTHONPATH", "")
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *([before] if before else [])])
    forget_parts()
    yield
    sys.path.remove(str(site))
    os.environ["PYTHONPATH"] = before
    forget_parts()


def forget_parts() -> None:
    """Let this process look for parts anew."""
    from headgate.capture.engine.contracts import parts
    from headgate.capture.engine.requests import sampling_params

    for cached in (parts.request_parts, parts.core_part_names, sampling_params.all_fields):
        cached.cache_clear()
    sampling_params.answer_fields.cache_clear()


def sampling(script: list[int] | None = None, *, asks: Any = True, every_row: Any = None, **kwargs: Any) -> Any:
    from headgate.capture import SamplingParams

    extra = {"script": script, "return_rows": asks, "every_row": every_row}
    return SamplingParams(extra_args={key: value for key, value in extra.items() if value is not None}, **kwargs)


def all_rows(prompt: list[int], token_ids: Any) -> list[int]:
    """One for each token but the last, which is never forwarded."""
    return list(range(len(prompt) + len(token_ids) - 1))


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["FAKE_ASYNC_SCHEDULING"] = "0"
    from vllm import LLM

    from headgate.capture.engine.plugin import register

    register()
    llm = LLM(str(model_dir), **SETTINGS)
    yield llm
    stop(llm.llm_engine)


def run(llm: Any, prompt: list[int], params: Any) -> Any:
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return output


@pytest.mark.parametrize("num_prompt", [1, 20, 1300], ids=["one token", "one step", "chunks"])
def test_an_output_has_every_row_once(llm: Any, num_prompt: int) -> None:
    prompt = [5] * num_prompt

    output = run(llm, prompt, sampling(max_tokens=7))

    assert output.outputs[0].rows == all_rows(prompt, output.outputs[0].token_ids)
    assert output.kv_transfer_params is None


@pytest.mark.parametrize("asks", [None, False])
def test_other_requests_have_none(llm: Any, asks: Any) -> None:
    output = run(llm, PROMPT, sampling(asks=asks, max_tokens=4))

    assert getattr(output.outputs[0], "rows", None) is None


def test_every_sample_has_its_own(llm: Any) -> None:
    output = run(llm, PROMPT, sampling(max_tokens=6, n=3, temperature=1.0))

    assert [sample.rows for sample in output.outputs] == [list(range(25))] * 3


def test_rows_end_with_the_tokens_up_to_a_stop_string(llm: Any) -> None:
    script = [*llm.get_tokenizer().encode(" all is well.", add_special_tokens=False), 900, 901]
    output = run(llm, PROMPT, sampling(script, max_tokens=50, stop=["."]))

    assert output.outputs[0].stop_reason == "."
    assert output.outputs[0].rows == all_rows(PROMPT, output.outputs[0].token_ids)


def test_rows_are_forwarded_where_all_are_wanted_and_otherwise_come_from_the_cache(llm: Any) -> None:
    prompt = list(range(2000, 2128))

    told = [run(llm, prompt, sampling(max_tokens=2, every_row=every)) for every in (True, True, False)]

    assert [output.num_cached_tokens for output in told] == [0, 0, 96]
    assert [output.outputs[0].rows[0] for output in told] == [0, 0, 96]


def test_requests_that_preempt_each_other_lose_nothing_and_tell_nothing_twice(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[index] * 100 for index in range(16)]
    scheduler, preempted = llm.llm_engine.engine_core.engine_core.scheduler, []
    stock = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler,
        "_preempt_request",
        lambda request, *args, **kw: (preempted.append(request), stock(request, *args, **kw)),
    )

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling(max_tokens=200), use_tqdm=False
    )

    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].rows == all_rows(prompt, output.outputs[0].token_ids)
    assert preempted
    assert scheduler._headgate_core.notes._kept == {}
    assert scheduler._headgate_core._part._next == {}


class Engine:
    """An `AsyncLLM` and the event loop that it lives on."""

    def __init__(self, model_dir: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.loop = asyncio.new_event_loop()
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model_dir), **SETTINGS))

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    def generate(self, request_id: str, prompt: list[int] = PROMPT, **kwargs: Any) -> Any:
        return self.llm.generate({"prompt_token_ids": prompt}, sampling(**kwargs), request_id)

    def close(self) -> None:
        self.llm.shutdown()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        del self.llm
        gc.collect()
        self.loop.close()


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Engine]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["FAKE_ASYNC_SCHEDULING"] = "1"
    engine = Engine(model_dir)
    yield engine
    engine.close()


def kind(name: str) -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind[name]


async def listed(outputs: Any) -> list[Any]:
    """The samples of each output: index, rows, tokens and whether it is the last."""
    return [
        (sample.index, list(sample.rows), list(sample.token_ids), sample.finish_reason)
        async for output in outputs
        for sample in output.outputs
    ]


def test_deltas_have_the_rows_since_the_last(engine: Engine) -> None:
    told = engine.run(listed(engine.generate("a", [3] * 700, max_tokens=9, output_kind=kind("DELTA"))))

    assert [row for _, rows, _, _ in told for row in rows] == list(range(700 + 9 - 1))
    assert sum(len(tokens) for _, _, tokens, _ in told) == 9
    assert len(told) > 1


def test_cumulative_outputs_have_all_so_far(engine: Engine) -> None:
    told = engine.run(listed(engine.generate("b", max_tokens=9, output_kind=kind("CUMULATIVE"))))

    assert [rows for _, rows, _, _ in told] == [all_rows(PROMPT, tokens) for _, _, tokens, _ in told]


def test_the_final_output_alone_has_all(engine: Engine) -> None:
    told = engine.run(listed(engine.generate("c", n=2, temperature=1.0, max_tokens=9, output_kind=kind("FINAL_ONLY"))))

    assert [(index, rows) for index, rows, _, _ in told] == [(0, list(range(28))), (1, list(range(28)))]


def test_deltas_of_several_samples_are_told_apart(engine: Engine) -> None:
    told = engine.run(listed(engine.generate("d", n=3, temperature=1.0, max_tokens=9, output_kind=kind("DELTA"))))

    for sample in range(3):
        assert [row for index, rows, _, _ in told if index == sample for row in rows] == list(range(28))


def test_deltas_that_were_merged_lose_nothing(engine: Engine) -> None:
    async def read_late() -> list[Any]:
        outputs = engine.generate("e", n=2, temperature=1.0, max_tokens=30, output_kind=kind("DELTA"))
        first = await anext(outputs)
        # Meanwhile the engine goes on: a request that came later has ended.
        async for _ in engine.generate("f", max_tokens=60, output_kind=kind("FINAL_ONLY"), asks=None):
            pass
        samples = [(sample.index, sample.rows) for sample in first.outputs]
        rest = [output async for output in outputs]
        assert len(rest) < 30
        return samples + [(sample.index, sample.rows) for output in rest for sample in output.outputs]

    async def read_plain() -> list[Any]:
        return [output async for output in engine.generate("g", max_tokens=2, asks=None)]

    told = engine.run(read_late())

    for number in range(2):
        assert [row for index, rows in told if index == number for row in rows] == list(range(20 + 30 - 1))
    assert all(getattr(output.outputs[0], "rows", None) is None for output in engine.run(read_plain()))


def test_an_aborted_request_has_the_rows_of_the_tokens_that_were_told(engine: Engine) -> None:
    async def abort() -> list[Any]:
        told = []
        async for output in engine.generate("h", max_tokens=1000, output_kind=kind("DELTA")):
            told.append(output.outputs[0])
            if sum(len(sample.token_ids) for sample in told) >= 3:
                await engine.llm.abort("h")
        return told

    told = engine.run(abort())

    assert told[-1].finish_reason == "abort"
    tokens = [token for sample in told for token in sample.token_ids]
    assert [row for sample in told for row in sample.rows] == all_rows(PROMPT, tokens)


def test_the_engine_forgets_requests_whose_reader_leaves(engine: Engine) -> None:
    async def leave() -> Any:
        outputs = engine.generate("i", max_tokens=1000)
        await anext(outputs)
        await outputs.aclose()
        while (answer := await known(engine)) != []:
            assert len(answer) == 1
        return answer

    assert engine.run(leave()) == []


async def known(engine: Engine) -> Any:
    """Requests that the part knows in the engine core."""
    from headgate.capture.engine.core.core_calls import AsyncCoreClient

    client = AsyncCoreClient(engine.llm.engine_core, PART, asyncio.Lock())
    (answer,) = await client.call("known", {})
    return answer


def test_preempted_requests_in_flight_lose_nothing_and_tell_nothing_twice(engine: Engine) -> None:
    async def many() -> Any:
        return await asyncio.gather(
            *(
                listed(engine.generate(f"p{index}", [index] * 100, max_tokens=200, output_kind=kind("DELTA")))
                for index in range(16)
            )
        )

    for told in engine.run(many()):
        assert [row for _, rows, _, _ in told for row in rows] == list(range(100 + 200 - 1))


def test_rows_end_with_the_kept_tokens_where_the_engine_ran_ahead(engine: Engine) -> None:
    script = [*engine.llm.get_tokenizer().encode(" all is well.", add_special_tokens=False), 900, 901, 902]
    delta = kind("DELTA")

    async def many() -> Any:
        return await asyncio.gather(
            *(
                listed(engine.generate(f"s{index}", script=script, stop=["."], max_tokens=50, output_kind=delta))
                for index in range(8)
            )
        )

    for told in engine.run(many()):
        tokens = [token for _, _, more, _ in told for token in more]
        assert [row for _, rows, _, _ in told for row in rows] == all_rows(PROMPT, tokens)


CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    flags = [
        *("--served-model-name", "tiny", "--dtype", "bfloat16", "--load-format", "dummy", "--enforce-eager"),
        *("--worker-cls", str(SETTINGS["worker_cls"]), "--block-size", "32", "--max-model-len", "1024"),
        *("--distributed-executor-backend", "uni", "--max-num-seqs", "16"),
        *("--additional-config", json.dumps(SETTINGS["additional_config"])),
    ]
    module = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    with serving([*module, *flags], FAKE_ASYNC_SCHEDULING="1") as running:
        yield running


def complete(server: Server, **body: Any) -> httpx.Response:
    given = {"model": "tiny", "prompt": "The capital of", "max_tokens": 5, "return_rows": True, **body}
    return server.post("/v1/completions", **given)


def chat(server: Server, **body: Any) -> httpx.Response:
    given = {"model": "tiny", "messages": CHAT, "max_tokens": 5, "return_rows": True, **body}
    return server.post("/v1/chat/completions", **given)


def respond(server: Server, **body: Any) -> httpx.Response:
    given = {"model": "tiny", "input": "Hi", "max_output_tokens": 5, "return_rows": True, **body}
    return server.post("/v1/responses", **given)


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("send", [complete, chat], ids=["completion", "chat"])
def test_a_choice_carries_its_rows(server: Server, send: Any) -> None:
    answer = send(server).json()

    assert answer["choices"][0]["rows"] == list(range(answer["usage"]["prompt_tokens"] + 5 - 1))
    assert answer.get("kv_transfer_params") is None


@pytest.mark.parametrize("send", [complete, chat], ids=["completion", "chat"])
def test_chunks_carry_theirs(server: Server, send: Any) -> None:
    whole = send(server).json()["choices"][0]["rows"]

    chunks = events(send(server, stream=True))

    pieces = [choice["rows"] for chunk in chunks for choice in chunk["choices"] if "rows" in choice]
    assert [row for piece in pieces for row in piece] == whole
    assert len(pieces) > 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_every_choice_of_every_prompt_carries_its_own(server: Server, stream: bool) -> None:
    answer = complete(server, prompt=["One", "Two words", "And three"], n=2, temperature=1.0, stream=stream)

    told: dict[int, list[int]] = {index: [] for index in range(6)}
    for chunk in events(answer) if stream else [answer.json()]:
        for choice in chunk["choices"]:
            told[choice["index"]] += choice.get("rows", [])
    assert [told[index] for index in range(6)] == [list(range(size)) for size in (5, 5, 6, 6, 6, 6)]


def test_a_response_carries_them_whole_and_in_its_last_event(server: Server) -> None:
    answer = respond(server).json()
    text = respond(server, stream=True).text

    usage = answer["usage"]
    assert answer["rows"] == list(range(usage["input_tokens"] + usage["output_tokens"] - 1))
    told = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert told[-1]["response"]["rows"] == answer["rows"]
    assert all("rows" not in (event.get("response") or {}) for event in told[:-1])


@pytest.mark.parametrize("send", [complete, chat, respond], ids=["completion", "chat", "response"])
@pytest.mark.parametrize("asks", [None, False])
def test_who_does_not_ask_gets_stock_answers(server: Server, send: Any, asks: Any) -> None:
    assert '"rows"' not in send(server, return_rows=asks).text
    assert '"rows"' not in send(server, return_rows=asks, stream=True).text


BAD = {
    "no flag": ({"return_rows": "yes"}, "return_rows"),
    "by another way": ({"return_rows": None, "vllm_xargs": {"return_rows": 1}}, "vllm_xargs.return_rows"),
    "no such field": ({"return_steering_rows": True}, "return_steering_rows"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("send", [complete, chat, respond], ids=["completion", "chat", "response"])
@pytest.mark.parametrize(("body", "field"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_answered_is_a_400(server: Server, send: Any, body: Any, field: str, stream: bool) -> None:
    response = send(server, stream=stream, **body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_a_response_in_the_background_has_no_place_for_them(server: Server) -> None:
    response = respond(server, background=True, store=True)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "background"


def test_tokens_for_tokens_have_no_place_for_them(server: Server) -> None:
    params = {"max_tokens": 2, "extra_args": {"return_rows": True}}
    response = server.post("/inference/v1/generate", model="tiny", token_ids=PROMPT, sampling_params=params)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "sampling_params.extra_args.return_rows"
