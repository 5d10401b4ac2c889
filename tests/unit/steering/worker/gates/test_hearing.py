"""Coefficients that the forward hears: each row has the one of its position, however it is computed and again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.steering.controllers.hosting.told_words import ToldWords
from headgate.steering.core.controllers.contents import driven
from headgate.steering.gates.coefficient_changes import NOBODY_HEARS, CoefficientChange, Hears, by_column
from headgate.steering.programs.codes import CODE, CODE_MASK, Code
from headgate.steering.programs.gate_codes import MAX_EPOCH
from headgate.steering.programs.program import Entry, Program
from headgate.steering.worker.gates import hearing, reference
from headgate.steering.worker.gates.requests import OwnGates
from headgate.steering.worker.gates.step_gates import StepGates
from headgate.steering.worker.rows.rule_programs import ActingRule
from headgate.steering.worker.tables.gate_updates import GateUpdates
from tests.unit.steering.worker.gates.test_driven import Device
from tests.unit.steering.worker.gates.test_step_gates import COLUMNS, SITE

PROMPT = 3
COLUMN, OTHER = 1, 3
LISTENERS = {COLUMN: 0, OTHER: 1}


def content(column: int) -> Program:
    program = Program.from_entries([Entry(SITE, Code.ADD, None, np.ones(4, np.float32), ())], "float32")
    return driven(program, column, LISTENERS[column])


class Hearer(Device):
    """A worker whose forward hears, with the definition of `Code.HEAR`."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = StepGates(512, 4, COLUMNS, torch.device("cpu"), num_told=1, num_driven=len(LISTENERS))
        rules = [
            ActingRule(f"drive {column}", None, (column, column + 1), (content(column),) * 2) for column in LISTENERS
        ]
        self.gates.set_rules(rules)
        self.entries = [content(column) for column in LISTENERS]
        tensors = self.gates.tensors
        self.signals, self.states, self.tokens = (
            each.numpy() for each in (tensors.signals, tensors.states, tensors.tokens)
        )
        self.updates = GateUpdates(tensors)
        place = self.gates.telling.place
        assert place is not None
        self.memory = ToldWords(place)

    def step(self, *requests: tuple[str, int, int]) -> list[dict[int, float]]:
        writes = self.begin(*requests)
        if writes is not None:
            for write in self.updates.writes(writes):
                write.apply(*(torch.from_numpy(each) for each in write.arrays))
        owners = [req_id for req_id, _, count in requests for _ in range(count)]
        count, runs = (
            len(owners),
            torch.tensor([at for at, one in enumerate(owners) if self.slot(one)], dtype=torch.long),
        )
        for program in self.entries:
            codes = [row for row in program.codes.tolist() if row[CODE] & CODE_MASK == Code.HEAR]
            given = (runs, codes, program.params.tolist())
            reference.evaluate(torch.zeros(count, 4), torch.zeros(1, 4), [given], self.gates.tensors)
        self.gates.step_ends()
        return [{column: self._coefficient(row, column) for column in LISTENERS} for row in range(count)]

    def slot(self, req_id: str) -> int:
        return self.gates._slots.find(req_id) or 0

    def say(self, epoch: int, **values: tuple[int, float]) -> None:
        """Let requests hear values from positions on."""
        slots = np.array([self.slot(req_id) for req_id in values], np.int32)
        firsts, floats = zip(*values.values(), strict=True)
        self.memory.write(slots, epoch, np.array(firsts), np.array(floats, np.float32))


def set_to(value: float, first: int, *req_ids: str, column: int = COLUMN) -> Any:
    return by_column(CoefficientChange(req_id, column, first, value) for req_id in req_ids)


def hears(epoch: int, column: int = COLUMN, **firsts: int) -> Hears:
    return Hears(column, LISTENERS[column], epoch, tuple(firsts), np.array([*firsts.values()], np.int64))


def hearer(*req_ids: str) -> Hearer:
    """A worker of requests that have computed their prompts."""
    made = Hearer()
    for req_id in req_ids:
        made.gates.add(req_id, OwnGates(PROMPT))
    made.gates.drive(set_to(0.5, PROMPT, *req_ids))
    made.step(*((req_id, 0, PROMPT) for req_id in req_ids))
    return made


def acting(rows: list[dict[int, float]]) -> list[float]:
    return [row[COLUMN] for row in rows]


