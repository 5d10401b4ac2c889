"""Requests of every kind are captured and steered rightly, or refused by name: with a LoRA adapter, under a grammar,
given as embeddings, and after the engine slept. One engine that does all of it; Hugging Face says what is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from tests.conftest import start_llm, stop_llm
from tests.engine.byte_tokenizer import with_tokenizer
from tests.engine.hf_reference import HFReference, relative_error
from tests.engine.lora_adapter import merge, write_adapter
from tests.engine.steering_cases import MAX_ERROR, Tiers, check_logprobs, document, sites_of, vectors
from tests.engine.tiny_models import tiny_model

BLOCK = 32
PROMPT = [3 + (7 * i) % 500 for i in range(2 * BLOCK + 5)]
CACHED = 2 * BLOCK
HOOKS = [HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP, HookPoint.ATTN_OUT, HookPoint.MLP_OUT]
SITES = {hook.value: "all" for hook in HOOKS} | {"final_norm": "all"}
PLACES = sites_of(HookPoint.PRE_ATTN, HookPoint.POST_MLP)
ONE, OTHER = Tiers(base=vectors(PLACES, 1)), Tiers(prefill=vectors(PLACES, 2), decode=vectors(PLACES, 3))
PLAIN = Tiers()


class Folders(NamedTuple):
    """Model, adapter, and both merged."""

    model: Path
    adapter: Path
    merged: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root, model = tmp_path_factory.mktemp("models"), tiny_model("llama")
    adapter = write_adapter(model, root / "adapter")
    return Folders(with_tokenizer(model, root / "model"), adapter, merge(model, adapter, root / "merged"))


@pytest.fixture(scope="module")
def llm(folders: Folders) -> Iterator[Any]:
    capture = {"consumers": [{"name": "memory"}], "sites": SITES}
    llm = start_llm(
        model=folders.model,
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=48,
        max_logprobs=-1,
        enable_prefix_caching=True,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,  # vLLM's CPU kernels take the last adapter for a request without one: that place stays empty
        enable_prompt_embeds=True,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        in_process=True,
        additional_config={"headgate": {"capture": capture, "steering": {}}},
    )
    yield llm
    stop_llm(llm)


@pytest.fixture(autouse=True)
def empty_cache(llm: Any) -> None:
    llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def base(folders: Folders, llm: Any) -> HFReference:
    return HFReference(folders.model, "llama")


@pytest.fixture(scope="module")
def merged(folders: Folders, llm: Any) -> HFReference:
    return HFReference(folders.merged, "llama")


def sampling(tiers: Tiers = PLAIN, *, captures: bool = False, **fields: Any) -> Any:
    from vllm import SamplingParams

    settings = {"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": 6, "logprobs": -1, **fields}
    params = SamplingParams(**settings)
    for name, value in tiers.fields().items():
        setattr(params, name, value)
    if captures:
        params.capture = {"memory": {"hooks": SITES, "positions": "all"}}
    return params


def check_rows(output: Any, tiers: Tiers, reference: HFReference) -> None:
    """Every captured row, against Hugging Face on the same tokens with the same vectors."""
    result, tokens = output.capture_results["memory"], list(output.outputs[0].token_ids)
    assert result.status == "ok", result.error
    expected = reference.run(list(output.prompt_token_ids), tokens, tiers.steering()).rows
    assert set(result.payload.sites) == {*sites_of(*HOOKS), FINAL_NORM_SITE}
    assert result.payload.positions.tolist() == list(range(len(output.prompt_token_ids) + len(tokens) - 1))
    for site in result.payload.sites:
        assert relative_error(result.payload[site], expected[site]) <= MAX_ERROR, site.name


def check(output: Any, tiers: Tiers, reference: HFReference) -> None:
    """All logprobs, and the rows where there are some."""
    check_logprobs(
        output, reference.run(list(output.prompt_token_ids), list(output.outputs[0].token_ids), tiers.steering())
    )
    if getattr(output, "capture_results", None):
        check_rows(output, tiers, reference)


CASES = [
    ("plain", PLAIN, False, False),
    ("adapter", PLAIN, True, False),
    ("adapter, captured", PLAIN, True, True),
    ("captured", PLAIN, False, True),
    ("adapter, steered and captured", ONE, True, True),
    ("steered and captured", ONE, False, True),
    ("adapter, steered otherwise", OTHER, True, False),
    ("adapter, steered", ONE, True, False),
]


def test_adapters_beside_plain_requests_captured_and_steered(
    llm: Any, folders: Folders, base: Any, merged: Any
) -> None:
    """Twice: the second time on top of what the first left in the prefix cache."""
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("ours", 1, str(folders.adapter))
    prompts = [{"prompt_token_ids": PROMPT} for _ in CASES]
    params = [sampling(tiers, captures=captures) for _, tiers, _, captures in CASES]
    lora = [adapter if adapted else None for _, _, adapted, _ in CASES]

    for turn in range(2):
        outputs = llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
        for output, (name, tiers, adapted, captures) in zip(outputs, CASES, strict=True):
            try:
                check(output, tiers, merged if adapted else base)
            except AssertionError as error:
                raise AssertionError(f"{name}, turn {turn}: {error}") from error
            if turn and not captures:
                assert output.num_cached_tokens == CACHED, name
    ours = merged.run(PROMPT, [5]).rows[Site(0, HookPoint.POST_MLP)]
    assert relative_error(ours, base.run(PROMPT, [5]).rows[Site(0, HookPoint.POST_MLP)]) > 0.1


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}, "b": {"type": "boolean"}}, "required": ["n", "b"]}


@pytest.mark.parametrize("grammar", ["json", "regex"])
def test_grammars_hold_while_requests_are_captured_and_steered(llm: Any, base: Any, grammar: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    wanted = {"json": SCHEMA, "regex": "[ab]{3}-[0-9]{4}"}
    params = [
        sampling(
            tiers,
            captures=True,
            max_tokens=80,
            ignore_eos=False,
            detokenize=True,
            structured_outputs=StructuredOutputsParams(**{grammar: wanted[grammar]}),
        )
        for tiers in (PLAIN, ONE, OTHER)
    ]

    outputs = llm.generate([{"prompt_token_ids": PROMPT} for _ in params], params, use_tqdm=False)

    for output, tiers in zip(outputs, (PLAIN, ONE, OTHER), strict=True):
        text = output.outputs[0].text
        if grammar == "json":
            assert set(json.loads(text)) == {"n", "b"}
        else:
            assert len(text) == 8, text
        check_rows(output, tiers, base)


def embedded(reference: HFReference) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {"prompt_embeds": reference.model.get_input_embeddings()(torch.tensor(PROMPT))}


@pytest.mark.parametrize("field", ["capture.memory", "steering_vectors"])
def test_a_prompt_of_embeddings_is_refused_by_name(llm: Any, base: Any, field: str) -> None:
    made = sampling(ONE) if field == "steering_vectors" else sampling(captures=True)

    with pytest.raises(ValueError, match=f"{field}: a prompt given as embeddings cannot be captured or steered"):
        llm.generate([embedded(base)], made, use_tqdm=False)


def test_a_prompt_of_embeddings_shares_no_blocks_and_runs_under_global_vectors(llm: Any, base: Any) -> None:
    (plain,) = llm.generate([embedded(base)], sampling(), use_tqdm=False)
    llm.steering.set(**document(OTHER))
    try:
        steered = [llm.generate([embedded(base)], sampling(), use_tqdm=False)[0] for _ in range(2)]
        (by_tokens,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling(), use_tqdm=False)
    finally:
        llm.steering.clear()
    (after,) = llm.generate([embedded(base)], sampling(), use_tqdm=False)

    for output, tiers in ((plain, PLAIN), *((output, OTHER) for output in steered), (after, PLAIN)):
        tokens = list(output.outputs[0].token_ids)
        output.prompt_token_ids = PROMPT
        check_logprobs(output, base.run(PROMPT, tokens, tiers.steering()))
    check(by_tokens, OTHER, base)
    assert [output.num_cached_tokens for output in (*steered, by_tokens)] == [0, CACHED, 0]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_after_sleep_rows_and_vectors_are_right(llm: Any, base: Any, level: int) -> None:
    """vLLM frees nothing on a CPU, but pauses, drops its cache and wakes as on a GPU."""
    llm.steering.register("mood", **document(OTHER))
    named = sampling()
    named.steering_name = "mood"

    llm.sleep(level)
    llm.wake_up()
    params = [sampling(ONE, captures=True), sampling(captures=True), named]
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(params), params, use_tqdm=False)
    llm.steering.unregister("mood")

    for output, tiers in zip(outputs, (ONE, PLAIN, OTHER), strict=True):
        check(output, tiers, base)
    (slots,) = llm.steering.status().slots
    assert (slots.reserved, slots.waiting) == (0, 0)
