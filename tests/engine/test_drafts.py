"""Speculative decoding: rows of accepted tokens alone, each once, at the position that it has in the answer.

Every row is compared with Hugging Face on the final sequence. One engine with few KV blocks, so that requests are
preempted, and small steps, so that prompts come in chunks between drafts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import pytest

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint
from tests.conftest import stop_llm
from tests.engine import gate_making, gate_runs
from tests.engine.drafting import (
    CONFIG,
    CONSUMERS,
    MAX_ERROR,
    NUM_DRAFTS,
    NUM_OUTPUT,
    SITES,
    Asked,
    Drafter,
    check,
    counts,
    draft,
    eagle_folder,
    generate,
    greedy,
    mtp_folder,
    requests,
    start,
)
from tests.engine.gate_forms import comparisons, loops, phases
from tests.engine.gate_making import PROMPTS, GateCase, Maker
from tests.engine.gate_reference import plain_rows
from tests.engine.hf_reference import HFReference, Steering, own_process, relative_error
from tests.engine.steering_cases import Case, Tiers, sites_of, vectors
from tests.engine.tiny_models import tiny_model
from tests.fresh_python import run_python

ENGINE = {
    "max_model_len": 160,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 8,
    "disable_log_stats": False,
    "speculative_config": CONFIG,
}
NUM_GATED = 12
NOT_WITH_DRAFTS = "scope: writes at sites before|positions: name some positions of the answer"
MANY = 100_000
"""Rows."""
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
def references() -> Iterator[Executor]:
    with own_process() as executor:
        yield executor


@pytest.fixture(scope="module")
def cases(references: Executor) -> list[GateCase]:
    return gate_runs.made_cases(references)


@pytest.fixture(scope="module")
def llm(cases: list[GateCase], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    llm = gate_runs.start(tmp_path_factory.mktemp("saes"), **ENGINE)
    yield llm
    stop_llm(llm)


def test_rows_are_of_accepted_tokens_alone_each_once_at_its_position(llm, reference, answers):
    check_rows(llm, reference, answers)


def check_rows(llm: Any, reference: HFReference, answers: Any, sites: Any = SITES) -> None:
    """Some dictated drafts of concurrent requests are accepted, and some requests preempted."""
    draft(llm, answers, REQUESTS)
    order, before = random.Random(1).sample(REQUESTS, len(REQUESTS)), counts(llm)

    found = generate(llm, order, [each.params(answers[each.prompt], capture=each.capture(sites)) for each in order])

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
        ((tokens, captured),) = generate(llm, [asked], [asked.params(answers[asked.prompt], capture=asked.capture())])

        assert tokens == asked.answer(answers[asked.prompt])
        check(asked, tokens, captured, reference)
        assert not is_cached or counts(llm)["prefix_cache_hits"] > before


def test_steered_answers_and_rows_are_those_without_drafts(llm, reference):
    check_steered(llm, reference)


def check_steered(llm: Any, reference: HFReference, sites: Any = SITES) -> None:
    asked = [Asked(each.prompt, each.rights) for each in REQUESTS[3:9]]
    steers = [STEERED[index % len(STEERED)] for index in range(len(asked))]
    steering: list[Steering] = [each.steering() for each in steers]
    found = [greedy(reference, each.prompt, acts) for each, acts in zip(asked, steering, strict=True)]
    answers = {each.prompt: tokens for each, tokens in zip(asked, found, strict=True)}
    draft(llm, answers, asked)

    params = [
        each.params(answers[each.prompt], capture=each.capture(sites), **acts.fields())
        for each, acts in zip(asked, steers, strict=True)
    ]
    for each, acts, (tokens, captured) in zip(asked, steering, generate(llm, asked, params), strict=True):
        assert tokens == answers[each.prompt], each
        check(each, tokens, captured, reference, acts)


def refusal(llm: Any, case: GateCase) -> str:
    """Why an engine does not take the gates of a case; empty if it does."""
    try:
        gate_runs.generate(llm, [case], [PROMPTS[case.prompt]], 1)
    except RequestError as error:
        return str(error)
    return ""


def test_gates_go_on_over_accepted_rows_alone(llm, references, cases):
    reasons = {case.name: refusal(llm, case) for case in cases}
    assert all(re.search(NOT_WITH_DRAFTS, reason) for reason in reasons.values() if reason), reasons
    assert not [name for name, reason in reasons.items() if "early" in name and not reason]
    served = [case for case in cases if not reasons[case.name]]
    assert len(served) > 33
    check_gates(llm, references, served, captures=True)


def check_gates(
    llm: Any, references: Executor, served: list[GateCase], family: str = gate_runs.FAMILY, **how: bool
) -> None:
    """Rows, logprobs and traces are Hugging Face's with drafts that are all wrong, wrong in part, and all right."""
    prompts = [tuple(PROMPTS[case.prompt]) for case in served]
    answers: list[tuple[tuple[int, ...], Sequence[int]]] = []
    run = None
    for rights, shares in (("none", (0, 0.1)), ("some", (0.2, 0.8)), ("all", (0.7, 1))):
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        Drafter(answers, dict.fromkeys(prompts, rights)).install(runner)
        before = counts(llm)

        outputs = gate_runs.generate(llm, served, prompts, NUM_GATED, **how)

        samples = [output.outputs[0] for output in outputs]
        run = run or gate_runs.told_of(served, outputs, references, family)
        gate_runs.check(run._replace(outputs=outputs, samples=samples), **how)
        more = {name: value - before.get(name, 0) for name, value in counts(llm).items()}
        share = more["spec_decode_num_accepted_tokens"] / more["spec_decode_num_draft_tokens"]
        assert shares[0] <= share <= shares[1], (rights, share)
        assert more["num_preemptions"] > 0
        answers = [(prompt, list(sample.token_ids)) for prompt, sample in zip(prompts, samples, strict=True)]


