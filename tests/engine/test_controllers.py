"""Controllers on a real engine: what they read, and that a replay of what they did gives the engine's logprobs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.engine.core.engine_core import adapter_of
from headgate.capture.schema import registry
from headgate.steering.controllers import Probe, ReadRow, RequestView, SetGlobal, SetScale, SetSteering, Stop, loading
from tests.conftest import stop_llm
from tests.engine.controller_cases import (
    CONTENTS,
    READ,
    RNG,
    STATIC,
    VECTORS,
    WEIGHT,
    Driven,
    RandomLoad,
    prompt_of,
    steering,
)
from tests.engine.controller_replays import check_replays, replayed, told_of_prompts
from tests.engine.gate_making import NUM_OUTPUT, SAE_SITE, GateCase
from tests.engine.gate_runs import BLOCK, captured_of, generate, made_cases, params_of, start
from tests.engine.hf_reference import own_process, relative_error
from tests.engine.steering_cases import MAX_ERROR, Case, Tiers
from tests.engine.tiny_models import HIDDEN
from tests.fakes import controllers
from tests.fakes.controllers import Hanging, Scripted, Submitting

WAIT_S = 0.9
"""Less than the budget of the controller that waits."""


@pytest.fixture(scope="module")
def references() -> Iterator[Executor]:
    with own_process() as executor:
        yield executor


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    Scripted.probe = Probe(site=READ, weight=WEIGHT[None], bias=np.array([0.25], np.float32))
    configured = [
        {"name": "scripted", "budget_ms": 1000},
        {"name": "scripted", "instance_name": "other", "applies_to": "opt_in", "budget_ms": 1000},
        *({"name": name, "applies_to": "opt_in"} for name in ("raising", "exiting", "hanging", "flooding")),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "entry_points", controllers.entry_points)
        patch.setattr(registry, "entry_points", controllers.consumer_entry_points)
        steering = {"controllers": configured, "from_consumers": True}
        # What it has submitted is known where it lives: a capture process would keep that for itself.
        consumers = [{"name": "here", "location": "engine"}, {"name": "there"}]
        llm = start(tmp_path_factory.mktemp("saes"), steering, consumers)
    yield llm
    Hanging.released.set()
    stop_llm(llm)


@pytest.fixture(autouse=True)
def unplanned() -> Iterator[None]:
    Scripted.plans.clear()
    Scripted.told.clear()
    yield
    Scripted.plans.clear()


def acts_from(llm: Any, position: int) -> int:
    """The first row on which a decision acts that a controller takes after reading a row.

    Args:
        llm: While it schedules asynchronously, the step of the next row has been launched before.
        position: Of the row that was read.
    """
    return position + (2 if llm.llm_engine.vllm_config.scheduler_config.async_scheduling else 1)


def check(
    outputs: Sequence[Any], cases: Sequence[GateCase], references: Executor, num_acting: int | None = None
) -> None:
    """All samples are replays of what their traces say; so many of them were acted on, or all."""
    acting = [output for output in outputs if output.outputs[0].steering_trace["actions"]]
    assert len(acting) == (len(outputs) if num_acting is None else num_acting)
    samples = [output.outputs[0] for output in outputs]
    requests = [
        replayed(case, output.prompt_token_ids, sample, CONTENTS)
        for case, output, sample in zip(cases, outputs, samples, strict=True)
    ]
    check_replays(requests, samples, references)


def test_what_is_read_is_each_row_once_with_its_token_and_score(llm):
    case, prompts = Driven(name="read"), [prompt_of(1, 40), prompt_of(2, 5)]

    outputs = generate(llm, [case] * 2, prompts, NUM_OUTPUT, captures=True)

    for output in outputs:
        sample, captured = output.outputs[0], captured_of(output, output.outputs[0], case)
        tokens = [*output.prompt_token_ids, *sample.token_ids]
        views = [each for each in Scripted.told if isinstance(each, tuple) and not isinstance(each, ReadRow)]
        (begins, ends) = [view for _, view in views if view.request.startswith(f"{output.request_id}-")]
        rows = [each for each in Scripted.told if isinstance(each, ReadRow) and each.request == begins.request]
        assert (begins.num_prompt_tokens, list(ends.token_ids)) == (len(output.prompt_token_ids), tokens)
        assert [row.position for row in rows] == list(range(len(tokens) - 1))
        assert [row.token_id for row in rows] == tokens[:-1]
        assert [row.phase == "prefill" for row in rows] == [row.position < begins.num_prompt_tokens for row in rows]
        scores = captured[READ].double() @ torch.from_numpy(WEIGHT).double() + 0.25
        assert relative_error(torch.tensor([row.scores["score"] for row in rows]), scores) <= MAX_ERROR
        trace = sample.steering_trace
        assert trace["scores"]["scripted.score"] == [row.scores["score"] for row in rows]
        assert trace["actions"] == []


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_decision_acts_on_the_first_row_that_was_not_launched_and_on_no_earlier_one(llm, references, kind):
    def plan(view: RequestView, row: ReadRow) -> Iterator[SetSteering]:
        if row.phase == "decode" or row.position == view.num_prompt_tokens - 1:
            yield steering(row, kind, math.sin(row.position))

    prompts = [prompt_of(10 + at, 6 + 9 * at) for at in range(3)]
    Scripted.plans.update({tuple(prompt): plan for prompt in prompts})
    cases = [Driven(name="driven"), Driven(name="with static vectors", static=STATIC), Driven(name="alone")]

    outputs = generate(llm, cases, prompts, NUM_OUTPUT)

    check(outputs, cases, references)
    for output in outputs:
        positions = [note["position"] for note in output.outputs[0].steering_trace["actions"]]
        num_prompt = len(output.prompt_token_ids)
        # The last token has no row, so decisions that would act from there on acted on nothing.
        firsts = [acts_from(llm, num_prompt - 1 + at) for at in range(NUM_OUTPUT)]
        assert positions == [first for first in firsts if first < num_prompt + NUM_OUTPUT - 1]


def test_what_was_there_is_scaled_and_put_aside(llm, references):
    def scale(view: RequestView, row: ReadRow) -> Iterator[SetScale]:
        yield SetScale(row.request, 0.5 + 0.25 * (row.position % 3))

    def instead(view: RequestView, row: ReadRow) -> Iterator[SetSteering]:
        yield steering(row, "vectors", 0.8, compose=row.position % 3 == 0)

    def both(view: RequestView, row: ReadRow) -> Iterator[Any]:
        yield from scale(view, row)
        yield from instead(view, row)

    prompts = [prompt_of(20 + at) for at in range(4)]
    Scripted.plans.update(zip(map(tuple, prompts), (scale, instead, both, instead), strict=True))
    cases = [*(Driven(name="static", static=STATIC) for _ in range(3)), Driven(name="nothing to put aside")]

    check(generate(llm, cases, prompts, NUM_OUTPUT), cases, references)


def test_modules_are_scaled_for_later_requests_too_and_for_those_alone_that_name_them(llm, references):
    (site, vector), *_ = STATIC.tiers.decode.items()
    llm.steering.register("own", vectors={site.hook.value: {site.layer: vector.tolist()}})
    first, later, none = (prompt_of(30 + at) for at in range(3))
    Scripted.plans[tuple(first)] = lambda view, row: [SetScale("own", 0.25)] if row.position == 14 else []

    def answer(prompt: list[int], module: str | None) -> Any:
        params = params_of(Driven(name="m"), NUM_OUTPUT)
        params.steering_module_ref = module
        return llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]

    outputs = [answer(first, "own"), answer(later, "own"), answer(none, None)]

    told = [output.outputs[0].steering_trace["actions"] for output in outputs]
    assert [[note["position"] for note in notes] for notes in told] == [[acts_from(llm, 14)], [12], []]
    assert told[0][0]["action"] == told[1][0]["action"] == {"set_scale": "own", "scale": 0.25}
    named = Driven(name="m", static=Case("named", Tiers(base={site: vector})))
    check(outputs[:2], [named] * 2, references)
    Scripted.plans[tuple(first)] = lambda view, row: [SetScale("own", 1.0)]
    assert answer(first, "own").outputs[0].steering_trace["actions"][-1]["outcome"] == "applied"
    assert answer(later, "own").outputs[0].steering_trace["actions"][0]["action"]["scale"] == 1.0
    llm.steering.unregister("own")


def test_global_vectors_are_scaled_until_they_change(llm, references):
    decode = STATIC.tiers.decode
    llm.steering.set(decode_vectors={site.hook.value: {site.layer: row.tolist()} for site, row in decode.items()})
    first, later = prompt_of(40), prompt_of(41)
    Scripted.plans[tuple(first)] = lambda view, row: [SetScale("global", -0.5)] if row.position == 14 else []

    outputs = [*generate(llm, [Driven(name="g")], [first], NUM_OUTPUT)]
    outputs += generate(llm, [Driven(name="g")], [later], NUM_OUTPUT)

    assert [output.outputs[0].steering_trace["actions"][0]["position"] for output in outputs] == [
        acts_from(llm, 14),
        12,
    ]
    check(outputs, [Driven(name="g", static=STATIC)] * 2, references)
    llm.steering.clear()
    (plain,) = generate(llm, [Driven(name="g")], [later], NUM_OUTPUT)
    check([plain], [Driven(name="g")], references, 0)


def test_what_is_set_for_all_acts_on_later_requests_from_their_first_generated_row_on(llm, references):
    first, later, own = prompt_of(50), prompt_of(51, 40), prompt_of(52)
    Scripted.plans[tuple(first)] = lambda view, row: (
        [SetGlobal(module="calm", scale=0.75)] if row.position == 13 else []
    )
    Scripted.plans[tuple(own)] = lambda view, row: [steering(row, "vectors", -0.5)] if row.position > 13 else []
    case = Driven(name="all")

    outputs = [*generate(llm, [case] * 2, [first, prompt_of(53)], NUM_OUTPUT)]
    outputs += generate(llm, [case] * 2, [later, own], NUM_OUTPUT)

    check(outputs, [case] * 4, references)
    assert outputs[2].outputs[0].steering_trace["actions"][0]["position"] == 40
    (cached,) = generate(llm, [case], [later], NUM_OUTPUT)
    assert cached.num_cached_tokens == BLOCK  # of the prompt, which nothing changes
    check([cached], [case], references)
    Scripted.plans[tuple(first)] = lambda view, row: [SetGlobal()]
    generate(llm, [case], [first], 1)
    (plain,) = generate(llm, [case], [later], NUM_OUTPUT)
    check([plain], [case], references, 0)


def test_nobody_finds_the_blocks_of_what_was_driven_and_preempted_requests_go_on_as_they_began(
    llm, references, monkeypatch
):
    def plan(view: RequestView, row: ReadRow) -> Iterator[SetSteering]:
        if row.phase == "decode" and row.position % 3:
            yield steering(row, "module", math.cos(row.position))
        elif row.phase == "decode":
            yield steering(row, "vectors", 0.5 * math.cos(row.position))

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def count(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.num_output_tokens)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", count)
    llm.reset_prefix_cache()
    prompts, cases = [prompt_of(60 + at, 36) for at in range(6)], [Driven(name="long")] * 6
    Scripted.plans.update({tuple(prompt): plan for prompt in prompts})

    outputs = generate(llm, cases, prompts, 50)

    assert max(preempted) > 10
    check(outputs, cases, references)
    answers = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    again = generate(llm, [Driven(name="again")] * 2, answers[:2], NUM_OUTPUT)
    # Nothing of the answer: its first block holds generated rows.
    assert all((output.num_cached_tokens or 0) <= BLOCK for output in again)
    check(again, [Driven(name="again")] * 2, references, 0)


def test_a_prompt_that_begins_again_ends_for_controllers_and_begins_anew(llm, references):
    """Global vectors change before its last chunk, so those rows count no more, nor what was decided by them."""
    prompt, case = prompt_of(66, 40), Driven(name="begun")
    site, vector = next(iter(STATIC.tiers.decode.items()))

    def num_begun() -> int:
        return sum(each[0] == "begins" for each in Scripted.told if not isinstance(each, ReadRow))

    def plan(view: RequestView, row: ReadRow) -> Iterator[SetSteering]:
        if row.position == (9 if num_begun() == 1 else 44):
            yield steering(row, "module", 0.02 * row.position)

    Scripted.plans[tuple(prompt)] = plan
    engine, outputs = llm.llm_engine, []
    engine.add_request("begun", {"prompt_token_ids": prompt}, params_of(case, NUM_OUTPUT))
    while not any(isinstance(each, ReadRow) and each.position == 9 for each in Scripted.told):
        engine.step()
    llm.steering.set(vectors={site.hook.value: {site.layer: vector.tolist()}})
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    llm.steering.clear()

    told = [each.position if isinstance(each, ReadRow) else each[0] for each in Scripted.told]
    begin = told.index("begins", 1)
    assert told[:begin] == ["begins", *range(begin - 2), "ends"]
    assert told[begin:] == ["begins", *range(len(prompt) + NUM_OUTPUT - 1), "ends"]
    trace = outputs[0].outputs[0].steering_trace
    assert trace["scores"]["scripted.score"] == [row.scores["score"] for row in Scripted.told[begin + 1 : -1]]
    assert [note["position"] for note in trace["actions"]] == [40, 40, acts_from(llm, 44)]
    check(outputs, [Driven(name="begun", static=Case("global", Tiers(base={site: vector})))], references)


def test_a_request_that_a_controller_stops_keeps_the_last_token(llm):
    prompt, (alone,) = prompt_of(70), generate(llm, [Driven(name="alone")], [prompt_of(70)], NUM_OUTPUT)
    Scripted.plans[tuple(prompt)] = lambda view, row: [Stop(row.request, "enough")] if row.position == 14 else []

    (output,) = generate(llm, [Driven(name="stopped")], [prompt], NUM_OUTPUT, captures=True)

    sample = output.outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "enough")
    assert list(sample.token_ids) == list(alone.outputs[0].token_ids)[:4]  # rows 11 to 14 gave them
    assert [note["action"] for note in sample.steering_trace["actions"]] == [{"stop": "enough"}]
    assert captured_of(output, sample, Driven(name="stopped"))[SAE_SITE].shape == (15, HIDDEN)
    Scripted.plans[tuple(prompt)] = lambda view, row: [Stop(row.request, "at once")] if row.position == 3 else []
    (output,) = generate(llm, [Driven(name="in its prompt")], [prompt], NUM_OUTPUT)
    assert output.outputs[0].stop_reason == "at once"
    assert len(output.outputs[0].token_ids) <= 1


def test_a_controller_that_fails_ends_alone(llm):
    """And so does one that hangs, or has no end; its requests are answered, and their traces say so."""
    names = ("raising", "exiting", "hanging", "flooding")
    prompt = prompt_of(80)
    (alone,) = generate(llm, [Driven(name="alone", selects=())], [prompt], NUM_OUTPUT)

    outputs = generate(llm, [Driven(name=name, selects=(name,)) for name in names], [prompt] * 4, NUM_OUTPUT)

    for output in outputs:
        assert list(output.outputs[0].token_ids) == list(alone.outputs[0].token_ids)
    told = {status.name: status for status in llm.steering.dynamic().controllers}
    assert told["raising"].error == "it raised ValueError: no more"
    assert told["exiting"].error == "it raised SystemExit: 3"
    assert told["hanging"].error is None
    assert (told["hanging"].over_budget, told["hanging"].skipped > 3) == (1, True)
    assert told["flooding"].actions["dropped"] >= told["flooding"].steps > 3
    assert told["flooding"].actions["applied"] <= 68 * told["flooding"].steps + 4 * len(prompt)
    assert told["scripted"].error is None
    (note,) = outputs[0].outputs[0].steering_trace["actions"]
    assert (note["controller"], note["outcome"], note["reason"]) == (
        "raising",
        "switched off",
        "it raised ValueError: no more",
    )


BAD = {
    "an unknown module": (lambda row: SetSteering(row.request, module="nothing"), "unknown steering module 'nothing'"),
    "two contents": (lambda row: SetSteering(row.request, module="calm", vectors=VECTORS), "at most one of"),
    "a width": (lambda row: SetSteering(row.request, vectors={"post_mlp": {0: [1.0]}}), "hidden size"),
    "no number": (lambda row: SetSteering(row.request, module="calm", scale=math.nan), "scale: expected a finite"),
    "a position": (
        lambda row: SetSteering(row.request, ops=[{**CONTENTS["ops"]["ops"][0], "positions": [0]}]),
        "positions",
    ),
    "nothing to scale": (lambda row: SetScale(row.request, 0.5), "no steering of its own"),
    "no such target": (lambda row: SetScale("nobody", 0.5), "unknown steering module 'nobody'"),
    "a phase": (lambda row: SetGlobal(module="calm", phase="prefill"), "expected decode"),
}


def test_an_action_that_cannot_be_applied_changes_nothing(llm, references, caplog):
    prompt, case = prompt_of(90), Driven(name="refused")
    makers = iter(BAD.values())
    Scripted.plans[tuple(prompt)] = lambda view, row: [next(makers)[0](row)] if row.phase == "decode" else []

    (output,) = generate(llm, [case], [prompt], len(BAD) + 1)

    notes = output.outputs[0].steering_trace["actions"]
    expected = [text for maker, text in BAD.values() if isinstance(maker(ReadRow("r", 0, "", 0, {})), SetSteering)]
    assert [note["outcome"] for note in notes] == ["rejected"] * len(expected)
    assert all(text in note["reason"] for text, note in zip(expected, notes, strict=True)), notes
    told = {status.name: status.actions["rejected"] for status in llm.steering.dynamic().controllers}
    assert told["scripted"] >= len(BAD)
    check([output], [case], references, 1)


@pytest.mark.parametrize("num_requests", [60, pytest.param(400, marks=pytest.mark.extended)])
def test_random_requests_are_replays_of_their_traces_and_leave_nothing_behind(llm, references, num_requests):
    gated = [case for case in made_cases(references) if case.gates and case.n == 1 and case.old is None]
    load = RandomLoad(int(RNG.integers(1 << 30)), gated, num_requests)
    for prompt in load.prompts:
        Scripted.plans[tuple(prompt)] = load.plan
    llm.reset_prefix_cache()

    outputs = load.run(llm)

    assert len(outputs) >= num_requests - 5
    (done, cases) = zip(*((outputs[at], load.cases[at]) for at in sorted(outputs)), strict=True)
    acting = sum(any(note["outcome"] == "applied" for note in one.outputs[0].steering_trace["actions"]) for one in done)
    assert acting > num_requests / 2
    known = told_of_prompts(cases, done)
    samples = [output.outputs[0] for output in done if output.outputs[0].token_ids]
    requests = [
        replayed(case, output.prompt_token_ids, output.outputs[0], CONTENTS, known)
        for case, output in zip(cases, done, strict=True)
        if output.outputs[0].token_ids
    ]
    check_replays(requests, samples, references)
    Scripted.plans.clear()
    Scripted.plans[tuple(prompt_of(99))] = lambda view, row: [SetGlobal()]
    generate(llm, [Driven(name="ends it", selects=("scripted", "other"))], [prompt_of(99)], 2)
    core = llm.llm_engine.engine_core.engine_core
    part = adapter_of(core)._part
    held = [part._resolved, part._controllers._requests, part._controllers._actuation.coefficients._requests]
    assert [core.scheduler.requests, *held] == [{}] * 4
    assert part.reservations.num_admitted == 0
    (stats,) = llm.collective_rpc("headgate_stats")
    assert stats["steering"]["slots_live"] <= part.reservations.num_reserved  # of modules and contents


def test_consumers_steer_from_the_worker_and_from_the_driver(llm, references):
    prompts = {name: prompt_of(90 + at, 9) for at, name in enumerate(("here", "there"))}
    cases = [Driven(name=name) for name in prompts]

    def plan(view: RequestView, row: ReadRow) -> Iterator[SetSteering]:
        if row.position == view.num_prompt_tokens:  # the engine goes on when it was submitted
            assert Submitting.submitted[tuple(view.token_ids[: view.num_prompt_tokens])].wait(WAIT_S)
        yield from ()

    for prompt in prompts.values():
        Scripted.plans[tuple(prompt)] = plan
        Submitting.submitted[tuple(prompt)] = Event()
    params = [params_of(case, NUM_OUTPUT) for case in cases]
    for name, each in zip(prompts, params, strict=True):
        each.capture = {name: {"hooks": {"post_mlp": [1]}, "positions": "all"}}

    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts.values()], params, use_tqdm=False)

    check(outputs, cases, references)
    for name, output in zip(prompts, outputs, strict=True):
        (note,) = output.outputs[0].steering_trace["actions"]
        assert (note["controller"], note["outcome"]) == (f"consumer:{name}", "applied")
        assert note["position"] < len(output.prompt_token_ids) + NUM_OUTPUT - 1
        assert Submitting.notes[tuple(prompts[name])] == {"steering": output.outputs[0].steering_trace}
    counts = llm.llm_engine.engine_core.engine_core.headgate_call("steering", "counts", {})["ok"]["controllers"]
    assert counts["consumer:here"]["actions"] == {"submitted": 1, "applied": 1, "rejected": 0, "dropped": 0}
