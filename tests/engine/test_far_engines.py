"""Data-parallel engines on two hosts behind one front end: each captures and steers as if it were the only one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from headgate.capture.schema.sites import HookPoint
from tests.conftest import ENGINE_DEFAULTS
from tests.engine.hf_reference import HFReference, Steering, relative_error
from tests.engine.steering_cases import Tiers, added, document, sites_of, vectors
from tests.engine.tiny_models import tiny_model
from tests.fakes.async_engine import AsyncEngine
from tests.fakes.far_host import FarHost, free_port, node_command, second_host

pytestmark = pytest.mark.engine

SITES = {"post_mlp": "all"}
PROMPT = [3 + (7 * i) % 500 for i in range(20)]
NUM_OUTPUT = 5
STREAM = sites_of(HookPoint.POST_MLP)
MOOD, GLOBAL = vectors(STREAM, 5), vectors(STREAM, 6)
SETTINGS: dict[str, Any] = {
    **ENGINE_DEFAULTS,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "data_parallel_size": 2,
    "data_parallel_size_local": 1,
}


class Served(AsyncEngine):
    """An `AsyncLLM` here, with an engine core here and another on another host."""

    def __init__(self, host: FarHost, config: dict[str, Any], far_config: dict[str, Any]) -> None:
        address = {"data_parallel_address": host.here, "data_parallel_rpc_port": free_port()}
        far = {**SETTINGS, **address, "data_parallel_start_rank": 1}
        far["additional_config"] = json.dumps({"headgate": far_config})
        host.start(*node_command(tiny_model("llama"), far))
        super().__init__(tiny_model("llama"), additional_config={"headgate": config}, **SETTINGS, **address)
        self._number = 0

    async def generate(self, rank: int, **fields: Any) -> Any:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=NUM_OUTPUT)
        params.capture, params.capture_wait = {"memory": {"hooks": SITES}}, True
        for name, value in fields.items():
            setattr(params, name, value)
        self._number += 1
        prompt = {"prompt_token_ids": PROMPT}
        async for output in self.llm.generate(prompt, params, f"r-{self._number}", data_parallel_rank=rank):
            last = output
        return last


def settings(stack: ExitStack, folders: pytest.TempPathFactory) -> tuple[FarHost, dict[str, Any]]:
    host, network = second_host(stack, stack.enter_context(pytest.MonkeyPatch.context()), folders)
    # The consumer is located here: the rows of the far engine come over the cable.
    capture = {"consumers": [{"name": "memory", "location": "driver"}], "sites": SITES}
    return host, {"capture": capture, "steering": {"sites": SITES, "max_steering_slots": 64}, "network": network}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        host, config = settings(stack, tmp_path_factory)
        made = Served(host, config, config)
        stack.callback(made.close)
        yield made


@pytest.fixture(scope="module")
def reference() -> HFReference:
    return HFReference(tiny_model("llama"), "llama")


def check_rows(output: Any, reference: HFReference, steering: Steering | None = None) -> None:
    """Compare what was captured with the model run by Hugging Face over the same tokens."""
    expected = reference.run(PROMPT, list(output.outputs[0].token_ids), steering).rows
    result = output.capture_results["memory"]
    assert result.status == "ok", result.error
    assert result.payload.positions.tolist() == list(range(len(PROMPT) + NUM_OUTPUT - 1))
    for site in STREAM:
        assert relative_error(result.payload.rows[site], expected[site]) <= 1e-4, site


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_each_engine_are_the_models(served: Served, reference: HFReference, rank: int) -> None:
    check_rows(served.run(served.generate(rank)), reference)


def test_what_is_registered_and_set_acts_in_the_engines_of_all_hosts(served: Served, reference: HFReference) -> None:
    steering = served.llm.steering
    mood, everywhere = Tiers(prefill=MOOD), Tiers(base=GLOBAL)
    served.run(steering.register("mood", **document(mood)))
    status = served.run(steering.set(**document(everywhere)))
    try:
        outputs = [served.run(served.generate(rank, steering_module_ref=("mood", 2.0))) for rank in (0, 1)]
    finally:
        served.run(steering.clear())
        served.run(steering.unregister("mood"))

    assert status.is_consistent
    acting = Steering(prefill=added([(MOOD, 2.0), (GLOBAL, 1.0)]), decode=GLOBAL)
    for output in outputs:
        check_rows(output, reference, acting)
    for rank in (0, 1):
        check_rows(served.run(served.generate(rank)), reference)


@pytest.mark.extended
def test_a_host_with_other_settings_is_told_before_the_first_request(tmp_path_factory: pytest.TempPathFactory) -> None:
    from vllm.v1.engine.exceptions import EngineGenerateError

    with ExitStack() as stack:
        host, config = settings(stack, tmp_path_factory)
        other = {**config, "steering": {**config["steering"], "max_steering_slots": 63}}
        served = Served(host, config, other)
        stack.callback(served.close)

        for _ in range(2):
            with pytest.raises(EngineGenerateError) as caught:
                served.run(served.generate(0))
            assert "differs from this process on" in str(caught.value.__cause__)
            assert "in: section steering; start every host with" in str(caught.value.__cause__)
        with pytest.raises(type(served.llm.dead_error)):
            served.run(served.llm.check_health())
