"""``headgate verify`` judges recordings: what is right passes, and each thing that is wrong fails its own check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.engine.commands.verify_engine import CAPTURED, judge_rows
from headgate.capture.engine.commands.verify_stock import (
    MIN_MODEL_LENGTH,
    Cost,
    idle_costs,
    judge_costs,
    judge_graphs,
    judge_stock,
    plain_requests,
)
from headgate.capture.monitoring.verify_checks import (
    EAGER,
    IDLE,
    PLAIN,
    PLAIN_AGAIN,
    PLAIN_AT_THE_END,
    SERVED,
    STOCK,
    AnswerRows,
    Recording,
    RequestAnswer,
    Status,
    Verdict,
    difference,
    equality,
    step_difference,
)
from headgate.capture.schema.sites import Site
from headgate.steering.verify import FIELDS, SITES_AT_ANSWERS, STEERED, steered_site
from tests.fakes.verify_engines import PARTS, Wrong, make_runs, steers

replace = msgspec.structs.replace
SILENT = Site.parse("1.post_attn")

IDLE_EQUAL = "idle headgate answers as stock does"
REPEATS = "stock repeats itself"
NOTHING_LEFT = "captures and steering leave nothing behind"
RUN_COUNTS, REPLAYS = "every site ran in every step", "steps are replayed from CUDA graphs"
CAPTURE_HARMLESS, COMPLETE = "a capture changes no answer", "captures are complete, none foreign"
LIKE_EAGER, OWN = "captured rows equal those of eager mode", "captured rows are the request's own"
AT_PROMPTS, AT_ANSWERS = "every site steers prompts", "every site steers answers"
MATES = "batch-mates of steered requests keep their answers"
UNCHANGED = "scale 0, and an answer's vector at the first token, change nothing"
CHANGED, EVERY_TOKEN = "steered requests get other answers", "every token gets its own vector, and no other"


def judge(runs: dict[str, list[Recording]]) -> dict[str, Verdict]:
    verdicts = [*judge_stock(runs), *judge_graphs(runs)]
    for part in PARTS.values():
        verdicts += part.judge(runs)
    return {verdict.check: verdict for verdict in verdicts}


def of(runs: dict[str, list[Recording]], *statuses: Status) -> set[str]:
    """Checks that ended so."""
    return {check for check, verdict in judge(runs).items() if verdict.status in statuses}


def test_an_engine_that_does_everything_right_passes_every_check() -> None:
    verdicts = judge(make_runs())

    assert {verdict.status for verdict in verdicts.values()} == {Status.PASSED}, verdicts
    assert len(verdicts) == 16


def in_phase(phase: str) -> Callable[[str, Site, int, int], bool]:
    """Steering that is silent at one site in one phase."""

    def acts(name: str, site: Site, position: int, num_prompt: int) -> bool:
        is_phase = (position < num_prompt) == (phase == "prompt")
        return steers(name, site, position, num_prompt) and not (site == SILENT and is_phase)

    return acts


def nowhere(name: str, site: Site, position: int, num_prompt: int) -> bool:
    return False


def but_one_token(name: str, site: Site, position: int, num_prompt: int) -> bool:
    return steers(name, site, position, num_prompt) and position != num_prompt + 3


def one_too_early(name: str, site: Site, position: int, num_prompt: int) -> bool:
    """An answer's vector acts on the last token of the prompt already."""
    return steers(name, site, position + 1 if name == FIELDS["decode"] else position, num_prompt)


def neighbours(index: int, num: int) -> int:
    return (index + 1) % num


def swapped(index: int, num: int) -> int:
    """Two requests that are both steered in both phases; the others have their own."""
    return {1: 9, 9: 1}.get(index, index) if num > 9 else index


def to_first_row(rows: AnswerRows) -> AnswerRows:
    """Every row is the first one's."""
    values = {site: np.repeat(rows.at(site)[:1], len(rows.positions), axis=0).tobytes() for site in rows.values}
    return replace(rows, values=values)


