"""Gates on a real engine are what the specification says: rows, logprobs and traces equal Hugging Face's, row by row.

One engine with few KV blocks. Prompts are cut into chunks of at most 16 tokens, and of one where others need the rest.
`gate_reference` says what is right; `gate_cases` are the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.consumers.reader import open_captures
from headgate.steering.vectors.sums import LIMIT, MAX_STRENGTH
from tests.conftest import stop_llm
from tests.engine.gate_making import NUM_OUTPUT, PROMPTS, GateCase, names
from tests.engine.gate_reference import Gated, told
from tests.engine.gate_runs import (
    BLOCK,
    FAMILY,
    Run,
    captured_of,
    check,
    generate,
    made_cases,
    params_of,
    serve,
    start,
    told_of,
)
from tests.engine.hf_reference import own_process, relative_error
from tests.engine.steering_cases import MAX_ERROR, logprobs_of
from tests.engine.tiny_models import HIDDEN, LAYERS, tiny_model

SHORT_OUTPUT, LONG_OUTPUT = 20, 45
PREEMPTED = ("early, ", "attenuate early", "at the end", "next_token, {'ema'", "many", "named", "neighbour", "loops")
"""Of the cases that are short of blocks together."""
STATEFUL = ("rest_of_request, token", "this_token, {'ema': 0.3}", "early, rest_of_request", "loops, ", "prompt_mean")
"""Of the cases whose gates have states: latches, averages and control loops."""
PRESSURE = ("alone", "pressed")
CONTINUED = {
    "early, next_token, 1, False": (0, 0),
    "attenuate early, rest_of_request, 1": (0, 0),
    "this_token, {'ema': 0.3}": (0, 0),
    "a module on the very token": (0, BLOCK),
    "operations in part": (0, BLOCK),
    "neighbour 3": (BLOCK, BLOCK),
}
"""Tokens from the cache for an answer that came back as a prompt, and for that prompt again: none with states."""
RULED = ("early, next_token, 1, False", "this_token, {'ema': 0.3}", "a module on the very token")
"""Of the cases that are rules as well."""
COUNTED = (
    "this_token, {'ema': 0.3}",
    "a module on the very token",
    "early, next_token, 1, False",
    "operations in part",
)
"""Of the cases whose gates are counted; one acts early, and is told row by row."""
REPLAYED = ("early", "attenuate", "rest_of_request", "operations", "many")


@pytest.fixture(scope="module")
def references() -> Iterator[Executor]:
    with own_process() as executor:
        yield executor


@pytest.fixture(scope="module")
def cases(references: Executor) -> list[GateCase]:
    return made_cases(references)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where captures are written."""
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, cases: list[GateCase], root: Path) -> Iterator[Any]:
    llm = start(tmp_path_factory.mktemp("saes"), None, [{"name": "filesystem", "params": {"root": str(root)}}])
    yield llm
    stop_llm(llm)


@pytest.fixture(scope="module")
def run(llm: Any, cases: list[GateCase], references: Executor) -> Run:
    return serve(llm, cases, references)


def test_the_cases_are_hard(run):
    """Gates of each case act, on some rows and not on all, in prompts and answers."""
    acts = {"prompt": 0, "answer": 0, "in part": 0}
    for request, expected in zip(run.requests, run.expected, strict=True):
        for applied in map(np.array, expected.applied.values()):
            num_prompt = len(request.prompt)
            acts["prompt"] += 0 < np.count_nonzero(applied[:num_prompt]) < num_prompt
            acts["answer"] += bool(applied[num_prompt:].any())
            acts["in part"] += bool(((applied > 0) & (applied < 1)).any())
    assert min(acts.values()) > 20, acts


def test_rows_logprobs_and_traces_equal_hugging_face(run):
    check(run, captures=True)


