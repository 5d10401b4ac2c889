"""What a worker reads in its steps reaches the outputs of the requests that ask: over the model-free worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.async_engine import AsyncEngine
from tests.fakes.reading_part import PART, WORKER, installed
from tests.frontend.conftest import ENGINE, stop

pytestmark = pytest.mark.engine

SETTINGS: dict[str, Any] = {
    **ENGINE,
    "additional_config": {"headgate": {PART: {}}},
    "worker_cls": WORKER,
    "num_gpu_blocks_override": 66,
}
"""Room for little more than the longest request, so that several preempt each other."""
PROMPT = list(range(100, 120))


@pytest.fixture(scope="module", autouse=True)
def reading_part(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(tmp_path_factory.mktemp("parts")):
        yield


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
    os.environ["TESTS_ASYNC_SCHEDULING"] = "0"
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


class Engine(AsyncEngine):
    """An `AsyncLLM` whose worker notes something about each row."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir, **SETTINGS)

    def generate(self, request_id: str, prompt: list[int] = PROMPT, **kwargs: Any) -> Any:
        return self.llm.generate({"prompt_token_ids": prompt}, sampling(**kwargs), request_id)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Engine]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["TESTS_ASYNC_SCHEDULING"] = "1"
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


def test_an_id_that_comes_again_while_a_step_of_it_runs_is_told_its_own_rows_alone(engine: Engine) -> None:
    """Each round leaves a request in the middle of its answer; with async scheduling a step of it is in flight then."""

    async def leave_and_come_again(round_: int) -> tuple[list[int], list[int]]:
        left = engine.generate("again", [7] * 50, max_tokens=1000, output_kind=kind("DELTA"))
        await anext(left)
        await engine.llm.abort("again")
        prompt = [8] * (3 + round_)
        told = await listed(engine.generate("again", prompt, max_tokens=5, output_kind=kind("DELTA")))
        await left.aclose()
        return [row for _, rows, _, _ in told for row in rows], list(range(len(prompt) + 4))

    async def rounds() -> list[Any]:
        return [await leave_and_come_again(round_) for round_ in range(20)]

    for told, expected in engine.run(rounds()):
        assert told == expected


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
    from headgate.capture.engine.contracts.core_calls import AsyncCoreClient

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
