"""Prompts with images are captured and steered as others are, on their placeholders too. Hugging Face says what is
right, with the same pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headgate.capture.schema.sites import FINAL_NORM_SITE, INNER_HOOKS, HookPoint, Site
from tests.conftest import start_llm, stop_llm
from tests.engine.byte_tokenizer import IMAGE
from tests.engine.hf_reference import HFReference, relative_error
from tests.engine.steering_cases import MAX_ERROR, Tiers, check_logprobs, sites_of, vectors
from tests.engine.tiny_vision import TILE_TOKENS, TILES, image, pixels, placeholders, vision_model

BLOCK = 32
BEFORE, AFTER = "Look at this picture of something: ", " What is it? Say a word."
TEXT = BEFORE + IMAGE + AFTER
HOOKS = [hook for hook in HookPoint if hook is not HookPoint.FINAL_NORM and hook not in INNER_HOOKS]
SITES = {hook.value: "all" for hook in HOOKS} | {"final_norm": "all"}
PLACES = sites_of(HookPoint.PRE_ATTN, HookPoint.POST_MLP)
PLAIN, ONE = Tiers(), Tiers(base=vectors(PLACES, 1))
OTHER = Tiers(prefill=vectors(PLACES, 2), decode=vectors(PLACES, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(tmp_path_factory.mktemp("models") / "vision")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    capture = {"consumers": [{"name": "memory"}], "sites": SITES}
    llm = start_llm(
        model=folder,
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=48,  # less than the placeholders of an image: it is computed in several steps
        max_logprobs=-1,
        enable_prefix_caching=True,
        limit_mm_per_prompt={"image": 2},
        in_process=True,
        additional_config={"headgate": {"capture": capture, "steering": {}}},
    )
    yield llm
    stop_llm(llm)


@pytest.fixture(autouse=True)
def empty_caches(llm: Any) -> None:
    llm.reset_prefix_cache()
    llm.llm_engine.reset_encoder_cache()


@pytest.fixture(scope="module")
def reference(folder: Path, llm: Any) -> HFReference:
    return HFReference(folder, "idefics3")


def sampling(tiers: Tiers = PLAIN, *, captures: object = None, **fields: Any) -> Any:
    from vllm import SamplingParams

    settings = {"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": 6, "logprobs": -1, **fields}
    params = SamplingParams(**settings)
    for name, value in tiers.fields().items():
        setattr(params, name, value)
    if captures is not None:
        params.capture = {"memory": {"hooks": SITES, "positions": captures}}
    return params


def prompt(*seeds: int, text: str = TEXT) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": [image(seed) for seed in seeds]}}


def check(output: Any, tiers: Tiers, seeds: Sequence[int], reference: HFReference, folder: Path) -> None:
    """All logprobs, and the rows where there are some, against Hugging Face on the same tokens, pixels and vectors."""
    given, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    assert len(placeholders(given)) == TILES * TILE_TOKENS * len(seeds)
    images = pixels(folder, *map(image, seeds)) if seeds else None
    expected = reference.run(given, tokens, tiers.steering(), images)
    check_logprobs(output, expected)
    if not output.capture_results:
        return
    result = output.capture_results["memory"]
    assert result.status == "ok", result.error
    rows = result.payload
    assert rows.positions.tolist() == list(range(len(given) + len(tokens) - 1))
    assert rows.token_ids.tolist() == [*given, *tokens[:-1]]
    assert set(rows.sites) == {*sites_of(*HOOKS), FINAL_NORM_SITE}
    for site in rows.sites:
        assert relative_error(rows[site], expected.rows[site]) <= MAX_ERROR, site.name


CASES: dict[str, tuple[Tiers, bool, tuple[int, ...]]] = {
    "captured": (PLAIN, True, (0,)),
    "plain": (PLAIN, False, (0,)),
    "another image, captured": (PLAIN, True, (1,)),
    "another image": (PLAIN, False, (1,)),
    "steered": (ONE, False, (0,)),
    "another image, steered and captured": (ONE, True, (1,)),
    "steered by phase and captured": (OTHER, True, (0,)),
    "another image, steered by phase": (OTHER, False, (1,)),
    "two images, steered and captured": (ONE, True, (0, 1)),
    "two images, turned around": (ONE, True, (1, 0)),
}


def test_rows_and_answers_are_those_of_the_request_s_own_image(llm: Any, reference: Any, folder: Path) -> None:
    """Requests whose tokens are alike and whose images are not; twice, on top of the prefix cache."""
    text = {1: TEXT, 2: BEFORE + IMAGE + IMAGE + AFTER}
    prompts = [prompt(*seeds, text=text[len(seeds)]) for _, _, seeds in CASES.values()]
    params = [sampling(tiers, captures="all" if captures else None) for tiers, captures, _ in CASES.values()]

    for turn in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output, (name, (tiers, captures, seeds)) in zip(outputs, CASES.items(), strict=True):
            try:
                check(output, tiers, seeds, reference, folder)
            except AssertionError as error:
                raise AssertionError(f"{name}, turn {turn}: {error}") from error
            if turn and not captures:
                assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // BLOCK * BLOCK, name
    assert len({tuple(output.prompt_token_ids) for output in outputs[:-2]}) == 1
    rows = [output.capture_results["memory"].payload[Site(0, HookPoint.PRE_ATTN)] for output in outputs[:3:2]]
    where = placeholders(list(outputs[0].prompt_token_ids))
    assert ((rows[0] - rows[1])[where].abs().amax(-1) > 0.1).all()


def test_a_neighbour_with_an_image_is_the_same_bit_for_bit(llm: Any) -> None:
    """No two begin alike: a neighbour that finds another's first block is computed in other steps, with other sums."""
    prompts = [prompt(seed, text=f"{seed}. {TEXT}") for seed in range(4)]
    stock = llm.generate(prompts, [sampling() for _ in prompts], use_tqdm=False)
    llm.reset_prefix_cache()
    llm.llm_engine.reset_encoder_cache()

    params = [sampling(ONE, captures="all"), sampling(), sampling(OTHER), sampling()]
    beside = llm.generate(prompts, params, use_tqdm=False)

    for plain, output in zip(stock[1::2], beside[1::2], strict=True):
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        assert logprobs(output) == logprobs(plain)


