"""Steered KV is served to those alone who ask for the same: every case is right, hit or not, against Hugging Face.

One engine that steers and captures nothing, with so few KV blocks that long answers get preempted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headgate.capture.schema.sites import HookPoint
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import HFReference, Steering, relative_error
from tests.engine.steering_cases import (
    MAX_ERROR,
    TRANSCODERS,
    Case,
    Tiers,
    added,
    check_logprobs,
    document,
    logprobs_of,
    saved_saes,
    sites_of,
    vectors,
)
from tests.engine.tiny_models import tiny_model

BLOCK = 32
PROMPT = [3 + (7 * i) % 500 for i in range(3 * BLOCK + 5)]
CACHED = 3 * BLOCK
LONG = 60
"""An answer that fills the prompt's last block and one more."""

SITES = sites_of(HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP)
ONE, OTHER = vectors(SITES, 1), vectors(SITES, 2)
PLAIN = Tiers()
BASE, OTHER_BASE = Tiers(base=ONE), Tiers(base=OTHER)
PREFILL = Tiers(prefill=ONE)
DECODE = Tiers(decode=ONE)
BOTH = Tiers(prefill=ONE, decode=OTHER)

(OP_SITE,) = sites_of(HookPoint.POST_MLP, layers=[1])
AXIS, AWAY = ONE[OP_SITE].numpy(), OTHER[OP_SITE].numpy()
ABLATION = ("both", OP_SITE, {"method": "ablate", "vector": AXIS, "scale": 1.0})
ABLATED = Case("ablated", operations=(ABLATION,))
ABLATED_LESS = Case("ablated less", operations=(("both", OP_SITE, {**ABLATION[2], "scale": 0.5}),))
ABLATED_BY_PHASE = Case("by phase", operations=(("prefill", *ABLATION[1:]), ("decode", *ABLATION[1:])))
ANSWER_ABLATED = Case("answer ablated", operations=(("decode", *ABLATION[1:]),))
WITHIN, *_, ACROSS, _ = TRANSCODERS
EDITS = ({"feature": 1, "set": 6.0}, {"feature": 2, "scale": -2.0, "only_if_active": True})
TRANSCODED = Case("transcoded", operations=(ACROSS.features("both", *EDITS),))
TRANSCODED_LESS = Case("transcoded less", operations=(ACROSS.features("both", EDITS[0]),))
ANSWER_TRANSCODED = Case("answer transcoded", operations=(WITHIN.features("decode", *EDITS),))
PATCHED = Case(
    "patched",
    Tiers(decode=OTHER),
    operations=(
        ("both", OP_SITE, {"method": "replace", "vector": AWAY, "alpha": 0.5, "positions": [2, 40, 70, 99, 103, 120]}),
        ABLATION,
    ),
)

Steers = Tiers | Case


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    saes = saved_saes([WITHIN, ACROSS], tmp_path_factory.mktemp("saes"))
    llm = start_llm(
        model=tiny_model("llama"),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=48,
        max_logprobs=-1,
        num_gpu_blocks_override=20,
        enable_prefix_caching=True,
        in_process=True,
        additional_config={"headgate": {"steering": {"op_sites": {"post_mlp": "all"}, "saes": saes}}},
    )
    yield llm
    stop_llm(llm)


@pytest.fixture(scope="module")
def reference() -> HFReference:
    return HFReference(tiny_model("llama"), "llama")


@pytest.fixture(autouse=True)
def empty_cache(llm: Any) -> None:
    llm.reset_prefix_cache()


def sampling(tiers: Steers = PLAIN, max_tokens: int = 6, **fields: Any) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=max_tokens, logprobs=-1)
    for name, value in {**tiers.fields(), **fields}.items():
        setattr(params, name, value)
    return params


def ask(llm: Any, tiers: Steers = PLAIN, prompt: list[int] = PROMPT, **settings: Any) -> Any:
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling(tiers, **settings), use_tqdm=False)
    return output


