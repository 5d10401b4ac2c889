"""Coefficients that controllers set: each row has the one of its position, however rows are computed and again."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.steering.gates.step_table import (
    CoefficientChange,
    CoefficientChanges,
    ColumnChanges,
    by_column,
)
from headgate.steering.programs.codes import EVERYWHERE, Code, TokenFlag, gate_field
from headgate.steering.programs.program import Entry, Program
from headgate.steering.worker.gates.requests import OwnGates
from headgate.steering.worker.gates.step_gates import GateWrites, StepGates
from headgate.steering.worker.placed_programs import ActingRule
from headgate.steering.worker.rows.step_rows import StepSequence
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
        self.gates = StepGates(max_tokens=512, max_num_seqs=4, num_columns=COLUMNS, device=torch.device("cpu"))
        self.sequence = StepSequence()
        self.gates.set_rules([driven_rule(column) for column in DRIVEN])
        self.signals = np.zeros((512, COLUMNS), np.float32)
        self.states = np.full((9, COLUMNS), np.nan, np.float32)
        self.tokens = np.zeros((512, 2), np.int32)

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
    device.gates.drive(by_column([CoefficientChange("b", 1, PROMPT, 9.0)]))
    device.step(("a", 0, PROMPT), ("b", 0, 1))
    for position in range(PROMPT, LAST + 1):
        due = [
            CoefficientChange("a", column, first, value)
            for first, column, value in sorted(changes)
            if first == position
        ]
        device.gates.drive(by_column(due))
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
    device.gates.drive(by_column([CoefficientChange("a", 3, 1, 5.0)]))
    device.step(("a", 0, 1))
    assert device.step(("a", 1, 1)) == [{1: 0.0, 3: 5.0}]

    device.gates.remove("a")
    device.gates.add("a", OwnGates(1))
    device.gates.add("b", OwnGates(1))
    device.gates.drive(by_column([CoefficientChange("b", 3, 1, 0.0)]))

    device.step(("a", 0, 1), ("b", 0, 1))
    assert device.step(("b", 1, 1)) == [{1: 0.0, 3: 0.0}]
    assert device.gates.num_requests == 1


def test_steps_in_which_nothing_changes_write_nothing() -> None:
    device = Device()
    device.gates.add("a", OwnGates(1))
    device.gates.drive(by_column([CoefficientChange("a", 1, 3, 5.0)]))
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
        device.gates.drive(by_column(changes))
        found = device.step(*((name, position, 1) for name in names))
        assert [each[1] for each in found] == [position + at / 4 for at in range(len(names))]
        if position == length // 2:
            device.gates.remove(names.pop(0))
            device.gates.add("new", OwnGates(1))  # has the place of the one before
            device.gates.drive(by_column([CoefficientChange("new", 3, 1, 7.0)]))
            device.step(("new", 0, 1))
    (name, _) = names

    again = [each for start in range(0, length, 60) for each in device.step((name, start, 60))]

    before, behind = range(1, length // 2 + 1), range(length // 2 + 1, length)
    assert [each[1] for each in again] == [0.0, *(position + 1 / 4 for position in before), *behind]
    assert device.step(("new", 0, 2))[1][3] == 7.0


class Controller:
    """The coefficients of requests as they ought to be, and changes as the engine core tells of them.

    Args:
        rng: Chooses what changes.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._named: tuple[str, ...] = ()
        self._by_id: dict[str, list[dict[int, float]]] = {}
        """Of each position that was computed, and behind them those that act next."""
        self._driven: dict[str, set[int]] = {}

    def begin(self, name: str) -> None:
        self._by_id[name], self._driven[name] = [dict.fromkeys(DRIVEN, 0.0)], set()

    def forget(self, name: str) -> None:
        del self._by_id[name]

    def positions(self) -> dict[str, int]:
        return {name: len(computed) - 1 for name, computed in self._by_id.items()}

    def changes(self, scheduled: tuple[str, ...]) -> CoefficientChanges:
        """Change some of the requests of a step that have generated rows, in one piece or in several."""
        if self._named != scheduled or self._rng.random() < 0.1:
            self._named = tuple(each for each in scheduled)  # one that is equal, as from another process
        pieces: list[ColumnChanges] = []
        for column in self._rng.choice(DRIVEN, self._rng.integers(4)).tolist():
            able = [at for at, name in enumerate(self._named) if len(self._by_id[name]) > 1]
            whose = np.array([at for at in able if self._rng.random() < 0.8], np.int64)
            if not len(whose):
                continue
            values = self._rng.normal(size=len(whose)).astype(np.float32)
            firsts = np.array([len(self._by_id[self._named[at]]) - 1 for at in whose.tolist()], np.int64)
            pieces.append(ColumnChanges(self._named, whose, column, firsts, values))
            for at, value in zip(whose.tolist(), values.tolist(), strict=True):
                self._by_id[self._named[at]][-1][column] = value
                self._driven[self._named[at]].add(column)
        return tuple(pieces)

    def computed(self, name: str) -> dict[int, float]:
        """Return the coefficients of the row that comes next, which is computed."""
        last = self._by_id[name][-1]
        self._by_id[name].append(dict(last))
        return last

    def history(self, name: str) -> list[dict[int, float]]:
        return self._by_id[name][:-1]

    def acting(self, name: str, row: dict[int, float]) -> dict[int, float]:
        """Return the coefficients that a row's entries find: a request has those of its columns alone."""
        return {column: value if column in self._driven[name] else 0.0 for column, value in row.items()}


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32), num_steps=st.integers(1, 90))
def test_requests_that_come_and_go_have_their_own_coefficients(seed: int, num_steps: int) -> None:
    """Changes name the same requests again, or others, of which some change in one column or in both."""
    rng = np.random.default_rng(seed)
    device, controller = Device(), Controller(rng)
    names: tuple[str, ...] = ()
    for step in range(num_steps):
        if len(names) < 4 and rng.random() < 0.3 and (new := f"r{step % 6}") not in names:
            names = (*names, new)
            device.gates.add(new, OwnGates(1))
            controller.begin(new)
        elif names and rng.random() < 0.1:
            gone, names = names[0], names[1:]
            device.gates.remove(gone)
            controller.forget(gone)
        scheduled = names if rng.random() < 0.8 else tuple(name for name in names if rng.random() < 0.5)
        if not scheduled:
            continue
        device.gates.drive(controller.changes(scheduled))
        at = controller.positions()
        expected = [controller.computed(name) for name in scheduled]
        found = device.step(*((name, at[name], 1) for name in scheduled))
        assert list(map(controller.acting, scheduled, found)) == expected
    for name in names:
        history = controller.history(name)
        if history:
            found = device.step((name, 0, len(history)))
            assert [controller.acting(name, row) for row in found] == history