def check_replay(requests: Sequence[Gated], samples: Sequence[Any], references: Executor) -> None:
    """Adding what traces say was applied gives the logprobs that the engine gave."""
    replayed = []
    for request, sample in zip(requests, samples, strict=True):
        applied = {name: gate["applied"] for name, gate in sample.steering_trace["gates"].items()}
        applied = {name: [value or 0.0 for value in column] for name, column in applied.items()}
        replayed.append(replace(request, applied=applied))
    found = references.submit(told, tiny_model(FAMILY), FAMILY, replayed, names()).result()
    for request, sample, expected in zip(replayed, samples, found, strict=True):
        logits = expected.reference.logits[len(request.prompt) - 1 :].float().log_softmax(-1)
        assert relative_error(logprobs_of(sample.logprobs), logits) <= MAX_ERROR, request.gates


def test_rows_that_are_counted_without_being_told_are_those_of_traces(llm, cases):
    """Whoever asks for no trace is counted on the device; alone, so that no row is computed twice."""
    some = chosen(cases, COUNTED)
    for at, case in enumerate(some):
        llm.reset_prefix_cache()
        (traced,) = generate(llm, [case], [PROMPTS[case.prompt]], NUM_OUTPUT)
        gates = traced.outputs[0].steering_trace["gates"]
        quiet = [{**gate, "name": f"quiet {at} {name}"} for gate, name in zip(case.gates, gates, strict=True)]
        params = params_of(replace(case, gates=quiet), NUM_OUTPUT)
        params.return_steering_trace = False
        llm.reset_prefix_cache()
        (answer,) = llm.generate([{"prompt_token_ids": PROMPTS[case.prompt]}], params, use_tqdm=False)

        counted = llm.steering.dynamic().gates
        assert list(answer.outputs[0].token_ids) == list(traced.outputs[0].token_ids)
        for name, told_gate in gates.items():
            assert counted[f"quiet {at} {name}"] == np.count_nonzero(told_gate["applied"]), (case.name, name)
    assert sum(count > 0 for name, count in llm.steering.dynamic().gates.items() if "quiet" in name) >= len(some)


def test_a_replay_of_what_was_applied_gives_the_same_logprobs(run, references):
    every = zip(run.cases, run.requests, run.samples, strict=True)
    some = [(request, sample) for case, request, sample in every if any(name in case.name for name in REPLAYED)]
    check_replay([request for request, _ in some], [sample for _, sample in some], references)


def test_scores_of_captured_rows_are_those_of_the_trace(run):
    num_probes = 0
    for case, output, sample in zip(run.cases, run.outputs, run.samples, strict=True):
        captured = captured_of(output, sample, case)
        for gate in case.gates:
            probe = gate["when"].get("probe") if isinstance(gate["when"], dict) else None
            if isinstance(probe, dict):
                name = gate.get("name", f"gate{case.gates.index(gate)}")
                (site,) = (site for site in captured.sites if site.name == probe["at"])
                scores = captured[site].double() @ torch.tensor(probe["weight"]).double() + probe["bias"]
                got = torch.tensor(sample.steering_trace["scores"][name])
                assert relative_error(got, scores) <= MAX_ERROR, (case.name, name)
                num_probes += 1
    assert num_probes > 50


def values_of(trace: Mapping[str, Any]) -> list[list[float]]:
    gates = [column for gate in trace["gates"].values() for column in (gate["strength"], gate["applied"])]
    return [*trace["scores"].values(), *gates]