def test_each_row_hears_the_latest_that_is_due_until_it_is_settled():
    worker = hearer("a", "b")
    worker.gates.drive((), hears(7, a=3, b=3))
    assert acting(worker.step(("a", 3, 1), ("b", 3, 1))) == [0.5, 0.5]

    worker.say(7, a=(4, 1.0), b=(5, 2.0))
    assert acting(worker.step(("a", 4, 1), ("b", 4, 1))) == [1.0, 0.5]
    worker.say(6, a=(5, 9.0))  # in another epoch
    assert acting(worker.step(("a", 5, 1), ("b", 5, 1))) == [1.0, 2.0]
    worker.say(7, a=(6, 3.0), b=(8, 4.0))
    assert acting(worker.step(("a", 6, 1), ("b", 6, 1))) == [3.0, 2.0]

    worker.gates.drive(set_to(0.25, 7, "a", "b"), NOBODY_HEARS)
    worker.say(7, a=(7, 5.0))
    for position in (7, 8):
        assert acting(worker.step(("a", position, 1), ("b", position, 1))) == [0.25, 0.25]
    assert acting(worker.step(("a", 0, 9), ("b", 9, 1)))[3:] == [0.5, 1.0, 1.0, 3.0, 0.25, 0.25, 0.25]


def test_who_has_another_row_than_the_next_one_does_not_hear():
    worker = hearer("a", "b")
    worker.gates.drive((), hears(1, a=4, b=3))
    worker.say(1, a=(3, 8.0), b=(3, 8.0))

    assert acting(worker.step(("a", 3, 1), ("b", 3, 1))) == [0.5, 8.0]


def test_a_request_that_was_restarted_hears_no_more_and_what_it_was_to_hear_acts():
    worker = hearer("a", "b")
    worker.gates.drive((), hears(2, a=3, b=3))
    worker.say(2, a=(4, 1.0), b=(4, 1.0))
    for position in (3, 4):
        worker.step(("a", position, 1), ("b", position, 1))
    worker.say(2, a=(5, 2.0), b=(5, 2.0))

    assert acting(worker.step(("b", 5, 1))) == [2.0]
    assert acting(worker.step(("a", 0, 6), ("b", 6, 1))) == [0, 0, 0, 0.5, 1.0, 2.0, 2.0]
    worker.say(2, a=(6, 7.0), b=(7, 7.0))
    assert acting(worker.step(("a", 6, 1), ("b", 7, 1))) == [2.0, 7.0]
    worker.gates.drive(set_to(-1.0, 7, "a") + set_to(-1.0, 8, "b"), NOBODY_HEARS)
    assert acting(worker.step(("a", 0, 8), ("b", 8, 1)))[3:] == [0.5, 1.0, 2.0, 2.0, -1.0, -1.0]


def test_a_slot_that_another_request_gets_hears_nothing():
    worker = hearer("a")
    worker.gates.drive((), hears(3, a=3))
    worker.step(("a", 3, 1))
    worker.say(3, a=(4, 1.0))
    slot = worker.slot("a")
    worker.gates.remove("a")
    worker.gates.add("b", OwnGates(PROMPT))
    worker.gates.drive(set_to(0.75, PROMPT, "b"))

    worker.step(("b", 0, PROMPT))
    assert worker.slot("b") == slot
    assert acting(worker.step(("b", 3, 1)) + worker.step(("b", 4, 1))) == [0.75, 0.75]


def test_a_row_that_hears_nothing_keeps_what_was_heard_before_whatever_is_written_for_others():
    worker = hearer("a")
    worker.gates.drive((), hears(3, a=3))
    worker.say(3, a=(3, 1.0))
    worker.step(("a", 3, 1))
    worker.memory.clear(np.array([worker.slot("a")], np.int32))
    worker.gates.add("b", OwnGates(PROMPT))
    worker.gates.drive(set_to(0.75, PROMPT, "b"))

    assert acting(worker.step(("a", 4, 1), ("b", 0, 4))) == [1.0, 0.0, 0.0, 0.0, 0.75]


def test_a_request_that_goes_on_from_cached_blocks_has_what_it_heard():
    worker = hearer("a", "b")
    worker.gates.drive((), hears(3, a=3, b=3))
    worker.say(3, a=(4, 1.0))
    worker.say(3, a=(5, 2.0))
    for position in (3, 4, 5):
        worker.step(("a", position, 1), ("b", position, 1))

    worker.step(("b", 6, 1))
    assert acting(worker.step(("a", 4, 1), ("b", 7, 1))) == [1.0, 0.5]
    worker.say(3, a=(6, 7.0))
    assert acting(worker.step(("a", 5, 1), ("b", 8, 1))) == [2.0, 0.5]