def check(output: Any, steering: Steers | Steering, reference: HFReference) -> None:
    steering = steering if isinstance(steering, Steering) else steering.steering()
    tokens = list(output.outputs[0].token_ids)
    check_logprobs(output, reference.run(list(output.prompt_token_ids), tokens, steering))


@pytest.mark.parametrize(
    ("first", "second", "num_shared"),
    [
        (BASE, PLAIN, 0),
        (PLAIN, BASE, 0),
        (PREFILL, PLAIN, 0),
        (PLAIN, PREFILL, 0),
        (BASE, OTHER_BASE, 0),
        (BASE, Tiers(base=ONE, scale=-1.0), 0),
        (PLAIN, DECODE, CACHED),
        (DECODE, PLAIN, CACHED),
        (PREFILL, BOTH, CACHED),
        (BASE, PREFILL, CACHED),
        (BASE, Tiers(prefill=ONE, decode=ONE), CACHED),
        (PLAIN, Tiers(base=ONE, scale=0.0), CACHED),
        (ABLATED, PLAIN, 0),
        (PLAIN, ANSWER_ABLATED, CACHED),
        (ABLATED, ABLATED_LESS, 0),
        (ABLATED, ABLATED_BY_PHASE, CACHED),
        (PATCHED, ABLATED, 0),
        (TRANSCODED, PLAIN, 0),
        (TRANSCODED, TRANSCODED_LESS, 0),
        (PLAIN, ANSWER_TRANSCODED, CACHED),
    ],
    ids=[
        "steered, plain",
        "plain, steered",
        "prefill, plain",
        "plain, prefill",
        "one, other",
        "one, negative",
        "plain, decode",
        "decode, plain",
        "prefill, prefill and other decode",
        "base, prefill",
        "base, the same by phase",
        "plain, scale 0",
        "ablated, plain",
        "plain, answer ablated",
        "ablated, ablated less",
        "ablated, the same by phase",
        "patched and ablated, ablated",
        "transcoded, plain",
        "transcoded, transcoded less",
        "plain, answer transcoded",
    ],
)
def test_a_prompt_is_shared_by_those_who_steer_it_alike(llm, reference, first, second, num_shared):
    outputs = [ask(llm, tiers) for tiers in (first, second, first, second)]

    assert [output.num_cached_tokens for output in outputs] == [0, num_shared, CACHED, CACHED]
    for output, tiers in zip(outputs, (first, second) * 2, strict=True):
        check(output, tiers, reference)


@pytest.mark.parametrize(
    ("before", "after", "num_shared"),
    [
        (BASE, BASE, CACHED + 2 * BLOCK),
        (BASE, PLAIN, 0),
        (BASE, OTHER_BASE, 0),
        (PREFILL, PREFILL, CACHED),
        (PREFILL, PLAIN, 0),
        (DECODE, PLAIN, CACHED),
        (DECODE, BASE, 0),
        (PLAIN, DECODE, CACHED + 2 * BLOCK),
        (PLAIN, BASE, 0),
        (BOTH, BASE, CACHED),
        (ABLATED, ABLATED, CACHED + 2 * BLOCK),
        (ANSWER_ABLATED, PLAIN, CACHED),
        (PATCHED, PATCHED, 0),
        (TRANSCODED, TRANSCODED, CACHED + 2 * BLOCK),
        (ANSWER_TRANSCODED, PLAIN, CACHED),
    ],
    ids=[
        "alike",
        "steered, plain",
        "one, other",
        "prefill alike",
        "prefill, plain",
        "decode, plain",
        "decode, both",
        "plain, decode",
        "plain, steered",
        "other decode, both",
        "ablated alike",
        "answer ablated, plain",
        "positions in prompts of other lengths",
        "transcoded alike",
        "answer transcoded, plain",
    ],
)
def test_an_answer_is_the_prompt_of_the_next_turn_for_those_who_steer_alike(llm, reference, before, after, num_shared):
    answer = ask(llm, before, max_tokens=LONG)
    longer = [*PROMPT, *answer.outputs[0].token_ids, 7, 8, 9]

    following = [ask(llm, after, longer) for _ in range(2)]

    check(answer, before, reference)
    assert [output.num_cached_tokens for output in following] == [num_shared, CACHED + 2 * BLOCK]
    for output in following:
        check(output, after, reference)