def test_files_say_how_rows_were_steered_though_the_request_asks_for_no_trace(llm, cases, root):
    """A gate of the request's own, a rule on a request that has none, and a neighbour on which nothing acts."""
    (gated,), (plain,) = chosen(cases, ("early, next_token, 1, False",)), chosen(cases, ("neighbour 3",))
    llm.steering.register_rule(applies_to="opt_in", **{**gated.gates[0], "name": "now"})
    params = {}
    for name, case, rules in (("own", gated, None), ("ruled", plain, ["now"]), ("plain", plain, None)):
        for is_traced in (True, False):
            each = params[name, is_traced] = params_of(case, NUM_OUTPUT)
            each.return_steering_trace, each.steering_rules = is_traced, rules
            wanted = {"hooks": {"post_mlp": [1]}, "positions": "all", "request_id": f"{name}-{is_traced}"}
            each.capture, each.capture_wait = {"filesystem": wanted}, True
    prompts = [{"prompt_token_ids": PROMPTS[gated.prompt if name == "own" else plain.prompt]} for name, _ in params]

    outputs = dict(zip(params, llm.generate(prompts, list(params.values()), use_tqdm=False), strict=True))

    llm.steering.unregister_rule("now")
    files = {capture.request_id: capture.metadata for capture in open_captures(root)}
    for name in ("own", "ruled"):
        trace = outputs[name, True].outputs[0].steering_trace
        assert outputs[name, False].outputs[0].steering_trace is None
        assert len(trace["positions"]) == len(prompts[0 if name == "own" else 2]["prompt_token_ids"]) + NUM_OUTPUT - 1
        assert any(gate["applied"] for gate in trace["gates"].values())
        assert files[f"{name}-True"]["notes"] == {"steering": trace}
        found = files[f"{name}-False"]["notes"]["steering"]
        assert found["positions"] == trace["positions"]
        for one, other in zip(values_of(found), values_of(trace), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert files["plain-False"]["notes"] == {}


def test_the_largest_changes_leave_nothing_in_the_cache_that_is_no_number(llm, cases):
    """What is left there a later request would multiply by 0, and not get 0: one client would spoil others' answers."""
    plain = next(case for case in cases if not case.gates)
    before = generate(llm, [plain], [PROMPTS[plain.prompt]], NUM_OUTPUT)[0].outputs[0].token_ids
    row = [0.99 * LIMIT["float32"]] * HIDDEN
    hooks = ("pre_attn", "attn_in", "post_attn", "mlp_in", "post_mlp")
    sites = {hook: {str(layer): row for layer in range(LAYERS)} for hook in hooks}
    always = {"cosine": [1.0] * HIDDEN, "at": "0.pre_attn", "above": -3.0, "hysteresis": 1.0}
    gates = [
        {"when": always, "then": {"vectors": sites}, "strength": {"proportional": MAX_STRENGTH}, "scope": scope}
        for scope in ("next_token", "rest_of_request")
    ]
    largest = GateCase(name="largest", gates=gates)
    away = {"method": "ablate", "scale": -1e38, "vector": [1.0] * HIDDEN}
    grown = {"method": "norm_scaled_add", "scale": 1e38, "vector": [1.0] * HIDDEN}
    ops = [{**op, "at": f"{layer}.post_mlp"} for op in (away, grown) for layer in range(LAYERS)]
    growing = GateCase(name="growing", gates=[{"when": always, "then": {"ops": ops}, "scope": "rest_of_request"}])

    for case in (largest, growing):
        generate(llm, [case] * len(PROMPTS), PROMPTS, NUM_OUTPUT)

    caches = llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches
    assert all(torch.isfinite(cache.float()).all() for cache in caches)
    (after,) = generate(llm, [plain], [PROMPTS[plain.prompt]], NUM_OUTPUT)
    assert list(after.outputs[0].token_ids) == list(before)


def test_neighbours_have_the_answers_that_they_have_alone(llm, run):
    pairs = [(case, sample) for case, sample in zip(run.cases, run.samples, strict=True) if not case.gates]
    assert len(pairs) == 3
    for case, sample in pairs:
        (alone,) = generate(llm, [case], [PROMPTS[case.prompt]], NUM_OUTPUT)
        assert list(alone.outputs[0].token_ids) == list(sample.token_ids)
        assert relative_error(logprobs_of(sample.logprobs), logprobs_of(alone.outputs[0].logprobs)) <= 1e-5
        assert sample.steering_trace is None


def chosen(cases: Sequence[GateCase], wanted: Sequence[str]) -> list[GateCase]:
    return [case for case in cases if case.n == 1 and any(name in case.name for name in wanted)]


@pytest.fixture
def preempted(llm, monkeypatch) -> dict[int, int]:
    """Generated tokens of requests when they were preempted, by the number of each request."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, {}

    def count(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted[int(request.request_id.split("-")[0])] = request.num_output_tokens
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", count)
    return preempted


def test_preempted_requests_go_on_as_they_began(llm, cases, references, preempted):
    some = chosen(cases, PREEMPTED)

    outputs = generate(llm, some, [PROMPTS[case.prompt] for case in some], LONG_OUTPUT)

    first = min(int(output.request_id.split("-")[0]) for output in outputs)
    names = {some[index - first].name for index, num_output in preempted.items() if num_output > 1}
    assert len(names) >= 5, names
    assert any(name.startswith(("early", "attenuate early")) for name in names), names
    check(told_of(some, outputs, references))


def long_params(case: GateCase, label: str, *, is_traced: bool) -> Any:
    """Of a case whose gates are named after a label, so that their rows are counted by themselves."""
    gates = [{**gate, "name": f"{label} {at}"} for at, gate in enumerate(case.gates)]
    params = params_of(replace(case, gates=gates), LONG_OUTPUT)
    params.return_steering_trace = is_traced
    return params


@pytest.mark.parametrize("is_traced", [True, False], ids=["traced", "counted"])
def test_states_of_preempted_requests_are_those_without_pressure(llm, cases, preempted, is_traced):
    """Latches, averages and control loops, with steps in flight; a row that is computed again is counted again."""
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    some = chosen(cases, STATEFUL)
    prompts = [{"prompt_token_ids": PROMPTS[case.prompt]} for case in some]
    kind = "traced" if is_traced else "counted"
    alone, pressed = (
        [long_params(case, f"{how} {kind} {at}", is_traced=is_traced) for at, case in enumerate(some)]
        for how in PRESSURE
    )
    llm.reset_prefix_cache()

    calm = [llm.generate([prompt], each, use_tqdm=False)[0] for prompt, each in zip(prompts, alone, strict=True)]
    assert not preempted
    short = llm.generate(prompts, pressed, use_tqdm=False)

    assert sum(num_output > 1 for num_output in preempted.values()) >= 3, preempted
    counted = llm.steering.dynamic().gates
    for at, (case, one, other) in enumerate(zip(some, calm, short, strict=True)):
        assert list(one.outputs[0].token_ids) == list(other.outputs[0].token_ids), case.name
        rows = [[counted.get(f"{how} {kind} {at} {gate}", 0) for gate in range(len(case.gates))] for how in PRESSURE]
        assert all(few <= many for few, many in zip(*rows, strict=True)), case.name
        if is_traced:
            traces = [each.outputs[0].steering_trace for each in (one, other)]
            assert traces[0]["positions"] == traces[1]["positions"]
            for left, right in zip(*map(values_of, traces), strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4, err_msg=case.name)
    assert sum(count > 0 for name, count in counted.items() if f"pressed {kind}" in name) > len(some)


def test_continuations_and_repetitions_equal_a_fresh_engine(llm, cases, references):
    llm.reset_prefix_cache()
    some, outputs, cached = chosen(cases, tuple(CONTINUED)), [], {}
    for case in some:
        (first,) = generate(llm, [case], [PROMPTS[case.prompt]], SHORT_OUTPUT)
        prompt = [*first.prompt_token_ids, *first.outputs[0].token_ids, 7, 8]
        again = [generate(llm, [case], [prompt], 3)[0] for _ in range(2)]
        cached[case.name] = tuple(output.num_cached_tokens for output in again)
        outputs += again

    assert cached == CONTINUED
    check(told_of([case for case in some for _ in range(2)], outputs, references))


@dataclass(frozen=True, kw_only=True)
class RuledCase(GateCase):
    """A request whose gates are rules of the operator's, which it names."""

    def fields(self) -> dict[str, Any]:
        rules = [gate["name"] for gate in self.gates]
        return {**self.static.fields(), "steering_rules": rules, "return_steering_trace": True}


@pytest.fixture
def ruled(llm, cases) -> Iterator[list[GateCase]]:
    """Cases with gates that are rules now."""
    found: list[GateCase] = []
    for case in chosen(cases, RULED):
        gates = [{**gate, "name": f"rule {len(found)}.{at}"} for at, gate in enumerate(case.gates)]
        for gate in gates:
            llm.steering.register_rule(applies_to="opt_in", **gate)
        found.append(RuledCase(name=case.name, gates=gates, prompt=case.prompt, static=case.static))
    assert len(found) == len(RULED)
    yield found
    for name in list(llm.steering.rules()):
        llm.steering.unregister_rule(name)


def test_rules_do_what_the_same_gates_do(llm, ruled, references):
    run = serve(llm, ruled, references)

    check(run, captures=True)
    counted = {rule.name: rule.rows for rule in llm.steering.dynamic().rules}
    written = {name: gate["applied"] for one in run.samples for name, gate in one.steering_trace["gates"].items()}
    assert counted == {name: np.count_nonzero(applied) for name, applied in written.items()}
    assert np.count_nonzero(list(counted.values())) >= 5


def answer_in_steps(
    llm: Any, prompts: Sequence[Sequence[int]], params: Sequence[Any], changes: Mapping[int, Callable[[], object]]
) -> list[Any]:
    """The samples of requests that run together, with changes made before some steps."""
    engine, done = llm.llm_engine, {}
    for at, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(at), {"prompt_token_ids": prompt}, one)
    for step in count():
        changes.get(step, bool)()
        done.update({int(output.request_id): output for output in engine.step() if output.finished})
        if not engine.has_unfinished_requests():
            return [done[at].outputs[0] for at in range(len(params))]


