"""Offloaded KV comes back to requests that are steered alike and to no others; captured rows are computed.

vLLM's connector, scheduler and keys; its worker needs a GPU (`tests/gpu/test_kv_offloading_gpu.py`), so that here a
worker copies in the CPU's memory (`HostMemory`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from headgate.capture.schema.sites import HookPoint
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import HFReference, Steering, relative_error
from tests.engine.steering_cases import MAX_ERROR, Tiers, check_logprobs, document, sites_of, vectors
from tests.engine.tiny_models import tiny_model

BLOCK = 32
PROMPT = [3 + (7 * i) % 500 for i in range(3 * BLOCK + 5)]
OFFLOADED = 3 * BLOCK
SITES = sites_of(HookPoint.PRE_ATTN, HookPoint.POST_MLP)
SITE_MAP = {"pre_attn": "all", "post_mlp": "all"}
ONE, OTHER = vectors(SITES, 1), vectors(SITES, 2)
PLAIN, STEERED = Tiers(), Tiers(base=ONE)


@pytest.fixture(scope="module")
def memory() -> Iterator[None]:
    """Where blocks are offloaded to: on a GPU vLLM's own."""
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")  # sampling is greedy, and FlashInfer may be missing
        if current_platform.is_cpu():
            from tests.fakes.offloading import HostMemory

            patch.setattr(CPUOffloadingSpec, "get_worker", lambda spec, caches: HostMemory(spec, caches))
        yield


@pytest.fixture(scope="module")
def llm(memory: None) -> Iterator[Any]:
    capture = {"consumers": [{"name": "memory"}], "sites": {"post_mlp": "all"}}
    settings: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_batched_tokens": 48,
        "max_logprobs": -1,
        "num_gpu_blocks_override": 20,
        "enable_prefix_caching": True,
        "kv_offloading_size": 0.02,
        "additional_config": {"headgate": {"capture": capture, "steering": {"sites": SITE_MAP}}},
    }
    more = json.loads(os.environ.get("GPU_TEST_ENGINE", "{}"))
    llm = start_llm(model=tiny_model("llama"), in_process=True, **{**settings, **more})
    yield llm
    stop_llm(llm)


@pytest.fixture(scope="module")
def reference() -> HFReference:
    return HFReference(tiny_model("llama"), "llama")


@pytest.fixture(autouse=True)
def nothing_is_stored(llm: Any) -> Iterator[None]:
    llm.reset_prefix_cache(reset_connector=True)
    yield
    llm.steering.clear()


def ask(llm: Any, tiers: Tiers = PLAIN, capture: Any = None) -> Any:
    """The answer to `PROMPT`, whose blocks are not in the KV cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=6, logprobs=-1)
    for name, value in tiers.fields().items():
        setattr(params, name, value)
    if capture is not None:
        params.capture = {"memory": {"hooks": {"post_mlp": "all"}, "positions": capture}}
    llm.reset_prefix_cache()
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return output


def check(output: Any, steering: Steering, reference: HFReference) -> None:
    """Logprobs, and rows where there are any, are those of Hugging Face's model."""
    expected = reference.run(PROMPT, list(output.outputs[0].token_ids), steering)
    check_logprobs(output, expected)
    for result in (getattr(output, "capture_results", None) or {}).values():
        assert result.status == "ok", result.error
        for site, rows in result.payload.rows.items():
            error = relative_error(rows, expected.rows[site][result.payload.positions])
            assert error <= MAX_ERROR, f"{site.name}: {error}"


def loaded(llm: Any, *args: Any) -> tuple[Any, int]:
    """An answer, and how many of its tokens were loaded: no others are cached."""
    output = ask(llm, *args)
    return output, output.num_cached_tokens


def test_a_request_that_asks_for_nothing_gets_blocks_back(llm: Any, reference: Any) -> None:
    first, num_loaded = loaded(llm)
    assert num_loaded == 0

    again, num_loaded = loaded(llm)

    assert num_loaded == OFFLOADED
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    check(again, Steering(), reference)


@pytest.mark.parametrize(("positions", "num_expected"), [("all", 0), ("all_prompt", 0), ("all_generated", OFFLOADED)])
def test_a_capture_recomputes_what_it_needs(llm: Any, reference: Any, positions: str, num_expected: int) -> None:
    ask(llm)

    output, num_loaded = loaded(llm, PLAIN, positions)

    assert num_loaded == num_expected
    rows = output.capture_results["memory"].payload
    begin = len(PROMPT) if positions == "all_generated" else 0
    end = len(PROMPT) + (5 if positions != "all_prompt" else 0)
    assert rows.positions.tolist() == list(range(begin, end))
    check(output, Steering(), reference)


def test_steered_blocks_are_for_requests_that_are_steered_alike(llm: Any, reference: Any) -> None:
    ask(llm, STEERED)

    for tiers, num_expected in (
        (PLAIN, 0),
        (Tiers(base=OTHER), 0),
        (STEERED, OFFLOADED),
        (Tiers(decode=ONE), OFFLOADED),  # its prompt is as the plain one's
    ):
        output, num_loaded = loaded(llm, tiers, "all_generated")
        assert num_loaded == num_expected, tiers
        check(output, tiers.steering(), reference)


def test_global_vectors_divide_blocks_as_well(llm: Any, reference: Any) -> None:
    ask(llm)
    llm.steering.set(**document(STEERED))
    output, num_loaded = loaded(llm)
    assert num_loaded == 0
    check(output, STEERED.steering(), reference)

    assert loaded(llm)[1] == OFFLOADED
    llm.steering.clear()
    output, num_loaded = loaded(llm)

    assert num_loaded == OFFLOADED
    check(output, Steering(), reference)


def test_blocks_of_a_request_that_ran_while_vectors_changed_have_their_new_keys(llm: Any, reference: Any) -> None:
    """The connector had made keys of the hashes that the prompt had when the request came."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=6)
    engine = llm.llm_engine
    engine.add_request("running", {"prompt_token_ids": PROMPT}, params)
    engine.step()  # 48 of its tokens
    llm.steering.set(**document(STEERED))
    while engine.has_unfinished_requests():
        engine.step()

    output, _ = loaded(llm)  # plain but for the global vectors: it may have what was stored
    check(output, STEERED.steering(), reference)
    llm.steering.clear()
    output, num_loaded = loaded(llm)

    assert num_loaded <= BLOCK, "blocks computed under vectors are not those of a request without"
    check(output, Steering(), reference)