def noisy(rows: AnswerRows) -> AnswerRows:
    """One value of one row is off by a hundredth of the row."""
    changed = rows.at("2.post_mlp").copy()
    changed[-1, 0] += 0.01 * np.linalg.norm(changed[-1])
    return replace(rows, values={**rows.values, "2.post_mlp": changed.tobytes()})


def moved(kind: str, scene: str, by: float) -> Callable[[str, str, list[RequestAnswer]], list[RequestAnswer]]:
    """The logprobs of the first answer of one scene are off."""

    def change(of_kind: str, of_scene: str, answers: list[RequestAnswer]) -> list[RequestAnswer]:
        if (kind, scene) != (of_kind, of_scene):
            return answers
        first = answers[0]
        steps = [{token: value + by for token, value in step.items()} for step in first.logprobs]
        return [replace(first, logprobs=steps), *answers[1:]]

    return change


WRONGS: dict[str, tuple[Wrong, set[str]]] = {
    "a site does nothing": (Wrong(steers=in_phase("prompt")), {AT_PROMPTS}),
    "a site does nothing while decoding": (Wrong(steers=in_phase("answer")), {AT_ANSWERS}),
    "nobody is steered": (Wrong(steers=nowhere), {AT_PROMPTS, AT_ANSWERS, CHANGED, EVERY_TOKEN}),
    "one token of the answer is not steered": (Wrong(steers=but_one_token), {EVERY_TOKEN}),
    "steering of the answer begins one token early": (
        Wrong(steers=one_too_early),
        {AT_ANSWERS, UNCHANGED, EVERY_TOKEN},
    ),
    "vectors go to the neighbour": (Wrong(vectors_of=neighbours), {MATES, CHANGED, EVERY_TOKEN}),
    "two steered requests have each other's vectors": (Wrong(vectors_of=swapped), {EVERY_TOKEN}),
    "rows are the neighbour's": (Wrong(rows_of=neighbours), {LIKE_EAGER, OWN, EVERY_TOKEN}),
    "rows are the first token's": (Wrong(rows=to_first_row), {LIKE_EAGER, OWN, EVERY_TOKEN}),
    "a value is off by one per cent": (Wrong(rows=noisy), {LIKE_EAGER}),
    "a row is dropped": (Wrong(rows=lambda rows: replace(rows, dropped=1)), {COMPLETE}),
    "a row is missing": (Wrong(rows=lambda rows: replace(rows, positions=rows.positions[:-1])), {COMPLETE}),
    "a row is of another token": (Wrong(rows=lambda rows: replace(rows, token_ids=rows.token_ids[::-1])), {COMPLETE}),
    "a capture fails": (Wrong(rows=lambda rows: AnswerRows(status="error", error="disk full")), {COMPLETE}),
    "a site is not captured": (
        Wrong(rows=lambda rows: replace(rows, values=dict(list(rows.values.items())[len(rows.positions) % 2 :]))),
        {COMPLETE},
    ),
    "something is left behind": (Wrong(answers=moved(SERVED, PLAIN_AT_THE_END, 1e-6)), {NOTHING_LEFT}),
    "capturing changes a logprob": (Wrong(answers=moved(SERVED, CAPTURED, 1e-6)), {CAPTURE_HARMLESS}),
    "a batch-mate is touched": (Wrong(answers=moved(SERVED, STEERED, 1e-6)), {MATES}),
    "a site misses a step": (
        Wrong(run_counts=lambda run_counts: {**run_counts, "1.post_mlp": run_counts["1.post_mlp"] - 1}),
        {RUN_COUNTS},
    ),
    "a site never runs": (Wrong(run_counts=lambda run_counts: {**run_counts, "1.post_mlp": 0}), {RUN_COUNTS}),
    "nothing is counted": (Wrong(recording=lambda found: {"run_counts": {}}), {RUN_COUNTS}),
    "no graph is replayed": (Wrong(recording=lambda found: {"replays": {PLAIN: [0]}}), {REPLAYS}),
}