@pytest.mark.parametrize("order", [None, NOBODY_HEARS], ids=["while others hear", "when nobody hears"])
def test_what_a_request_heard_outlasts_its_slot(order: Hears | None):
    worker = hearer("a", "b")
    worker.gates.drive((), hears(3, a=3, b=3))
    worker.say(3, a=(4, 1.0), b=(4, 1.0))
    for position in (3, 4):
        worker.step(("a", position, 1), ("b", position, 1))
    slot, others = worker.slot("a"), [f"o{at}" for at in range(7)]
    for other in others:
        worker.gates.add(other, OwnGates(PROMPT))
    worker.gates.drive((), order)
    worker.step(("b", 5, 1))
    worker.gates.drive(set_to(0.25, PROMPT, *others))

    worker.step(("b", 6, 1), *((other, 0, PROMPT) for other in others))
    assert not worker.slot("a")
    worker.gates.tensors.heard[slot] = 0
    assert acting(worker.step(("a", 0, 6)))[3:] == [0.5, 1.0, 1.0]


def test_what_is_not_known_is_no_guess():
    worker = hearer("a")
    worker.gates.drive((), hears(3, a=3))
    worker.step(("a", 3, 1))
    worker.gates.tensors.heard.zero_()

    with pytest.raises(AssertionError, match="is not known"):
        worker.step(("a", 0, 4))


def test_nobody_hears_where_nobody_tells():
    gates = StepGates(16, 4, COLUMNS, torch.device("cpu"), num_driven=2)

    assert gates.tensors.hearing.shape == (9, 0, 2)
    assert gates.tensors.heard.shape == (9, 0)
    with pytest.raises(AssertionError, match="nothing can be heard"):
        gates.drive((), hears(1, a=3))


Batch = list[tuple[str, int, int]]


