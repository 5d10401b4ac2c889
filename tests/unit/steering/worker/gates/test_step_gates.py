"""Requests with gates through the steps of a worker: slots, flags, and strengths of rows that are computed again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headgate.capture.schema.batch import BatchView
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.gates.gate import AppliesTo
from headgate.steering.gates.step_table import StepTable
from headgate.steering.programs.codes import EVERYWHERE, Code, GateScope, TokenFlag, gate_field, with_change
from headgate.steering.programs.program import Entry, Program
from headgate.steering.worker.gates import readings as gate_readings
from headgate.steering.worker.gates.requests import NO_SLOT, GateSlots, OwnGates, gated_request
from headgate.steering.worker.gates.step_gates import StepGates
from headgate.steering.worker.placed_programs import ActingRule

COLUMNS = 4
SITE = Site(0, HookPoint.POST_MLP)
RESETS, ENDS, GENERATED, REPLAYED, SCANNED = TokenFlag


def view(*requests: tuple[str, int, int]) -> BatchView:
    """Requests by id, position of the first row, and number of rows, one behind the other."""
    counts = np.array([count for _, _, count in requests], np.int64)
    return BatchView(
        req_ids=tuple(req_id for req_id, _, _ in requests),
        starts=np.cumsum(counts) - counts,
        num_scheduled=counts,
        num_computed=np.array([first for _, first, _ in requests], np.int64),
    )


def program(column: int, *, is_early: bool, value: float = 1.0) -> Program:
    """A gate of which the strength that acts is in `column`, and a vector that it multiplies."""
    site, row = SITE, np.full(4, value, np.float32)
    gate = Entry(site, with_change(Code.GATE | GateScope.REST, column), None, np.zeros(4, np.float32), ())
    vector = Entry(site, Code.ADD, None, row, (), gate_field(EVERYWHERE, column, is_early=is_early))
    return Program.from_entries([gate, vector], "float32")


def gated(num_prompt: int, *, is_early: bool = False) -> OwnGates:
    return OwnGates(num_prompt, (program(1, is_early=is_early),))


def gates_with(*requests: tuple[str, OwnGates]) -> StepGates:
    gates = StepGates(max_tokens=16, max_num_seqs=4, num_columns=COLUMNS, device=torch.device("cpu"))
    for req_id, request in requests:
        gates.add(req_id, request)
    return gates


def flags(writes) -> list[int]:
    return writes.tokens[:, 1].tolist()


def test_rows_are_told_where_the_prompt_begins_and_ends():
    gates = gates_with(("a", gated(3)))

    chunk = gates.step_begins(view(("plain", 0, 2), ("a", 0, 2)))
    rest = gates.step_begins(view(("plain", 2, 1), ("a", 2, 1)))
    first = gates.step_begins(view(("plain", 3, 1), ("a", 3, 1)))
    later = gates.step_begins(view(("plain", 4, 1), ("a", 4, 1)))

    assert flags(chunk) == [0, 0, RESETS | SCANNED, SCANNED]
    assert chunk.tokens[:, 0].tolist()[:2] == [NO_SLOT, NO_SLOT]
    assert len({slot for slot, _ in chunk.tokens[2:].tolist()} | {rest.tokens[1, 0]}) == 1
    assert flags(rest)[1] == ENDS
    assert flags(first)[1] == GENERATED
    assert later is None


def test_a_request_that_comes_back_to_its_beginning_is_reset_and_a_batch_in_another_order_is_told():
    gates = gates_with(*((name, gated(2)) for name in "ab"))
    gates.step_begins(view(("a", 0, 2), ("b", 0, 2)))
    slots = gates.step_begins(view(("a", 2, 1), ("b", 2, 1))).tokens[:2, 0].tolist()

    swapped = gates.step_begins(view(("b", 3, 1), ("a", 3, 1)))
    again = gates.step_begins(view(("b", 0, 2), ("a", 4, 1)))

    assert swapped.tokens[:2, 0].tolist() == slots[::-1]
    assert flags(again) == [RESETS | SCANNED, ENDS | SCANNED, GENERATED]


def test_rows_of_others_keep_no_flag():
    gates = gates_with(("a", gated(4)), ("b", OwnGates(4)))
    gates.step_begins(view(("a", 0, 3), ("b", 0, 1)))

    later = gates.step_begins(view(("a", 3, 1), ("b", 1, 3)))

    assert flags(later) == [ENDS, 0, 0]
    assert later.tokens[1:].tolist() == [[NO_SLOT, 0]] * 2


def test_strengths_at_earlier_sites_act_again_on_rows_that_are_computed_again():
    gates = gates_with(("a", gated(2, is_early=True)))
    handed_on = {}
    for first, count in ((0, 2), (2, 1), (3, 1)):
        gates.step_begins(view(("a", first, count)))
        gates.tensors.signals[:count] = torch.arange(first * 10.0, first * 10.0 + count * COLUMNS).view(count, -1)
        for row in range(count):
            handed_on[first + row] = float(gates.tensors.signals[row, 1 + 2])
        gates.step_ends()

    again = gates.step_begins(view(("a", 0, 5)))

    assert [flag & ~SCANNED for flag in flags(again)] == [RESETS, ENDS, *[GENERATED | REPLAYED] * 3]
    assert all(flag & SCANNED for flag in flags(again))
    assert again.places.tolist() == [row * COLUMNS + 1 for row in (2, 3, 4)]
    assert again.strengths.tolist() == [handed_on[position] for position in (1, 2, 3)]


def test_of_a_long_answer_every_row_is_known_again():
    gates = gates_with(("a", gated(2, is_early=True)))
    for position in range(0, 200, 1):
        gates.step_begins(view(("a", position, 1)))
        gates.tensors.signals[0, 1 + 2] = position
        gates.step_ends()

    again = [gates.step_begins(view(("a", first, 10))) for first in range(0, 200, 10)]

    told = [value for writes in again for value in writes.strengths.tolist()]
    assert told == [position - 1 for position in range(2, 200) if position % 10]


def test_a_replayed_row_that_was_never_computed_is_a_bug_that_is_told():
    gates = gates_with(("a", gated(2, is_early=True)))

    with pytest.raises(AssertionError, match="nothing is known of its gates at position 1"):
        gates.step_begins(view(("a", 0, 3)))


def early_rule(name: str, key: int, column: int) -> ActingRule:
    """A rule for all; `key` tells its content apart."""
    programs = tuple(program(column, is_early=True, value=key) for _ in range(2))
    return ActingRule(name, AppliesTo.ALL, (column, column + 3), programs)


def test_on_rows_of_before_a_rule_that_came_while_a_request_ran_hands_nothing_on():
    """Also if nothing is known of these rows, or another rule had its columns."""
    gates = StepGates(max_tokens=16, max_num_seqs=4, num_columns=8, device=torch.device("cpu"))
    gates.add("a", OwnGates(2))
    gates.add("b", gated(2, is_early=True))

    def run(first: int, count: int) -> dict[tuple[int, int], float]:
        """Steps in which a column hands on 100 times itself, and the position; returns what acts again."""
        writes = gates.step_begins(view(("a", first, count), ("b", first, count)))
        for row in range(2 * count):
            gates.tensors.signals[row] = torch.arange(8.0) * 100 + first + row % count
        gates.step_ends()
        if writes is None:
            return {}
        places = [(place // 8, place % 8) for place in writes.places.tolist()]
        return dict(zip(places, writes.strengths.tolist(), strict=True))

    run(0, 2)
    run(2, 1)
    gates.set_rules([early_rule("one", 1, 4)])
    run(3, 1)
    replayed = run(0, 4)
    gates.set_rules([early_rule("two", 2, 4)])
    run(4, 1)
    again = run(0, 5)

    # Rows 2 and 3 of the first request follow those at positions 1 and 2: the rule acted on none of them.
    assert {place: value for place, value in replayed.items() if place[0] < 4} == {(2, 4): 0.0, (3, 4): 0.0}
    assert {place: value for place, value in replayed.items() if place[1] == 1} == {(6, 1): 301.0, (7, 1): 302.0}
    assert {value for place, value in again.items() if place[1] == 4} == {0.0}
    gates.set_rules([])
    assert gates.num_requests == 1


def test_what_is_read_is_of_the_requests_with_gates():
    gates = gates_with(("a", OwnGates(2)), ("b", gated(2)))
    gates.step_begins(view(("a", 0, 2), ("b", 1, 1)))
    gates.tensors.signals[:3] = torch.arange(3.0)[:, None]
    gates.step_ends()

    readings = gates.readings()
    assert readings is not None
    found = readings.collect()

    assert found["ids"] == ("b",)
    assert found["firsts"].tolist() == [1]
    assert found["values"].tolist() == [[2.0] * COLUMNS]


def test_nothing_is_read_if_nobody_has_gates():
    gates = gates_with(("a", OwnGates(2)))
    gates.step_begins(view(("a", 0, 2)))
    gates.step_ends()

    assert gates.readings() is None


def test_slots_go_to_those_that_had_a_step_last():
    slots = GateSlots(3)

    def take(*req_ids: str) -> tuple[list[int], list[bool]]:
        found, is_new = slots.take(req_ids)
        return found.tolist(), is_new.tolist()

    (first, second), are_new = take("a", "b")
    assert (are_new, take("a")) == ([True, True], ([first], [False]))
    assert take("c") == ([second], [True])
    slots.release("a")
    assert take("b") == ([first], [True])
    assert slots.num_used == 2


def test_a_request_of_the_step_does_not_lose_its_slot_to_another_one_of_it():
    slots, lost = GateSlots(3), []
    slots.on_loss.append(lost.append)
    (first,), _ = slots.take(["a"])
    slots.take(["b"])

    found, is_new = slots.take(["c", "a"])

    assert (found[1], is_new.tolist(), lost) == (first, [True, False], ["b"])


class Sampled:
    """What a step with drafts turned out to be: rows that count, and how many of each request do not."""

    def __init__(self, counted: BatchView, rejected: list[int]) -> None:
        self.counted, self.rejected = counted, torch.tensor(rejected)

    def is_known(self) -> bool:
        return True

    def view(self) -> BatchView:
        return self.counted

    def num_rejected(self) -> torch.Tensor:
        return self.rejected


def test_rows_of_rejected_drafts_are_taken_back_and_not_sent() -> None:
    gates = gates_with(("a", gated(2)), ("b", gated(2)), ("c", gated(9)))
    for first, count in ((0, 2), (2, 1)):
        gates.step_begins(view(*((name, first, count) for name in "abc")))
    # The host takes all drafts of the step before for accepted; c computes its prompt.
    planned = view(("a", 6, 3), ("plain", 1, 1), ("b", 4, 2), ("c", 3, 2))
    exact = replace(view(("a", 4, 1), ("plain", 1, 1), ("b", 4, 2), ("c", 3, 2)), starts=planned.starts)
    step = replace(planned, outcome=Sampled(exact, [2, 0, 0, 0]))

    writes = gates.step_begins(step)
    assert writes is not None
    gates.tensors.tokens[: len(writes.tokens)] = torch.from_numpy(writes.tokens)
    before = gates.tensors.states.normal_().clone()
    gates.launches()
    after = gates.tensors.states.normal_().clone()
    gates.tensors.signals[:8] = torch.arange(32.0).view(8, COLUMNS)
    again = gates.take_back()
    gates.step_ends()

    slots = writes.tokens[:, 0].tolist()
    of_drafts = torch.zeros(len(before), dtype=torch.bool)
    of_drafts[[slots[0], slots[4]]] = True
    assert torch.equal(gates.tensors.states, torch.where(of_drafts[:, None], before, after))
    assert again is not None
    assert again[0] == {SITE}
    generated = GENERATED | SCANNED
    assert again[1].tokens.tolist() == [[slots[0], generated], *[[0, 0]] * 3, *[[slots[4], generated]] * 2]
    readings = gates.readings()
    assert readings is not None
    found = [
        (rows.req_id, rows.first, rows.signals[:, 0].tolist()) for rows in StepTable.of(readings.collect()).rows("abc")
    ]
    assert found == [("a", 4, [0.0]), ("b", 4, [16.0, 20.0]), ("c", 3, [24.0, 28.0])]
    assert gates.take_back() is None


def test_rows_of_drafts_find_in_the_states_what_the_prompt_decided() -> None:
    gates = gates_with(("a", gated(2, is_early=True)))
    gates.step_begins(view(("a", 0, 2)))
    drafted = replace(view(("a", 2, 3)), outcome=Sampled(view(("a", 2, 3)), [0]))

    assert flags(gates.step_begins(drafted)) == [GENERATED | SCANNED] * 3


def test_nothing_is_read_of_a_step_without_rows_that_count() -> None:
    gates = gates_with(("a", gated(2)))
    gates.step_begins(view(("a", 0, 2)))
    gates.step_begins(replace(view(("a", 2, 3)), outcome=Sampled(view(("a", 2, 0)), [3])))
    gates.step_ends()

    readings = gates.readings()
    assert readings is not None
    assert readings.collect() == {}


@pytest.mark.parametrize("is_first", [True, False])
def test_of_prompts_the_columns_travel_that_somebody_reads(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    monkeypatch.setattr(gate_readings, "LARGE_BYTES", 15)
    gates = gates_with(("a", OwnGates(4, (program(0, is_early=False),) if is_first else ())), ("b", gated(2)))
    gates.step_begins(view(("a", 0, 3), ("b", 0, 2)))
    gates.tensors.signals[:5] = torch.arange(20.0).view(5, COLUMNS)
    gates.step_ends()

    readings = gates.readings()
    assert readings is not None
    found = readings.collect()
    step = StepTable.of(found)

    told = [0, 1, 2, 3] if is_first else [1, 2, 3]
    first = 0 if is_first else 3
    assert found["reported"].tolist() == told
    expected = np.zeros((5, COLUMNS), np.float32)
    expected[:, told] = np.arange(20, dtype=np.float32).reshape(5, COLUMNS)[:, told]
    np.testing.assert_array_equal(step.signals, expected[first:])
    assert [rows.first for rows in step.rows(step.ids)] == [0] * len(step.ids)


@pytest.mark.parametrize(("is_traced", "columns"), [(False, {4, 5, 6}), (True, {0, 4, 5, 6})])
def test_scores_are_told_for_a_trace_or_a_controller(is_traced: bool, columns: set[int]) -> None:
    row = np.ones(4, np.float32)
    score = Entry(SITE, with_change(Code.SCORE, 0), row, None, (1.0,))
    gate = Entry(SITE, with_change(Code.GATE, 4), None, row, ())
    leaf = Entry(SITE, with_change(Code.LEAF, 1), None, None, ())
    scores = Program.from_entries([score], "float32")
    rule = ActingRule("r", AppliesTo.ALL, (0, 1), (scores, scores))
    driven = ActingRule("d", None, (9, 10), (scores, scores))

    own = OwnGates(4, (Program.from_entries([score, leaf, gate], "float32"),), is_traced=is_traced)

    assert (found := gated_request(own, ())) is not None
    assert found.reported == columns
    assert (found := gated_request(OwnGates(4), (rule, driven))) is not None
    assert found.reported == {0}
