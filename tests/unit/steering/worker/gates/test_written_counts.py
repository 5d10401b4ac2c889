"""Rows that gates write are counted on the device, and read when a request ends, begins anew or is asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headgate.steering.gates.gate import COUNT, AppliesTo
from headgate.steering.worker.gates.requests import OwnGates
from headgate.steering.worker.gates.step_gates import StepGates
from headgate.steering.worker.placed_programs import ActingRule
from tests.unit.steering.worker.gates.test_step_gates import COLUMNS, program, view

COUNTED = OwnGates(2, (program(1, is_early=False),), is_counted=True)


def gates_with(*req_ids: str, max_num_seqs: int = 4, is_output_rank: bool = True) -> StepGates:
    device = torch.device("cpu")
    gates = StepGates(16, max_num_seqs, COLUMNS, device, is_output_rank=is_output_rank)
    for req_id in req_ids:
        gates.add(req_id, COUNTED)
    return gates


def run(gates: StepGates, *requests: tuple[str, int, int], written: int = 1) -> None:
    """A step whose forward counts `written` rows for each request; one that resets begins at none, as there."""
    writes = gates.step_begins(view(*requests))
    states, slots = gates.tensors.states, gates._batch.slots.tolist()
    if writes is not None:
        states[writes.cleared.tolist()] = torch.nan
    states[slots, 1 + COUNT] = states[slots, 1 + COUNT].nan_to_num(0.0) + written
    gates.step_ends()


def told(pieces) -> list[tuple[str, int, str]]:
    """Requests, what they have counted, and whether they go on, begin anew or have ended."""
    kinds = {(False, False): "goes on", (True, False): "begins anew", (True, True): "ended"}
    counts = [int(np.nan_to_num(piece.states[1 + COUNT])) for piece in pieces]
    return [(one.req_id, count, kinds[one.is_last, one.has_ended]) for one, count in zip(pieces, counts, strict=True)]


def test_nothing_is_read_of_steps_and_all_when_the_request_ends():
    gates = gates_with("a")
    for first, count in ((0, 2), (2, 1), (3, 1)):
        run(gates, ("a", first, count))
        assert gates.readings() is None

    gates.remove("a")
    assert told(gates.ask_counts()) == [("a", 3, "ended")]
    assert gates.ask_counts() == []


def test_whoever_asks_is_told_what_was_counted_so_far():
    gates = gates_with("a", "new")
    run(gates, ("a", 0, 2), written=2)
    assert told(gates.ask_counts()) == [("a", 2, "goes on")]

    run(gates, ("a", 2, 1))
    assert told(gates.ask_counts()) == [("a", 3, "goes on")]


def test_what_ended_is_told_with_the_next_step_beside_rows_of_others():
    gates = gates_with("a")
    gates.add("b", replace(COUNTED, is_counted=False))
    run(gates, ("b", 0, 1), ("a", 0, 2))
    readings = gates.readings()
    assert readings is not None
    assert readings.collect()["ids"] == ("b",)
    gates.remove("a")

    run(gates, ("b", 1, 1))
    readings = gates.readings()
    assert readings is not None
    found = readings.collect()

    assert told(found["written"]) == [("a", 1, "ended")]
    assert found["ids"] == ("b",)


def test_a_step_without_rows_to_tell_brings_counts_alone():
    gates = gates_with("a", "b")
    run(gates, ("a", 0, 1), ("b", 0, 1))
    gates.remove("a")
    run(gates, ("b", 1, 1))

    readings = gates.readings()
    assert readings is not None
    assert told(readings.collect().pop("written")) == [("a", 1, "ended")]
    assert gates.readings() is None


def test_rows_in_other_places_are_those_that_are_told():
    gates = gates_with("a", "c")
    gates.add("b", replace(COUNTED, is_counted=False))
    for first in (0, 1, 2, 3):
        gates.step_begins(view(("a", first, 1), ("b", first, 1), ("c", first, 1)), goes_on=first > 2)
        gates.tensors.signals[:3] = torch.arange(3.0)[:, None] + 10 * first
        gates.step_ends()
        readings = gates.readings()
        assert readings is not None
        found = readings.collect()
        assert (found["ids"], found["firsts"].tolist(), found["has_one_each"]) == (("b",), [first], True)
        assert found["values"].tolist() == [[1.0 + 10 * first] * COLUMNS]


def test_a_request_that_begins_anew_is_read_before():
    gates = gates_with("a")
    run(gates, ("a", 0, 2), written=2)
    run(gates, ("a", 0, 2), written=2)

    assert told(gates.ask_counts()) == [("a", 2, "begins anew"), ("a", 2, "goes on")]


def test_a_request_that_loses_its_slot_is_read_before():
    gates = gates_with("a", "b", "c", max_num_seqs=1)
    for at, name in enumerate("abc"):
        run(gates, (name, 0, 1), written=at + 1)

    assert told(gates.ask_counts()) == [("a", 1, "begins anew"), ("b", 2, "goes on"), ("c", 3, "goes on")]


def test_under_a_rule_rows_are_told_from_then_on():
    gates = gates_with("a")
    run(gates, ("a", 0, 1))
    rule = program(4, is_early=False)
    gates.set_rules([ActingRule("r", AppliesTo.ALL, (4, 7), (rule, rule))])
    assert told(gates.ask_counts()) == [("a", 1, "begins anew")]

    gates.set_rules([])
    run(gates, ("a", 1, 1))
    assert gates.readings() is not None
    gates.remove("a")
    assert gates.ask_counts() == []


@pytest.mark.parametrize("changes", [{"is_captured": True}, {"programs": (program(1, is_early=True),)}])
def test_who_captures_or_acts_early_is_told_row_by_row(changes):
    gates = gates_with()
    gates.add("a", replace(COUNTED, **changes))
    run(gates, ("a", 0, 1))

    assert gates.readings() is not None
    assert gates.ask_counts() == []


def test_ranks_of_which_nobody_is_told_read_nothing():
    gates = gates_with("a", is_output_rank=False)
    run(gates, ("a", 0, 1))
    gates.remove("a")

    assert gates.ask_counts() == []
    assert gates.readings() is None


def test_a_request_that_never_ran_has_nothing_to_tell():
    gates = gates_with("a")
    gates.remove("a")

    assert gates.ask_counts() == []