def logprobs(output: Any) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs]


def chat(*seeds: int) -> list[dict[str, Any]]:
    pictures = [{"type": "image_pil", "image_pil": image(seed)} for seed in seeds]
    return [
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, *pictures]},
        {"role": "assistant", "content": [{"type": "text", "text": "I see."}]},
        {"role": "user", "content": [{"type": "text", "text": "Again!"}]},
    ]


def test_a_message_with_an_image_is_found_and_its_image_is_sent_once_again(llm: Any) -> None:
    """The beginnings of the chat are rendered for it, which must not count as sending their images to the engine."""
    conversation, message = chat(10, 11), {"role": "user", "index": 0}
    (found,) = llm.chat(conversation, sampling(captures=message), use_tqdm=False)
    (whole,) = llm.chat(conversation, sampling(captures="all"), use_tqdm=False)

    first, everything = (output.capture_results["memory"].payload for output in (found, whole))
    tokens = list(whole.prompt_token_ids)
    assert first.positions.tolist() == list(range(placeholders(tokens)[-1] + 3))
    for site in first.sites:
        assert torch.equal(first[site], everything[site][first.positions]), site.name
    _, (handle,) = llm.capture(conversation, sampling(), sites=["0.pre_attn"], positions="all_prompt", use_tqdm=False)
    spans = handle.messages
    assert [(span.role, span.token_ids) for span in spans] == [
        (message["role"], tokens[span.start : span.stop]) for message, span in zip(conversation, spans, strict=True)
    ]
    assert (spans[0].start, spans[0].stop) == (0, len(first))
    assert torch.equal(handle.message(0)["0.pre_attn"], first["0.pre_attn"])


def test_an_image_of_a_refused_request_is_sent_by_the_next_one(llm: Any, reference: Any, folder: Path) -> None:
    wrong = sampling()
    wrong.capture = {"memory": {"hooks": {"post_mlp": [99]}}}
    given = [prompt(seed) for seed in (20, 21, 22)]
    with pytest.raises(ValueError, match=r"capture\.memory.*99"):
        llm.generate(given, [sampling(), wrong, sampling()], use_tqdm=False)

    outputs = llm.generate(given, sampling(captures="all"), use_tqdm=False)

    for seed, output in zip((20, 21, 22), outputs, strict=True):
        check(output, PLAIN, (seed,), reference, folder)
