"""Rules in a worker: what the forward adds to rows of requests that did not ask, and to those that run already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.engine.model import forward_wrappers
from headgate.capture.engine.site_action import SiteValue
from headgate.capture.schema.consumer import ModelInfo
from headgate.steering.programs.codes import TokenFlag
from headgate.steering.programs.lowering import lower
from headgate.steering.programs.operations import Method, Operation
from headgate.steering.spec import SteeringSpec, to_wire
from headgate.steering.vectors.phase_vectors import PhaseVectors, Steerable
from tests.fakes.ruled import HIDDEN, SITES, STEERABLE, Rules, steerable, unit
from tests.unit.steering.worker.test_worker import Worker, make_facts

NEXT_EARLY = {"scope": "next_token", "then": {"vectors": {"post_mlp": {"0": unit(1)}}}}
"""Writes at a site before the one that it reads: from states of the row before."""


class Ruled(Worker):
    """A worker with rules."""

    def __init__(self, facts: WorkerFacts | None = None, model: Steerable = STEERABLE) -> None:
        op_sites = {"post_mlp": [site.layer for site in model.op_sites]}
        super().__init__(facts, op_sites=op_sites, max_steering_slots=17, max_gates=2, max_rules=3)
        self.rules = Rules(model)

    def on(self, name: str, **fields: Any) -> None:
        self.call("set_rules", rules=self.rules.on(name, **fields))

    def off(self, name: str) -> None:
        self.call("set_rules", rules=self.rules.off(name))

    def gate(self, req_id: str, num_prompt: int, *, is_rule: bool, **fields: Any) -> None:
        """Add a request with a rule, or with a gate of its own that is like one."""
        if is_rule:
            self.on("rule", **fields)
            self.add(req_id, num_prompt)
            return
        self.rules.on("rule", **fields)
        rule = self.rules.state.rules.find("rule")
        assert rule is not None
        self.add(req_id, num_prompt, SteeringSpec(prefill_program=rule.prefill, decode_program=rule.decode))

    def ran(self, first_values: list[float], *requests: tuple[str, int, int]) -> list[float]:
        """The values that a step adds along ``unit(1)`` to rows whose first value is given."""
        self.step(*requests)
        x = torch.zeros(len(first_values), HIDDEN)
        x[:, 0] = torch.tensor(first_values)
        for site, (module, runs) in self.modules.items():
            x = forward_wrappers.chained(runs)(module, site.hook.value, SiteValue(x, None, x))
        self.hook.headgate_step_ends()
        return [round(value, 5) for value in x[:, 1].tolist()]


@pytest.fixture
def worker() -> Ruled:
    return Ruled()


READS_EARLY = {
    "when": {"probe": {"at": "0.post_mlp", "weight": unit(0)}, "above": 0.0},
    "then": {"vectors": {"post_mlp": {"0": unit(1), "1": unit(1)}}},
    "scope": "next_token",
}


class Staged:
    """Pipeline stages with some layers on each, and what each sends to the next."""

    def __init__(self, *layers: Sequence[int]) -> None:
        model = steerable(*layers)
        info = ModelInfo(name="m", num_layers=model.num_layers, hidden_size=HIDDEN, dtype="float32", sites=())
        known = {"model": info, "pp_size": len(layers)}
        facts = [make_facts(**known, owned_layers=tuple(own), pp_rank=at) for at, own in enumerate(layers)]
        self.stages = [Ruled(each, model) for each in facts]

    def ran(self, first_values: list[float], *requests: tuple[str, int, int]) -> list[list[float]]:
        """What each stage adds along ``unit(1)``, as `Ruled.ran`."""
        found, sent = [], None
        for stage in self.stages:
            if sent is not None:
                stage.hook.headgate_from_last_stage(sent)
            found.append(stage.ran(first_values, *requests))
            sent = stage.hook.headgate_to_next_stage()
        return found

    def ran_in(self, first_values: list[float], req_id: str, chunks: Sequence[int]) -> list[list[float]]:
        """`ran` of a request from its first row on, in a step for each of `chunks`."""
        found: list[list[float]] = [[] for _ in self.stages]
        start = 0
        for size in chunks:
            step = self.ran(first_values[start : start + size], (req_id, start, size))
            found = [[*rows, *more] for rows, more in zip(found, step, strict=True)]
            start += size
        return found


def test_strengths_of_one_stage_act_on_the_next_and_are_read_on_the_last() -> None:
    """Also of rows that share a step with others, on stages that evaluate nothing; and not when nothing has gates."""
    staged = Staged((0,), (1,), ())
    for stage in staged.stages:
        stage.add("plain", 2)
        stage.on("calm", **READS_EARLY, applies_to="opt_out")
        stage.add("a", 3, SteeringSpec())

    first = staged.ran([1, -1, 1, 1, 1], ("a", 0, 3), ("plain", 0, 2))
    second = staged.ran([-1], ("a", 3, 1))
    third = staged.ran([1], ("a", 4, 1))

    assert first == [[0, 1, 0, 0, 1], [0, 1, 0, 0, 1], [0] * 5]
    assert (second, third) == ([[1], [1], [0]], [[0], [0], [0]])
    readings = staged.stages[2].hook.headgate_step_readings()
    assert readings is not None
    assert readings.collect()["ids"] == ("a",)
    for stage in staged.stages:
        stage.stop("a")
        stage.stop("plain")
        stage.add("b", 1)
        stage.off("calm")
    staged.ran([1], ("b", 0, 1))
    assert [stage.hook.headgate_to_next_stage() for stage in staged.stages] == [None] * 3


@pytest.mark.parametrize("is_rule", [True, False], ids=["rule", "own"])
@pytest.mark.parametrize("chunks", [[7], [4, 3], [2, 3, 2], [1, 6]], ids=str)
@pytest.mark.parametrize(("scope", "late"), [("next_token", 0), ("rest_of_request", 1)])
@pytest.mark.parametrize(
    ("layers", "read"),
    [([[0, 1, 2, 3]], 1), ([[0, 1], [2, 3]], 1), ([[0, 1], [2], [3]], 1), ([[0], [1, 2], [3]], 2)],
    ids=str,
)
def test_rows_that_are_computed_again_are_steered_as_before_on_all_stages(
    layers: list[list[int]], read: int, scope: str, late: int, chunks: list[int], is_rule: bool
) -> None:
    """A latch acts on the row that fires at sites after its probe, on all stages, and before it on later rows."""
    staged, values = Staged(*layers), [-1.0, -1, -1, 1, -1, 1, -1]
    fields = {
        "when": {"probe": {"at": f"{read}.post_mlp", "weight": unit(0)}, "above": 0.0},
        "then": {"vectors": {"post_mlp": {str(layer): unit(1) for layer in range(read - 1, 4)}}},
        "scope": scope,
    }
    for stage in staged.stages:
        stage.gate("a", 2, is_rule=is_rule, **fields)
    before = [1.0 if at in ((4, 6) if scope == "next_token" else (4, 5, 6)) else 0.0 for at in range(7)]
    after = [1.0 if late and at == 3 else value for at, value in enumerate(before)]
    written = [[after if layer >= read else before for layer in own if layer >= read - 1] for own in layers]
    expected = [[sum(found) for found in zip(*rows, strict=True)] or [0.0] * 7 for rows in written]

    first = staged.ran_in(values, "a", [2, 1, 1, 1, 1, 1])
    again = staged.ran_in(values, "a", chunks)

    assert first == expected
    assert again == expected


def test_a_rule_acts_on_plain_requests_that_run_from_the_next_step_on_and_no_longer_when_it_is_off(
    worker: Ruled,
) -> None:
    worker.add("a", 2)
    assert worker.ran([1, -1], ("a", 0, 2)) == [0, 0]

    worker.on("calm")

    assert worker.ran([1], ("a", 2, 1)) == [1]
    assert worker.ran([-1], ("a", 3, 1)) == [0]
    worker.add("b", 2)
    assert worker.ran([1, -1, 1], ("a", 4, 1), ("b", 0, 2)) == [1, 0, 1]
    worker.off("calm")
    assert worker.ran([1, 1], ("a", 5, 1), ("b", 2, 1)) == [0, 0]
    worker.stop("a")
    worker.stop("b")
    assert worker.part.headgate_stats()["steering"]["slots_live"] == 0


def test_each_request_selects_its_rules_and_keeps_its_own_vectors(worker: Ruled) -> None:
    own = PhaseVectors.from_rows({SITES[1]: 10 * unit(1)})
    worker.on("one", applies_to="opt_out")
    worker.on("two", applies_to="opt_in", then={"vectors": {"post_mlp": {"1": 4 * unit(1)}}})

    worker.add("plain", 1)
    worker.add("none", 1, SteeringSpec(rules=()))
    worker.add("both", 1, SteeringSpec(prefill=own, decode=own, rules=("two", "one")))
    worker.add("own", 1, SteeringSpec(prefill=own, decode=own))

    step = (("plain", 0, 1), ("none", 0, 1), ("both", 0, 1), ("own", 0, 1))
    assert worker.ran([1, 1, 1, 1], *step) == [1, 0, 15, 11]
    # The vectors of both requests that bring them have one slot; each rule has its weight and its vector.
    assert worker.part.headgate_stats()["steering"]["slots_live"] == 5
    worker.off("two")
    assert worker.ran([1, 1, 1, 1], *((req_id, 1, 1) for req_id, *_ in step)) == [1, 0, 11, 11]


def test_rules_act_behind_all_vectors_that_are_always_on_and_before_operations_of_requests(worker: Ruled) -> None:
    """As "Order and rounding" of the reference says."""
    half = Operation(method=Method.ABLATE, site=SITES[1], vectors={"vector": unit(1)}, numbers={"scale": 0.5})
    program, own = lower([half], "float32"), PhaseVectors.from_rows({SITES[1]: 10 * unit(1)})
    worker.on("adds", then={"vectors": {"post_mlp": {"1": 4 * unit(1)}}})

    worker.add("a", 1, SteeringSpec(prefill=own, decode=own, prefill_program=program, decode_program=program))

    assert worker.ran([1], ("a", 0, 1)) == [(10 + 4) / 2]
    assert worker.ran([1], ("a", 1, 1)) == [(10 + 4) / 2]
    worker.off("adds")
    assert worker.ran([1], ("a", 2, 1)) == [10 / 2]


def test_a_latch_stays_while_another_rule_comes_and_begins_anew_with_its_rule(worker: Ruled) -> None:
    worker.on("latch", scope="rest_of_request")
    worker.add("a", 1)
    assert worker.ran([-1], ("a", 0, 1)) == [0]
    assert worker.ran([1], ("a", 1, 1)) == [1]

    worker.on("other", then={"vectors": {"post_mlp": {"1": 4 * unit(1)}}})

    assert worker.ran([-1], ("a", 2, 1)) == [1]
    worker.off("latch")
    assert worker.ran([1], ("a", 3, 1)) == [4]
    worker.on("latch", scope="rest_of_request")
    assert worker.ran([-1], ("a", 4, 1)) == [0]
    assert worker.ran([1], ("a", 5, 1)) == [5]
    assert worker.ran([-1], ("a", 6, 1)) == [1]


def test_states_that_another_request_left_do_not_act_on_one_that_meets_its_rule_late(worker: Ruled) -> None:
    worker.on("next", **NEXT_EARLY)
    worker.add("a", 1)
    worker.ran([1], ("a", 0, 1))
    worker.stop("a")
    worker.off("next")
    worker.add("b", 1)
    worker.ran([1], ("b", 0, 1))

    worker.on("next", **NEXT_EARLY)

    assert worker.ran([1], ("b", 1, 1)) == [0]  # the row before was not read
    assert worker.ran([-1], ("b", 2, 1)) == [1]
    assert worker.ran([-1], ("b", 3, 1)) == [0]


def test_rows_before_the_rule_came_are_computed_again_without_what_nobody_knows(worker: Ruled) -> None:
    worker.add("a", 1)
    worker.ran([1], ("a", 0, 1))
    worker.ran([1], ("a", 1, 1))
    worker.on("next", **NEXT_EARLY)
    worker.ran([1], ("a", 2, 1))
    assert worker.ran([-1], ("a", 3, 1)) == [1]

    replayed = worker.ran([1, 1, 1, -1], ("a", 0, 4))

    assert replayed == [0, 0, 0, 1]


def test_a_slot_is_clean_when_a_request_gets_it_and_when_it_begins_anew(worker: Ruled) -> None:
    worker.on("latch", scope="rest_of_request")
    worker.add("a", 2)
    worker.ran([1, 1], ("a", 0, 2))
    gates = worker.part._allocated().gates
    assert gates is not None
    assert not torch.isnan(gates.tensors.states[1]).all()

    worker.step(("a", 0, 2))

    assert torch.isnan(gates.tensors.states[1]).all()
    assert gates.tensors.tokens[0, 1] & TokenFlag.RESETS


def test_rules_act_beside_global_vectors_and_stay_when_these_change(worker: Ruled) -> None:
    worker.on("calm")
    worker.add("a", 1)
    everybody = PhaseVectors.from_rows({SITES[1]: 2 * unit(1)})

    worker.call("set_global", spec=to_wire(SteeringSpec(prefill=everybody, decode=everybody)))

    assert worker.ran([1], ("a", 0, 1)) == [3]
    worker.call("set_global", spec={})
    assert worker.ran([1], ("a", 1, 1)) == [1]


def test_columns_of_rules_lie_behind_those_of_requests_and_gaps_are_filled() -> None:
    rules = Rules()
    rules.on("a")
    rules.on("b")
    firsts = {rule["name"]: rule["columns"] for rule in rules.on("c")}
    assert firsts == {"a": [16, 23], "b": [23, 30], "c": [30, 37]}

    rules.off("b")

    told = {rule["name"]: rule["columns"] for rule in rules.on("d")}
    assert told == {"a": [16, 23], "d": [23, 30], "c": [30, 37]}


def test_the_content_of_a_rule_is_the_same_in_other_columns() -> None:
    one, other = Rules(), Rules()
    one.on("a")
    other.on("x")
    other.on("a")

    same = [rules.state.rules.find("a") for rules in (one, other)]

    assert len({rule.sha256 for rule in same if rule is not None}) == 1
    assert len({rule.first for rule in same if rule is not None}) == 2
    assert len({rule.block_keys(5) for rule in same if rule is not None}) == 1
    assert same[0] is not None
    assert same[0].block_keys(5) != same[0].block_keys(6)
