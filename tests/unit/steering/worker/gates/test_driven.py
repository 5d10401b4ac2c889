"""Coefficients that controllers set: each row has the one of its position, however rows are computed and again."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headgate.steering.gates.coefficient_changes import CoefficientChange, CoefficientChanges
from headgate.steering.programs.codes import EVERYWHERE, Code
from headgate.steering.programs.gate_codes import TokenFlag, gate_field
from headgate.steering.programs.program import Entry, Program
from headgate.steering.worker.gates.requests import OwnGates
from headgate.steering.worker.gates.step_gates import GateWrites, StepGates
from headgate.steering.worker.rows.rule_programs import ActingRule
from headgate.steering.worker.rows.step_sequence import StepSequence
from tests.unit.steering.worker.gates.test_step_gates import COLUMNS, SITE, view

PROMPT, LAST = 3, 12
DRIVEN = (1, 3)


def driven_rule(column: int) -> ActingRule:
    entry = Entry(SITE, Code.ADD, None, np.ones(4, np.float32), (), gate_field(EVERYWHERE, column, is_early=True))
    program = Program.from_entries([entry], "float32")
    return ActingRule(f"drive {column}", None, (column, column + 1), (program, program))


class Device:
    """The tensors of a worker's gates, and the coefficients that entries find there."""

    def __init__(self) -> None:
        self.gates = StepGates(max_tokens=64, max_num_seqs=4, num_columns=COLUMNS, device=torch.device("cpu"))
        self.sequence = StepSequence()
        self.gates.set_rules([driven_rule(column) for column in DRIVEN])
        self.signals = np.zeros((64, COLUMNS), np.float32)
        self.states = np.full((9, COLUMNS), np.nan, np.float32)
        self.tokens = np.zeros((64, 2), np.int32)

    def step(self, *requests: tuple[str, int, int]) -> list[dict[int, float]]:
        """Run a step; returns the coefficients of each row, by column."""
        writes = self.begin(*requests)
        if writes is not None:
            self._write(writes)
        self.gates.step_ends()
        count = sum(each for *_, each in requests)
        return [{column: self._coefficient(row, column) for column in DRIVEN} for row in range(count)]

    def begin(self, *requests: tuple[str, int, int]) -> GateWrites | None:
        step = view(*requests)
        return self.gates.step_begins(step, goes_on=self.sequence.goes_on(step))

    def _write(self, writes: GateWrites) -> None:
        for first, end in writes.columns:
            self.states[:, first:end] = np.nan
        self.tokens[: len(writes.tokens)] = writes.tokens
        self.states[writes.cleared] = np.nan
        self.signals.reshape(-1)[writes.places] = writes.strengths
        self.states.reshape(-1)[writes.state_places] = writes.states

    def _coefficient(self, row: int, column: int) -> float:
        slot, flags = self.tokens[row].tolist()
        if flags & TokenFlag.IS_REPLAYED:
            return float(np.nan_to_num(self.signals[row, column]))
        return float(np.nan_to_num(self.states[slot, column])) if flags & TokenFlag.IS_GENERATED else 0.0


changes = st.lists(
    st.tuples(st.integers(PROMPT, LAST), st.sampled_from(DRIVEN), st.sampled_from([0.0, 0.5, -1.0, 2.0])), max_size=8
)
"""Position from which a coefficient is to act, column and value."""


@given(changes=changes, cut=st.lists(st.integers(1, 5), min_size=1, max_size=6), is_preempted=st.booleans())
def test_each_row_has_what_was_set_for_its_position(
    changes: list[tuple[int, int, float]], cut: list[int], is_preempted: bool
) -> None:
    device, expected = Device(), [dict.fromkeys(DRIVEN, 0.0) for _ in range(LAST + 1)]
    device.gates.add("a", OwnGates(PROMPT))
    device.gates.add("b", OwnGates(PROMPT))
    device.gates.drive(CoefficientChanges.of([CoefficientChange("b", 1, PROMPT, 9.0)]))
    device.step(("a", 0, PROMPT), ("b", 0, 1))
    for position in range(PROMPT, LAST + 1):
        due = [
            CoefficientChange("a", column, first, value)
            for first, column, value in sorted(changes)
            if first == position
        ]
        device.gates.drive(CoefficientChanges.of(due))
        for _, column, _, value in due:
            for later in expected[position:]:
                later[column] = value
        assert device.step(("a", position, 1), ("b", 1, 1))[0] == expected[position]
    if is_preempted:
        device.gates._slots.release("a")
        device.gates._batch = None
    at = 0
    while at <= LAST:
        count = min(cut[at % len(cut)], LAST + 1 - at)
        assert device.step(("a", at, count)) == expected[at : at + count]
        at += count


def test_a_request_that_comes_again_has_nothing_of_its_former_self() -> None:
    device = Device()
    device.gates.add("a", OwnGates(1))
    device.gates.drive(CoefficientChanges.of([CoefficientChange("a", 3, 1, 5.0)]))
    device.step(("a", 0, 1))
    assert device.step(("a", 1, 1)) == [{1: 0.0, 3: 5.0}]

    device.gates.remove("a")
    device.gates.add("a", OwnGates(1))
    device.gates.add("b", OwnGates(1))
    device.gates.drive(CoefficientChanges.of([CoefficientChange("b", 3, 1, 0.0)]))

    device.step(("a", 0, 1), ("b", 0, 1))
    assert device.step(("b", 1, 1)) == [{1: 0.0, 3: 0.0}]
    assert device.gates.num_requests == 1


def test_steps_in_which_nothing_changes_write_nothing() -> None:
    device = Device()
    device.gates.add("a", OwnGates(1))
    device.gates.drive(CoefficientChanges.of([CoefficientChange("a", 1, 3, 5.0)]))
    for position in range(3):
        device.step(("a", position, 1))

    writes = device.begin(("a", 3, 1))

    assert writes is not None
    assert (writes.states.tolist(), len(writes.tokens)) == ([5.0], 0)
    assert device.begin(("a", 4, 1)) is None


def test_a_long_history_is_kept_where_most_requests_have_ended() -> None:
    device, length = Device(), 300
    names = [f"r{at}" for at in range(3)]
    for name in names:
        device.gates.add(name, OwnGates(1))
    device.step(*((name, 0, 1) for name in names))
    for position in range(1, length):
        changes = [CoefficientChange(name, 1, position, position + at / 4) for at, name in enumerate(names)]
        device.gates.drive(CoefficientChanges.of(changes))
        found = device.step(*((name, position, 1) for name in names))
        assert [each[1] for each in found] == [position + at / 4 for at in range(len(names))]
        if position == length // 2:
            device.gates.remove(names.pop(0))
            device.gates.add("new", OwnGates(1))  # has the place of the one before
            device.gates.drive(CoefficientChanges.of([CoefficientChange("new", 3, 1, 7.0)]))
            device.step(("new", 0, 1))
    (name, _) = names

    again = [each for start in range(0, length, 60) for each in device.step((name, start, 60))]

    before, behind = range(1, length // 2 + 1), range(length // 2 + 1, length)
    assert [each[1] for each in again] == [0.0, *(position + 1 / 4 for position in before), *behind]
    assert device.step(("new", 0, 2))[1][3] == 7.0