@pytest.mark.parametrize(("wrong", "failing"), WRONGS.values(), ids=WRONGS)
def test_what_is_wrong_fails_its_own_check(wrong: Wrong, failing: set[str]) -> None:
    failed = of(make_runs(wrong), Status.FAILED)

    assert failing <= failed


def test_an_idle_engine_with_other_answers_fails() -> None:
    runs = make_runs()
    runs[IDLE] = [replace(runs[IDLE][0], scenes={PLAIN: runs[SERVED][0].scenes[STEERED]})]

    assert of(runs, Status.FAILED) == {IDLE_EQUAL}


def test_other_rounding_of_compiled_code_is_worth_a_warning_and_more_is_not() -> None:
    for by, status in ((5e-4, Status.WARNING), (5e-3, Status.FAILED)):
        runs = make_runs()
        runs[IDLE] = [replace(runs[IDLE][0], scenes=shifted(runs[IDLE][0], by))]

        assert of(runs, status) == {IDLE_EQUAL}


def shifted(recording: Recording, by: float) -> dict[str, list[RequestAnswer]]:
    """The scenes of a recording whose logprobs are off by so much."""
    return {
        name: moved(recording.kind, name, by)(recording.kind, name, answers)
        for name, answers in recording.scenes.items()
    }


def test_stock_that_does_not_repeat_itself_is_said_and_gives_tolerance() -> None:
    runs = make_runs()
    again = {PLAIN_AGAIN: shifted(runs[STOCK][1], 1e-4)[PLAIN_AGAIN]}
    runs[STOCK][1] = replace(runs[STOCK][1], scenes={**runs[STOCK][1].scenes, **again})
    runs[IDLE] = [replace(runs[IDLE][0], scenes=shifted(runs[IDLE][0], -1e-4))]

    assert of(runs, Status.FAILED) == set()
    assert of(runs, Status.WARNING) == {REPEATS}


def test_headgate_may_differ_from_stock_as_much_as_stock_that_was_compiled_anew() -> None:
    for by, status in ((-1e-4, Status.PASSED), (-4e-4, Status.WARNING)):
        runs = make_runs()
        runs[STOCK][1] = replace(runs[STOCK][1], scenes=shifted(runs[STOCK][1], 1e-4))
        runs[IDLE] = [replace(runs[IDLE][0], scenes=shifted(runs[IDLE][0], by))]

        assert of(runs, Status.FAILED) == set()
        assert judge(runs)[IDLE_EQUAL].status is status
        assert "compiled anew it answers otherwise, by up to 0.0001" in judge(runs)[REPEATS].figure


def test_stock_that_differs_too_much_from_itself_verifies_nothing() -> None:
    runs = make_runs()
    runs[STOCK][1] = replace(runs[STOCK][1], scenes={PLAIN: runs[SERVED][0].scenes[STEERED]})

    assert REPEATS in of(runs, Status.FAILED)


def test_eager_mode_that_captured_nothing_fails() -> None:
    runs = make_runs()
    empty = [replace(answer, rows=None) for answer in runs[EAGER][0].scenes[CAPTURED]]
    runs[EAGER] = [replace(runs[EAGER][0], scenes={CAPTURED: empty})]

    assert LIKE_EAGER in of(runs, Status.FAILED)


def test_a_mixture_of_experts_may_choose_others_for_few_tokens() -> None:
    runs = make_runs()
    few, many = noisy, to_first_row
    for num_experts, change, status in ((8, few, Status.WARNING), (0, few, Status.FAILED), (8, many, Status.FAILED)):
        eager = runs[EAGER][0]
        answers = [
            replace(answer, rows=change(answer.rows)) if answer.rows else answer for answer in eager.scenes[CAPTURED]
        ]
        facts = replace(eager.facts, num_experts=num_experts)
        changed = {**runs, EAGER: [replace(eager, scenes={CAPTURED: answers}, facts=facts)]}

        assert judge(changed)[LIKE_EAGER].status is status