class Engine:
    """Random requests, and a controller that decides behind each row.

    Attributes:
        ahead: Steps that are scheduled at a time.
        rows: Rows of each request that were scheduled at least once.
        decided: The values of each request, by the position from which they act.
        computed: What acted on each row when it was computed first.
        num_heard: Values that the forward was to hear.
        num_replayed: Rows that were computed again.
    """

    def __init__(self, seed: int, ahead: int) -> None:
        self.draw, self.ahead, self.worker = random.Random(seed), ahead, Hearer()
        self.rows: dict[str, int] = {}
        self.decided: dict[str, dict[int, float]] = {}
        self.computed: dict[tuple[str, int], float] = {}
        self.num_heard = self.num_replayed = 0
        self._next: dict[str, int] = {}
        """The next row of each request: an earlier one than `rows` behind a restart."""
        self._told: dict[str, int] = {}
        """Behind the last row of each for which something was decided."""
        self._scheduled: list[tuple[Batch, list[CoefficientChange], Hears | None]] = []
        self._untold: list[CoefficientChange] = []
        self._order: Hears | None = None
        self._run: dict[str, None] | None = None
        self._epoch = self._serial = self._num_steps = 0
        self.silence = self.draw.choice([0.0, 0.3, 0.9])
        self._last: tuple[str, ...] = ()

    def step(self) -> None:
        while len(self._scheduled) < self.ahead:
            self._schedule()
        batch, changes, order = self._scheduled.pop(0)
        batch = [each for each in batch if each[0] in self.rows]
        if not batch:
            return
        self.worker.gates.drive(by_column(change for change in changes if change.req_id in self.rows), order)
        rows = iter(self.worker.step(*batch))
        for req_id, first, count in batch:
            for position in range(first, first + count):
                value = next(rows)[COLUMN]
                self._check(req_id, position, value if self.worker.slot(req_id) else 0.0)
        self._decide(batch)

    def _schedule(self) -> None:
        if len(self.rows) < 4 and self.draw.random() < 0.15:
            self._serial += 1
            name = f"r{self._serial}"
            self.rows[name] = self._next[name] = 0
            self.decided[name] = {}
            self.worker.gates.add(name, OwnGates(PROMPT))
        if self.rows and self.draw.random() < 0.04:
            self._end(self.draw.choice(list(self.rows)))
        batch: Batch = []
        for req_id, first in self._next.items():
            chance = self.draw.random()
            if chance < 0.03 and first > PROMPT:
                self._next[req_id] = 0  # it waits for the step behind this one, at least
            elif chance > 0.04:
                known = max(self.rows[req_id] + 1, PROMPT)
                batch.append((req_id, first, known - first if self.draw.random() < 0.8 else 1))
        for req_id, first, count in batch:
            self._next[req_id] = first + count
            self.rows[req_id] = max(self.rows[req_id], first + count)
        counts = {req_id: count for req_id, _, count in batch}
        changes = [change for change in self._untold if change.req_id in counts]
        self._untold = [change for change in self._untold if change.req_id not in counts]
        order = self._order
        if order is not None and not all(counts.get(one) == 1 for one in order.req_ids):
            order = self._order = self._run = None
        elif not batch:
            order = None  # nobody would follow it
        else:
            self._order = None
        self._scheduled.append((batch, changes, order))

    def _end(self, req_id: str) -> None:
        self.worker.gates.remove(req_id)
        for known in (self.rows, self._next, self.decided):
            del known[req_id]
        self._untold = [change for change in self._untold if change.req_id != req_id]

    def _check(self, req_id: str, position: int, value: float) -> None:
        if (req_id, position) in self.computed:
            self.num_replayed += 1
            assert value == self.computed[req_id, position], f"{req_id} {position}: computed again"
            return
        due = [value for first, value in self.decided[req_id].items() if first <= position]
        assert value == (due[-1] if due and position >= PROMPT else 0.0), f"{req_id} {position} {value}"
        self.computed[req_id, position] = value

    def _decide(self, batch: Batch) -> None:
        """Decide for those with a generated row."""
        ids = tuple(req_id for req_id, *_ in batch)
        is_loud, self._last = ids != self._last or any(count > 1 for *_, count in batch), ids
        firsts = {one: max(rows, PROMPT) for one, rows in self.rows.items()}
        self._num_steps += 1
        if self._run is not None and (is_loud or self._num_steps > NUM_NOTED // 2 or self.draw.random() < 0.1):
            # What was heard last is settled, and what is decided from here on comes as it does otherwise.
            for one in self._run:
                if decided := self.decided.get(one):
                    last = [*decided.values()][-1]
                    self.decided[one] = {first: value for first, value in decided.items() if first < firsts[one]}
                    self.decided[one][firsts[one]] = last
                    self._change(one, firsts[one], last)
            self._run, self._order = None, NOBODY_HEARS
        for req_id, first, count in batch:
            if first + count <= max(self._told.get(req_id, 0), PROMPT):
                continue
            self._told[req_id] = first + count
            if self.draw.random() < self.silence:
                continue
            value, acts_from = float(np.float32(self.draw.random())), firsts[req_id]
            if self._run is None:
                self._change(req_id, acts_from, value)
            elif req_id in self._run:
                self.num_heard += 1
                acts_from = first + count - 1 + self.ahead  # whoever says it does not know what was scheduled
                self.worker.say(self._epoch, **{req_id: (acts_from, value)})
            self.decided[req_id].pop(acts_from, None)
            self.decided[req_id][acts_from] = value
        may_hear = self._run is None and self._order is None and not is_loud and all(map(self.worker.slot, ids))
        may_hear &= all(self._told.get(req_id) == first + 1 for req_id, first, _ in batch)
        if may_hear and self.draw.random() < 0.6:
            self._epoch = self._epoch % MAX_EPOCH + 1
            self._run, self._num_steps = dict.fromkeys(ids), 0
            self.worker.memory.clear(np.array([self.worker.slot(one) for one in ids], np.int32))
            self._order = hears(self._epoch, **{one: firsts[one] for one in ids})

    def _change(self, req_id: str, first: int, value: float) -> None:
        self._untold.append(CoefficientChange(req_id, COLUMN, first, value))


NUM_NOTED = 16
"""Rows of which the forward says what acted on them: so few that they are soon overwritten."""


@pytest.fixture(scope="module")
def few_notes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "HEARD_ROWS", NUM_NOTED)
        patch.setattr(hearing, "HEARD_ROWS", NUM_NOTED)
        yield


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), ahead=st.sampled_from([1, 2]))
@pytest.mark.usefixtures("few_notes")
def test_rows_have_what_was_decided_for_them_and_have_it_again(seed: int, ahead: int) -> None:
    engine = Engine(seed, ahead)

    for _ in range(120):
        engine.step()
