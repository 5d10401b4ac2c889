"""`AsyncLLM` over the model-free worker: checks in the call, results on the last output, aborts, patience."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.schema.errors import RequestError
from tests.fakes.async_engine import AsyncEngine
from tests.frontend.conftest import ENGINE, capture_settings

pytestmark = pytest.mark.engine

HOOKS = {"hooks": {"post_mlp": [3]}}
PROMPT = list(range(100, 120))


class Engine(AsyncEngine):
    """An `AsyncLLM` that captures, over the fake worker."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir, additional_config=capture_settings(), **ENGINE)

    @property
    def hub(self) -> Any:
        from headgate.capture.engine.requests.capture_frontend import front_end_of

        front = front_end_of(self.llm)
        assert front is not None
        return front.hub

    async def worker_is_idle(self) -> None:
        """Wait until the worker knows of no request; each look at it goes between two steps of the engine."""
        while (await self.llm.collective_rpc("headgate_stats"))[0] != {"running": [], "ended": []}:
            pass


@pytest.fixture(scope="module", params=["0", "1"], ids=["sync-scheduling", "async-scheduling"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Engine]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["TESTS_ASYNC_SCHEDULING"] = request.param
    engine = Engine(model_dir)
    yield engine
    engine.close()


def sampling(**kwargs: Any) -> Any:
    from headgate.capture import SamplingParams

    return SamplingParams(**{"capture": {"rows": HOOKS}, "capture_wait": True, "max_tokens": 6, **kwargs})


async def last_of(outputs: Any) -> Any:
    last = None
    async for output in outputs:
        assert last is None or not last.capture_results
        last = output
    return last


def generate(engine: Engine, request_id: str, prompt: Any = None, **kwargs: Any) -> Any:
    return engine.llm.generate(prompt or {"prompt_token_ids": PROMPT}, sampling(**kwargs), request_id)


def test_the_last_output_carries_the_results(engine: Engine) -> None:
    output = engine.run(last_of(generate(engine, "a")))

    result = output.capture_results["rows"]
    assert result.status == "ok"
    assert result.payload["rows"] == list(range(20 + 6 - 1))
    assert result.payload["wire"]["id"] == "a"
    assert output.outputs[0].capture_results["rows"] == result


def test_a_stream_of_deltas_carries_the_results_of_each_sample(engine: Engine) -> None:
    from vllm.sampling_params import RequestOutputKind

    output = engine.run(
        last_of(generate(engine, "b", n=3, temperature=1.0, output_kind=RequestOutputKind.DELTA, max_tokens=4))
    )

    assert [len(sample["rows"]) for sample in output.capture_results["rows"].payload] == [23, 23, 23]
    for completion in output.outputs:
        assert completion.capture_results["rows"].num_rows == 23


def test_positions_of_a_text_are_resolved_once_it_is_tokenised(engine: Engine) -> None:
    capture = {"rows": {**HOOKS, "positions": [-1]}}
    output = engine.run(last_of(generate(engine, "c", "Some text to be tokenised", capture=capture)))

    last_prompt = len(output.prompt_token_ids) - 1
    assert output.capture_results["rows"].payload["spec"]["positions"] == [last_prompt]


def test_a_bad_spec_is_refused_in_the_call_itself(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"capture\.nobody: no such consumer"):
        generate(engine, "d", capture={"nobody": {}})


def test_a_position_before_a_known_prompt_is_refused_in_the_call_itself(engine: Engine) -> None:
    rendered = {"type": "token", "prompt_token_ids": PROMPT}

    with pytest.raises(RequestError, match="lies before the prompt"):
        generate(engine, "e", rendered, capture={"rows": {**HOOKS, "positions": [-21]}})


def test_a_position_before_a_text_is_refused_as_well(engine: Engine) -> None:
    with pytest.raises(RequestError, match="lies before the prompt"):
        engine.run(last_of(generate(engine, "f", "One", capture={"rows": {**HOOKS, "positions": [-500]}})))

    assert engine.hub.stats().waiting == 0


def test_a_stream_of_inputs_is_refused(engine: Engine) -> None:
    async def inputs() -> Any:
        yield None

    with pytest.raises(RequestError, match="streamed input"):
        generate(engine, "g", inputs())


def test_an_aborted_request_has_the_rows_of_the_tokens_that_were_told(engine: Engine) -> None:
    async def abort_after_three() -> Any:
        last = None
        async for output in generate(engine, "h", max_tokens=1000):
            last = output
            if not output.finished and len(output.outputs[0].token_ids) >= 3:
                await engine.llm.abort("h")
        return last

    output = engine.run(abort_after_three())

    assert output.outputs[0].finish_reason == "abort"
    told = output.capture_results["rows"]
    if told.status == "ok":  # an aborted request does not wait long
        assert told.payload["status"] == "abort"
        assert told.payload["rows"] == list(range(20 + len(output.outputs[0].token_ids) - 1))
    engine.run(engine.worker_is_idle())


def test_a_request_whose_reader_leaves_is_forgotten(engine: Engine) -> None:
    async def leave() -> None:
        outputs = generate(engine, "i", max_tokens=1000)
        await anext(outputs)
        await outputs.aclose()

    engine.run(leave())

    assert engine.hub.stats().waiting == 0
    engine.run(engine.worker_is_idle())


def test_a_request_whose_task_is_cancelled_is_forgotten(engine: Engine) -> None:
    async def cancel() -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in generate(engine, "j", max_tokens=1000):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    engine.run(cancel())

    assert engine.hub.stats().waiting == 0
    engine.run(engine.worker_is_idle())


def test_the_engine_runs_ahead_of_a_stop_string(engine: Engine) -> None:
    tokenizer = engine.llm.get_tokenizer()
    script = [*tokenizer.encode(" all is well.", add_special_tokens=False), 2]

    async def many() -> Any:
        requests = [
            last_of(generate(engine, f"k{i}", max_tokens=50, stop=["."], extra_args={"script": script}))
            for i in range(24)
        ]
        return await asyncio.gather(*requests)

    for output in engine.run(many()):
        assert output.outputs[0].stop_reason == "."
        told = output.capture_results["rows"].payload
        assert told["status"] == "stop"
        assert told["rows"] == list(range(20 + len(output.outputs[0].token_ids) - 1))


def test_a_request_without_capture_is_left_alone(engine: Engine) -> None:
    output = engine.run(last_of(generate(engine, "l", capture=None, capture_wait=None)))

    assert not output.capture_results
    assert engine.hub.stats().waiting == 0


CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello you"},
    {"role": "user", "content": "Bye"},
]
SITES = ["3.post_mlp"]