def test_a_rule_that_is_on_for_some_steps_writes_in_those_alone(llm, cases, references):
    """Beside a request with a gate of its own, whose rows it steers as well, and one that opted out."""
    (gated,), (plain,) = chosen(cases, ("early, next_token, 1, False",)), chosen(cases, ("neighbour 3",))
    soft = {"strength": {"sigmoid": 2.0}}  # always on
    rule = {**gated.gates[0], "name": "now", **soft}
    away = replace(plain, name="opted out")
    llm.reset_prefix_cache()
    every, num_output = (gated, plain, away), NUM_OUTPUT + 8
    params = [params_of(case, num_output) for case in every]
    params[1].return_steering_trace = True
    params[2].steering_rules = []
    changes = {
        9: lambda: llm.steering.register_rule(applies_to="opt_out", **rule),
        15: lambda: llm.steering.unregister_rule("now"),
    }

    *steered, third = answer_in_steps(llm, [PROMPTS[case.prompt] for case in every], params, changes)

    for sample in steered:
        column = sample.steering_trace["gates"]["now"]["applied"]
        is_on = np.array([value is not None for value in column])
        first, last = np.flatnonzero(is_on)[[0, -1]]
        assert is_on[first : last + 1].all()
        assert 0 < first < last < len(column) - 1
        assert any(column[first : last + 1])
        assert sample.steering_trace["scores"]
    requests = [
        Gated(prompt=PROMPTS[case.prompt], output=list(sample.token_ids), gates=[*case.gates, rule])
        for case, sample in zip((gated, plain), steered, strict=True)
    ]
    check_replay(requests, steered, references)
    (alone,) = generate(llm, [away], [PROMPTS[away.prompt]], num_output)
    assert list(alone.outputs[0].token_ids) == list(third.token_ids)
    assert relative_error(logprobs_of(third.logprobs), logprobs_of(alone.outputs[0].logprobs)) <= 1e-5
