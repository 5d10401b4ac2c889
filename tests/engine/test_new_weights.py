"""New weights in a running engine, as RL trainers load them: what is captured and steered afterwards is of those."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.schema.sites import HookPoint
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import HFReference, relative_error
from tests.engine.lora_adapter import merge, write_adapter
from tests.engine.steering_cases import MAX_ERROR, Tiers, check_logprobs, sites_of, vectors
from tests.engine.tiny_models import tiny_model

HOOKS = [HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP, HookPoint.ATTN_OUT, HookPoint.MLP_OUT]
SITES = {hook.value: "all" for hook in HOOKS} | {"final_norm": "all"}
ONE = Tiers(base=vectors(sites_of(HookPoint.PRE_ATTN, HookPoint.POST_MLP), 1))
PROMPT = [3 + (7 * i) % 500 for i in range(69)]
CACHED = 64


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with other weights in every linear module."""
    folder, model = tmp_path_factory.mktemp("trained"), tiny_model("llama")
    return merge(model, write_adapter(model, folder / "change"), folder / "model")


@pytest.fixture(scope="module", params=["eager", pytest.param("compiled", marks=pytest.mark.extended)])
def llm(request: pytest.FixtureRequest, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    capture = {"consumers": [{"name": "memory"}], "sites": SITES}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        llm = start_llm(
            model=tiny_model("llama"),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=request.param == "eager",
            max_model_len=128,
            max_num_batched_tokens=48,
            max_logprobs=-1,
            enable_prefix_caching=True,
            in_process=True,
            additional_config={"headgate": {"capture": capture, "steering": {}}},
        )
    yield llm
    stop_llm(llm)


def generate(llm: Any) -> list[Any]:
    """The prompt captured and steered, captured, steered, and plain."""
    from vllm import SamplingParams

    made = []
    for tiers, captures in ((ONE, True), (Tiers(), True), (ONE, False), (Tiers(), False)):
        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=6, logprobs=-1)
        for name, value in tiers.fields().items():
            setattr(params, name, value)
        if captures:
            params.capture = {"memory": {"hooks": SITES, "positions": "all"}}
        made.append(params)
    return list(llm.generate([{"prompt_token_ids": PROMPT} for _ in made], made, use_tqdm=False))


def check(outputs: list[Any], folder: Path) -> None:
    reference = HFReference(folder, "llama")
    for output, tiers in zip(outputs, (ONE, Tiers()) * 2, strict=True):
        expected = reference.run(PROMPT, list(output.outputs[0].token_ids), tiers.steering())
        check_logprobs(output, expected)
        for result in (getattr(output, "capture_results", None) or {}).values():
            assert result.status == "ok", result.error
            for site in result.payload.sites:
                assert relative_error(result.payload[site], expected.rows[site]) <= MAX_ERROR, site.name


def test_rows_and_vectors_are_of_the_weights_as_they_are(llm: Any, trained: Path) -> None:
    """There and back, each time twice: the second time on top of the prefix cache, which the trainer reset."""
    for folder in (tiny_model("llama"), trained, tiny_model("llama")):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        llm.reset_prefix_cache()
        for _ in range(2):
            outputs = generate(llm)
            check(outputs, folder)
        assert [output.num_cached_tokens for output in outputs[2:]] == [CACHED, CACHED]

    old, new = (HFReference(folder, "llama").run(PROMPT, [5]).rows for folder in (tiny_model("llama"), trained))
    site = sites_of(HookPoint.POST_MLP)[0]
    assert relative_error(new[site], old[site]) > 0.1