def test_handles_are_awaited(engine: Engine) -> None:
    async def capture() -> Any:
        outputs, handles = await engine.llm.capture([CHAT, CHAT[:1]], sampling(capture=None), sites=SITES)
        return outputs, handles, await asyncio.gather(*handles)

    outputs, handles, rows = engine.run(capture())

    assert [output.request_id for output in outputs] == [handle.request_id for handle in handles]
    assert [one.token_ids.tolist() for one in rows] == [
        [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1] for output in outputs
    ]
    assert handles[0].fetch() is rows[0]
    said = engine.llm.get_tokenizer().decode(handles[0].message(1).token_ids)
    assert said == "<|im_start|>assistant\nHello you<|im_end|>\n"


def test_selectors_of_messages_are_resolved_for_each_chat(engine: Engine) -> None:
    positions = {"role": "user", "index": -1}
    _, handles = engine.run(
        engine.llm.capture([CHAT, CHAT[:1]], sampling(capture=None), sites=SITES, positions=positions)
    )

    for handle in handles:
        span, wanted = handle.messages[-1], handle.result.payload["spec"]["positions"]
        assert (wanted["start"], wanted["stop"]) == (span.start, span.stop)
        handle.discard()


def test_prompts_that_are_refused_take_the_others_with_them(engine: Engine) -> None:
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": [1]}]

    with pytest.raises(RequestError, match=r"^capture\.rows\.positions: position -5 lies before the prompt"):
        engine.run(engine.llm.capture(prompts, sampling(capture=None, max_tokens=1000), sites=SITES, positions=[-5]))
    with pytest.raises(RequestError, match=r"^tools: is for chats"):
        engine.run(engine.llm.capture(prompts, sites=SITES, tools=[]))
    with pytest.raises(RequestError, match=r"^sampling_params: expected one or 2"):
        engine.run(engine.llm.capture(prompts, [sampling(capture=None)], sites=SITES))

    assert engine.hub.stats().waiting == 0
    engine.run(engine.worker_is_idle())
