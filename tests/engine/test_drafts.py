"""Speculative decoding: rows of accepted tokens alone, each once, at the position that it has in the answer.

Every row is compared with Hugging Face on the final sequence. One engine with few KV blocks, so that requests are
preempted, and small steps, so that prompts come in chunks between drafts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint
from tests.conftest import stop_llm
from tests.engine.drafting import (
    CONSUMERS,
    SITES,
    Asked,
    check,
    counts,
    draft,
    eagle_folder,
    generate,
    greedy,
    requests,
    start,
)
from tests.engine.hf_reference import HFReference, Steering
from tests.engine.steering_cases import Case, Tiers, sites_of, vectors
from tests.engine.tiny_models import tiny_model
from tests.fresh_python import run_python

REQUESTS = requests()
EVERYWHERE = sites_of(HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP)
(OP_SITE,) = sites_of(HookPoint.POST_MLP, layers=[1])
AXIS = vectors(EVERYWHERE, 1)[OP_SITE].numpy()
STEERED = [
    Tiers(base=vectors(EVERYWHERE, 1, 0.5)),
    Tiers(prefill=vectors(EVERYWHERE, 2, 0.5), decode=vectors(EVERYWHERE, 3, 0.5)),
    Case("ablated", operations=(("decode", OP_SITE, {"method": "ablate", "vector": AXIS, "scale": 1.0}),)),
]


@pytest.fixture(scope="module")
def reference() -> HFReference:
    return HFReference(tiny_model("llama"), "llama")


@pytest.fixture(scope="module")
def answers(reference: HFReference) -> dict[tuple[int, ...], list[int]]:
    return {asked.prompt: greedy(reference, asked.prompt) for asked in REQUESTS}


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    steering = {"op_sites": {"post_mlp": [1]}}
    config = {"headgate": {"capture": {"consumers": CONSUMERS, "sites": SITES}, "steering": steering}}
    llm = start(additional_config=config)
    yield llm
    stop_llm(llm)


def test_rows_are_of_accepted_tokens_alone_each_once_at_its_position(llm, reference, answers):
    draft(llm, answers, REQUESTS)
    order, before = random.Random(1).sample(REQUESTS, len(REQUESTS)), counts(llm)

    found = generate(llm, order, [each.params(answers[each.prompt], capture=each.capture) for each in order])

    for asked, (tokens, captured) in zip(order, found, strict=True):
        assert tokens == asked.answer(answers[asked.prompt]), asked
        check(asked, tokens, captured, reference)
    more = {name: value - before.get(name, 0) for name, value in counts(llm).items()}
    assert 0.2 < more["spec_decode_num_accepted_tokens"] / more["spec_decode_num_draft_tokens"] < 0.8
    assert more["num_preemptions"] > 0


def test_rows_after_a_prompt_from_the_prefix_cache_are_of_accepted_tokens(llm, reference, answers):
    (asked,) = [each for each in REQUESTS if each.rights == "some" and each.positions == "all_generated"][:1]
    draft(llm, answers, [asked])

    for is_cached in (False, True):
        before = counts(llm)["prefix_cache_hits"]
        ((tokens, captured),) = generate(llm, [asked], [asked.params(answers[asked.prompt], capture=asked.capture)])

        assert tokens == asked.answer(answers[asked.prompt])
        check(asked, tokens, captured, reference)
        assert not is_cached or counts(llm)["prefix_cache_hits"] > before


def test_steered_answers_and_rows_are_those_without_drafts(llm, reference):
    asked = [Asked(each.prompt, each.rights) for each in REQUESTS[3:9]]
    steers = [STEERED[index % len(STEERED)] for index in range(len(asked))]
    steering: list[Steering] = [each.steering() for each in steers]
    found = [greedy(reference, each.prompt, acts) for each, acts in zip(asked, steering, strict=True)]
    answers = {each.prompt: tokens for each, tokens in zip(asked, found, strict=True)}
    draft(llm, answers, asked)

    params = [
        each.params(answers[each.prompt], capture=each.capture, **acts.fields())
        for each, acts in zip(asked, steers, strict=True)
    ]
    for each, acts, (tokens, captured) in zip(asked, steering, generate(llm, asked, params), strict=True):
        assert tokens == answers[each.prompt], each
        check(each, tokens, captured, reference, acts)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (
            {"steering_gates": [{"when": "always", "then": {"vectors": {"post_mlp": {"1": AXIS.tolist()}}}}]},
            "steering_gates.*decodes speculatively",
        ),
        (
            {
                "steering_ops": [
                    {"at": OP_SITE.name, "method": "ablate", "vector": AXIS.tolist(), "positions": [0, 120]}
                ]
            },
            r"steering_ops\[0\].positions",
        ),
    ],
)
def test_what_needs_to_know_the_accepted_rows_is_refused_by_name(llm, fields, name):
    asked = REQUESTS[0]

    with pytest.raises(RequestError, match=name):
        llm.generate([{"prompt_token_ids": list(asked.prompt)}], [asked.params([], **fields)], use_tqdm=False)


@pytest.mark.extended
@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_a_draft_model_is_neither_captured_nor_steered(method, reference, answers):
    model = tiny_model("llama") if method == "draft_model" else eagle_folder(method, tiny_model("llama"))
    drafts = {"method": method, "model": str(model), "num_speculative_tokens": 3}
    config = {"headgate": {"capture": {"consumers": CONSUMERS, "sites": SITES}}}
    llm = start(speculative_config=drafts, additional_config=config, in_process=False)
    try:
        params = [each.params(answers[each.prompt], capture=each.capture) for each in REQUESTS]
        for asked, (tokens, captured) in zip(REQUESTS, generate(llm, REQUESTS, params), strict=True):
            assert tokens == asked.answer(answers[asked.prompt]), asked
            check(asked, tokens, captured, reference)
        accepted = counts(llm)["spec_decode_num_accepted_tokens"] / counts(llm)["spec_decode_num_draft_tokens"]
        assert accepted > 0.9 if method == "draft_model" else accepted < 0.5
    finally:
        stop_llm(llm)


@pytest.mark.extended
def test_the_v2_runner_tells_the_same_rows_apart():
    environment = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

    done = run_python(["-m", "tests.engine.drafting"], environment=environment, may_fork=False)

    assert "RAN vllm.v1.worker.cpu.model_runner" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