@pytest.mark.extended
def test_of_many_requests_no_row_is_of_a_rejected_draft(llm, reference, answers):
    draft(llm, answers, REQUESTS)
    lots, num_rows, before = random.Random(7), 0, counts(llm)
    known = {asked.prompt: reference.run(asked.prompt, answers[asked.prompt]).rows[OP_SITE] for asked in REQUESTS}
    while num_rows < MANY:
        some = [replaced(lots.choice(REQUESTS), lots.randrange(1, NUM_OUTPUT + 1)) for _ in range(256)]
        capture = [{"memory": {"hooks": {"post_mlp": [1]}, "positions": "all_generated"}}] * len(some)
        params = [each.params(answers[each.prompt], capture=one) for each, one in zip(some, capture, strict=True)]
        for asked, (tokens, captured) in zip(some, generate(llm, some, params), strict=True):
            positions = list(range(len(asked.prompt), len(asked.prompt) + len(tokens) - 1))
            assert tokens == asked.answer(answers[asked.prompt])
            assert captured.positions.tolist() == positions
            assert captured.token_ids.tolist() == tokens[:-1]
            if positions:
                assert relative_error(captured.rows[OP_SITE], known[asked.prompt][positions]) <= MAX_ERROR
            num_rows += len(positions)
    more = {name: value - before.get(name, 0) for name, value in counts(llm).items()}
    print(
        num_rows, more["spec_decode_num_draft_tokens"], more["spec_decode_num_accepted_tokens"], more["num_preemptions"]
    )


def replaced(asked: Asked, max_tokens: int) -> Asked:
    """The same request, which ends elsewhere."""
    return Asked(asked.prompt, asked.rights, "all_generated", max_tokens)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
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
        params = [each.params(answers[each.prompt], capture=each.capture()) for each in REQUESTS]
        for asked, (tokens, captured) in zip(REQUESTS, generate(llm, REQUESTS, params), strict=True):
            assert tokens == asked.answer(answers[asked.prompt]), asked
            check(asked, tokens, captured, reference)
        accepted = counts(llm)["spec_decode_num_accepted_tokens"] / counts(llm)["spec_decode_num_draft_tokens"]
        assert accepted > 0.9 if method == "draft_model" else accepted < 0.5
    finally:
        stop_llm(llm)


MTP_FAMILY = "deepseek_v3"
MTP_SITES = {hook: layers for hook, layers in SITES.items() if hook != "hook_z"}
MTP_ENGINE = {
    **ENGINE,
    "num_gpu_blocks_override": 16,  # of 16 tokens
    # The platform turns it off, and the tests' plugin on: vLLM itself then makes other tokens, beside drafts with MLA.
    "async_scheduling": False,
    # Chunked prefill is off with MLA on CPUs: vLLM's scheduler would never begin a prompt of more tokens than a step.
    "max_num_batched_tokens": 256,
    "speculative_config": {"method": "deepseek_mtp", "num_speculative_tokens": NUM_DRAFTS},
    # vLLM's rotary kernel for CPUs rotates some of DeepSeek's queries wrongly.
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}


def idle(llm: Any, answers: dict[tuple[int, ...], list[int]]) -> list[Any]:
    """Tokens and logprobs of plain requests with the model's own drafts, and how many of these were accepted."""
    some, before = REQUESTS[:12], counts(llm)
    prompts = [{"prompt_token_ids": list(each.prompt)} for each in some]
    params = [each.params(answers[each.prompt], logprobs=0) for each in some]
    samples = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    assert [list(each.token_ids) for each in samples] == [answers[each.prompt] for each in some]
    return [*(each.logprobs for each in samples), *(counts(llm)[name] - before.get(name, 0) for name in names)]


@pytest.mark.extended
def test_beside_a_layer_that_predicts_several_tokens_all_is_as_without_it(references, tmp_path):
    """Idle requests are stock vLLM's bit for bit, the drafts of that layer included; rows, vectors and gates."""
    model = tiny_model(MTP_FAMILY)
    reference = HFReference(model, MTP_FAMILY)
    answers = {asked.prompt: greedy(reference, asked.prompt) for asked in REQUESTS}
    settings = {**MTP_ENGINE, "model": mtp_folder(model)}
    llm = start(**settings, additional_config={})
    try:
        stock = idle(llm, answers)
    finally:
        stop_llm(llm)
    llm = gate_runs.start(tmp_path, sites=MTP_SITES, **settings)
    try:
        assert idle(llm, answers) == stock
        assert stock[-2] > 100
        check_rows(llm, reference, answers, MTP_SITES)
        check_steered(llm, reference, MTP_SITES)
        rows = references.submit(plain_rows, model, MTP_FAMILY, PROMPTS, gate_making.NUM_OUTPUT).result()
        make = Maker(rows)
        cases = [case for case in (*comparisons(make), *loops(make), *phases(make)) if not refusal(llm, case)]
        assert len(cases) > 9
        check_gates(llm, references, cases, MTP_FAMILY)
    finally:
        stop_llm(llm)


@pytest.mark.extended
def test_the_v2_runner_tells_the_same_rows_apart():
    environment = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

    done = run_python(["-m", "tests.engine.drafting"], environment=environment, may_fork=False)

    assert "RAN vllm.v1.worker.cpu.model_runner" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