def test_other_tokens_than_stocks_fail_however_near_the_tie() -> None:
    tie = answer([5], [{5: -1.0, 6: -1.0}])
    found = difference([tie], [answer([6], tie.logprobs)])

    assert (found.num_other, found.largest) == (1, 0)
    assert equality("c", found, noise=0, rounding=0.25).status is Status.FAILED


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_models_are_compared_by_cosine(dtype: str) -> None:
    assert of(make_runs(dtype=dtype), Status.FAILED, Status.WARNING) == set()
    assert LIKE_EAGER in of(make_runs(Wrong(rows=to_first_row), dtype=dtype), Status.FAILED)


def test_choices_of_experts_are_not_compared_where_numbers_are_rounded() -> None:
    rng = np.random.default_rng(1)
    values = {
        site: rng.normal(size=(3, 4)).astype(np.float32) for site in ("0.experts", "1.expert_weights", "1.post_mlp")
    }

    def answers(*sites: str, other: float = 0.0) -> list[RequestAnswer]:
        kept = {site: (values[site] + other * ("expert" in site)).tobytes() for site in sites}
        rows = AnswerRows(status="ok", positions=[0, 1, 2], token_ids=[1, 2, 3], hidden_size=4, values=kept)
        return [RequestAnswer(label="", prompt=[1, 2, 3], tokens=[4], logprobs=[], rows=rows)]

    def judged(dtype: str, *sites: str) -> Verdict:
        return judge_rows(answers(*sites), answers(*sites, other=1.0), dtype, is_moe=True)

    alone, beside, exact = (
        judged("bfloat16", *list(values)[:2]),
        judged("bfloat16", *values),
        judged("float32", *values),
    )
    assert (alone.status, alone.figure) == (Status.WARNING, "not compared in 16 bits: expert_weights, experts")
    assert beside.status is Status.PASSED
    assert beside.figure.startswith("smallest cosine 1.0000 of 3 vectors")
    assert beside.figure.endswith("; not compared in 16 bits: expert_weights, experts")
    assert (exact.status, "6 are off" in exact.figure, "not compared" in exact.figure) == (Status.FAILED, True, False)


def test_sites_that_are_far_apart_cannot_show_single_tokens() -> None:
    far = Wrong(rows=lambda rows: replace(rows, values={"2.post_mlp": rows.values["2.post_mlp"]}))

    assert judge(make_runs(far))[EVERY_TOKEN].status is Status.SKIPPED


def test_graphs_are_not_asked_for_where_stock_has_none() -> None:
    runs = make_runs(Wrong(recording=lambda found: {"replays": {}}))
    runs[STOCK][0] = replace(runs[STOCK][0], replays={})

    assert judge(runs)[REPLAYS].status is Status.SKIPPED


def test_the_idle_cost_is_the_median_with_quartiles_of_all_pairs() -> None:
    runs = make_runs()
    runs[STOCK] = [replace(runs[STOCK][0], step_ms={1: [1.0, 2.0]}), replace(runs[STOCK][1], step_ms={1: [3.0]})]
    runs[IDLE] = [replace(runs[IDLE][0], step_ms={1: [2.1, 2.1]})]

    (cost,) = idle_costs(runs)

    assert (cost.stock_ms, cost.idle_ms, round(cost.percent, 6)) == (2.0, 2.1, 5.0)
    assert (round(cost.low), round(cost.high)) == (-21, 84)


@pytest.mark.parametrize(
    ("high", "bound", "is_limit", "status"),
    [
        (8.0, 6.0, True, Status.PASSED),
        (8.0, 2.0, False, Status.WARNING),
        (8.0, 2.0, True, Status.FAILED),
        (80.0, 6.0, False, Status.WARNING),
        (80.0, 6.0, True, Status.FAILED),
    ],
)
def test_a_cost_is_held_against_its_bound_if_it_can_be_told(high: float, bound: float, is_limit: bool, status: Status):
    cost = Cost(in_flight=1, stock_ms=2.0, idle_ms=2.1, percent=5.0, low=4.0, high=high)

    assert [verdict.status for verdict in judge_costs([cost], bound=bound, is_limit=is_limit)] == [status]