def test_preempted_answers_go_on_as_they_began(llm, reference, monkeypatch):
    preempted = count_preemptions(llm, monkeypatch)
    tiers = [BASE, PATCHED, PLAIN, BOTH, ABLATED, TRANSCODED, OTHER_BASE, ANSWER_TRANSCODED]
    prompts = [[3 + (k * i + k) % 500 for i in range(20 + 3 * k)] for k in range(1, 1 + len(tiers))]
    params = [sampling(each, max_tokens=100) for each in tiers]

    for _ in range(2):  # the second time on top of what the first left in the cache
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        for output, each in zip(outputs, tiers, strict=True):
            check(output, each, reference)

    assert len(preempted) > 4
    assert max(preempted.values()) > 0
    assert sum(num_output > 0 for num_output in preempted.values()) > 2, "nobody was preempted while it answered"


def count_preemptions(llm: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Fills with the tokens that each request had generated when it was last preempted."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    found: dict[str, int] = {}

    def count(request: Any, *args: Any, **kwargs: Any) -> Any:
        found[request.request_id] = request.num_output_tokens
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", count)
    return found


@pytest.fixture
def module(llm: Any) -> Iterator[str]:
    llm.steering.register("mood", **document(BASE))
    yield "mood"
    llm.steering.unregister("mood")


def test_a_name_means_its_content(llm, reference, module):
    outputs = [ask(llm, steering_name=module), ask(llm, BASE), ask(llm), ask(llm, steering_module_ref=(module, 0.5))]

    assert [output.num_cached_tokens for output in outputs] == [0, CACHED, 0, 0]
    for output, steering in zip(outputs, (BASE, BASE, PLAIN, Tiers(base=ONE, scale=0.5)), strict=True):
        check(output, steering, reference)


def test_a_module_has_operations_too(llm, reference):
    llm.steering.register("ablated", **document(ABLATED))
    try:
        outputs = [ask(llm, steering_name="ablated"), ask(llm, ABLATED), ask(llm, steering_module_ref=("ablated", 0.5))]
    finally:
        llm.steering.unregister("ablated")

    assert [output.num_cached_tokens for output in outputs] == [0, CACHED, 0]
    for output, steering in zip(outputs, (ABLATED, ABLATED, ABLATED_LESS), strict=True):
        check(output, steering, reference)


def test_a_module_has_features_of_transcoders_beside_those_of_a_request(llm, reference):
    llm.steering.register("transcoded", **document(TRANSCODED))
    try:
        outputs = [
            ask(llm, ANSWER_TRANSCODED, steering_name="transcoded"),
            ask(llm, TRANSCODED),
            ask(llm, steering_name="transcoded"),
        ]
    finally:
        llm.steering.unregister("transcoded")

    both = Case("both", operations=(*TRANSCODED.operations, *ANSWER_TRANSCODED.operations))
    assert [output.num_cached_tokens for output in outputs] == [0, CACHED, CACHED]
    for output, steering in zip(outputs, (both, TRANSCODED, TRANSCODED), strict=True):
        check(output, steering, reference)


def test_names_and_inline_vectors_add_up(llm, reference, module):
    total = added([(ONE, -2.0), (OTHER, 1.0)])

    output = ask(llm, OTHER_BASE, steering_module_ref=(module, -2.0))

    check(output, Tiers(base=total), reference)


def test_a_name_that_was_registered_anew_means_its_new_content(llm, reference, module):
    before = ask(llm, steering_name=module)

    llm.steering.register(module, **document(Tiers(prefill=OTHER)))
    after = ask(llm, steering_name=module)

    assert after.num_cached_tokens == 0
    check(before, BASE, reference)
    check(after, Tiers(prefill=OTHER), reference)


@pytest.fixture
def no_global(llm: Any) -> Iterator[None]:
    yield
    llm.steering.clear()


@pytest.mark.parametrize("tier", ["base", "prefill", "decode"])
def test_global_vectors_come_and_go_between_requests(llm, reference, no_global, tier):
    everywhere = Tiers(**{tier: OTHER})
    steering = everywhere.steering()
    with_own = Steering(
        prefill=added([(steering.prefill, 1.0), (ONE, 1.0)]), decode=added([(steering.decode, 1.0), (ONE, 1.0)])
    )
    before = [ask(llm), ask(llm, BASE)]

    llm.steering.set(**document(everywhere))
    during = [ask(llm), ask(llm, BASE), ask(llm), ask(llm, BASE)]
    llm.steering.clear()
    after = [ask(llm), ask(llm, BASE)]

    for plain, own in (before, after):
        check(plain, PLAIN, reference)
        check(own, BASE, reference)
    for at in (0, 2):
        check(during[at], steering, reference)
        check(during[at + 1], with_own, reference)
    assert [output.num_cached_tokens for output in during[2:]] == [CACHED, CACHED]


def test_global_operations_act_before_those_of_requests_until_they_are_taken_back(llm, reference, no_global):
    own = ("both", OP_SITE, {"method": "clamp", "vector": AWAY, "max": -0.5, "strength": 1.0})
    clamped = Case("clamped", BASE, operations=(own,))
    before = ask(llm, clamped)

    llm.steering.set(**document(ABLATED))
    during = [ask(llm), ask(llm, clamped), ask(llm)]
    llm.steering.set(ops=[])
    after = [ask(llm), ask(llm, clamped)]

    check(before, clamped, reference)
    for output, case in zip(during, (ABLATED, Case("both", BASE, operations=(ABLATION, own)), ABLATED), strict=True):
        check(output, case, reference)
    for output, steers in zip(after, (PLAIN, clamped), strict=True):
        check(output, steers, reference)
    assert during[2].num_cached_tokens == CACHED


@pytest.mark.parametrize("tier", ["base", "prefill", "decode"])
def test_global_vectors_act_on_a_running_request_from_its_next_token_on(llm, reference, no_global, tier):
    engine = llm.llm_engine
    engine.add_request("running", {"prompt_token_ids": PROMPT}, sampling(BASE, max_tokens=LONG))
    for _ in range(24):
        engine.step()

    llm.steering.set(**document(Tiers(**{tier: OTHER})))
    (running,) = engine.engine_core.engine_core.scheduler.requests.values()
    num_before = running.num_output_tokens  # those of the step that was in flight count
    assert BLOCK > num_before > 10
    output = None
    while engine.has_unfinished_requests():
        output = (engine.step() or [output])[0]

    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == LONG
    shared = Tiers(**{tier: OTHER}).steering()
    both = Steering(
        prefill=added([(shared.prefill, 1.0), (ONE, 1.0)]), decode=added([(shared.decode, 1.0), (ONE, 1.0)])
    )
    got = logprobs_of(output.outputs[0].logprobs)
    for steering, rows in ((BASE.steering(), slice(num_before)), (both, slice(num_before, None))):
        expected = reference.run(PROMPT, tokens, steering).logits[len(PROMPT) - 1 :].log_softmax(-1)
        assert relative_error(got[rows], expected[rows]) <= MAX_ERROR
    following = ask(llm, BASE, [*PROMPT, *tokens, 7])
    check(following, both, reference)


def test_nothing_is_left_reserved(llm):
    (slots,) = llm.steering.status().slots

    assert (slots.reserved, slots.waiting) == (0, 0)