def answer(tokens: list[int], logprobs: list[dict[int, float]]) -> RequestAnswer:
    return RequestAnswer(label="", prompt=[1], tokens=tokens, logprobs=logprobs)


def test_what_follows_another_token_is_not_compared() -> None:
    one = answer([5, 6], [{5: -1.0, 6: -1.5}, {6: -1.0, 7: -2.0}])
    other = answer([6, 9], [{6: -1.0, 5: -1.5}, {9: -0.1, 8: -9.0}])

    found = difference([one], [other])

    assert (found.num_other, found.largest) == (1, 0.5)


def test_a_token_that_was_not_among_the_best_differs_without_bound() -> None:
    found = difference([answer([5], [{5: -1.0}])], [answer([6], [{6: -1.0}])])

    assert found.largest == np.inf
    assert equality("c", found, noise=0.1, rounding=0.1).status is Status.FAILED


def test_answers_to_other_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different prompts"):
        difference([answer([5], [{5: -1.0}])], [replace(answer([5], [{5: -1.0}]), prompt=[2])])


STEP = st.dictionaries(st.integers(0, 9), st.floats(-20, 0, allow_nan=False), min_size=1, max_size=5)


@given(STEP, STEP)
def test_steps_differ_alike_in_both_directions_and_not_from_themselves(one: Any, other: Any) -> None:
    assert step_difference(one, one) == 0
    assert step_difference(one, other) == step_difference(other, one) >= 0


@given(STEP, st.floats(0.001, 5))
def test_a_step_that_moved_as_a_whole_differs_by_that(step: Any, by: float) -> None:
    assert step_difference(step, {token: value - by for token, value in step.items()}) == pytest.approx(by)


@pytest.mark.parametrize("other", [{1: float("nan")}, {}])
def test_a_step_of_nan_or_nothing_differs_from_any_other(other: dict[int, float]) -> None:
    assert step_difference({1: -1.0}, other) == np.inf
    assert step_difference(other, other) == 0


def test_scenes_say_which_requests_they_hold() -> None:
    """The checks find what they need by label and order."""
    scenes = make_runs()[SERVED][0].scenes

    assert {a.label.split()[0] for a in scenes[STEERED]} == {"mate", "both", "decode", "prefill", "zero"}
    assert {a.label for a in scenes[STEERED]} == {f"{a.label.split()[0]} 0.post_mlp" for a in scenes[STEERED]}
    assert len({tuple(a.prompt) for a in scenes[SITES_AT_ANSWERS]}) > 1


@given(st.integers(16, 10**6), st.integers(MIN_MODEL_LENGTH, 4096))
def test_prompts_fit_the_model_and_leave_out_the_ends_of_the_vocabulary(vocabulary: int, max_model_len: int) -> None:
    requests = plain_requests(vocabulary, max_model_len)

    assert all(0 < len(request.prompt) + request.max_tokens < max_model_len for request in requests)
    assert all(vocabulary // 8 <= token < vocabulary // 2 for request in requests for token in request.prompt)
    assert requests == plain_requests(vocabulary, max_model_len)


@pytest.mark.parametrize(
    ("steerable", "captured", "site"),
    [
        (["0.post_mlp", "1.post_mlp"], ["1.post_mlp", "2.pre_attn"], "1.post_mlp"),
        (["0.pre_attn", "1.post_mlp"], ["0.post_mlp", "1.pre_attn", "1.post_mlp", "2.pre_attn"], "1.post_mlp"),
        (["0.pre_attn", "1.post_mlp"], ["1.post_mlp", "final_norm"], "0.pre_attn"),
        (["2.mlp_out"], ["0.post_mlp", "1.pre_attn"], "2.mlp_out"),
    ],
)
def test_steering_is_seen_between_two_captures_where_it_can_be(steerable: Any, captured: Any, site: str) -> None:
    assert steered_site([*map(Site.parse, steerable)], [*map(Site.parse, captured)]) == Site.parse(site)
