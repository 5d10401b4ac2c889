"""Which steps' scores the forward alone tells, and that whoever reads them knows every word before it is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.schema.batch import BatchView
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.controllers.hosting.told_words import ToldRowsOfStep, ToldWords
from headgate.steering.gates.coefficient_changes import ColumnChanges
from headgate.steering.gates.rule import AppliesTo
from headgate.steering.gates.step_table import StepTable
from headgate.steering.programs.codes import EVERYWHERE, Code, with_change
from headgate.steering.programs.gate_codes import TOLD_ROWS, gate_field
from headgate.steering.programs.program import Entry, Program
from headgate.steering.worker.gates.requests import OwnGates
from headgate.steering.worker.gates.step_gates import StepGates
from headgate.steering.worker.gates.telling import Telling
from headgate.steering.worker.rows.rule_programs import ActingRule
from headgate.steering.worker.rows.step_sequence import StepSequence

SITE = Site(0, HookPoint.POST_MLP)
SCORE, COUNT, DRIVEN, GATE = 0, 1, 2, 4
CPU = torch.device("cpu")


def reader() -> ActingRule:
    """A controller that reads one score."""
    score = Entry(SITE, with_change(Code.SCORE, SCORE), np.ones(4, np.float32), None, (1.0,))
    tell = Entry(SITE, with_change(Code.TELL, COUNT), None, None, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, float(SCORE)))
    program = Program.from_entries([score, tell], "float32")
    return ActingRule("reads", AppliesTo.ALL, (SCORE, SCORE + 1), (program, program))


def driven() -> ActingRule:
    """A content that a controller turns on."""
    row, field = np.ones(4, np.float32), gate_field(EVERYWHERE, DRIVEN, is_early=True)
    program = Program.from_entries([Entry(SITE, Code.ADD, None, row, (0.0, 1.0), field)], "float32")
    return ActingRule("drive", None, (DRIVEN, DRIVEN + 1), (program, program))


def rule(applies_to: AppliesTo = AppliesTo.OPT_IN) -> ActingRule:
    """A rule of the operator that writes."""
    gate = Entry(SITE, with_change(Code.GATE, GATE), None, np.zeros(4, np.float32), ())
    program = Program.from_entries([gate], "float32")
    return ActingRule("rule", applies_to, (GATE, GATE + 3), (program, program))


class Worker:
    """A worker whose forward tells the score of each row as the number of its request times 100, plus its position."""

    def __init__(self, *, is_output_rank: bool = True) -> None:
        self.gates = StepGates(64, 8, 8, CPU, is_output_rank=is_output_rank, num_told=1)
        self.gates.set_rules([reader(), driven(), rule()])
        self.sequence = StepSequence()

    def add(self, *req_ids: str, **own: Any) -> None:
        for req_id in req_ids:
            self.gates.add(req_id, OwnGates(2, **own))

    def step(self, *requests: tuple[str, int, int]) -> dict[str, Any]:
        """Run a step of requests by id, position of the first row, and number of rows; returns its readings."""
        counts = np.array([count for *_, count in requests], np.int64)
        firsts = np.array([first for _, first, _ in requests], np.int64)
        view = BatchView(tuple(req_id for req_id, *_ in requests), np.cumsum(counts) - counts, counts, firsts)
        self.gates.step_begins(view, goes_on=self.sequence.goes_on(view))
        tensors, batch, row = self.gates.tensors, self.gates._batch, 0
        assert batch is not None
        slots = dict(zip(batch.gated_ids, batch.slots.tolist(), strict=True))
        for req_id, first, count in requests:
            for position in range(first, first + count):
                tensors.told_counts[slots[req_id], 0] += 1
                number, score = int(tensors.told_counts[slots[req_id], 0]), np.float32(ord(req_id) * 100 + position)
                tensors.signals[row, SCORE], tensors.signals[row, COUNT] = float(score), float(number)
                if count == 1:
                    tensors.told[slots[req_id], number % TOLD_ROWS, 0] = number << 32 | int(score.view(np.uint32))
                row += 1
        self.gates.step_ends()
        readings = self.gates.readings()
        assert readings is not None
        return readings.collect()

    def idle(self) -> None:
        self.gates.step_begins(None, goes_on=self.sequence.goes_on(None))


def slots_of(readings: dict[str, Any]) -> Any:
    return StepTable.of(readings).slots


def test_steps_that_go_on_are_quiet_and_their_words_are_where_the_reader_looks() -> None:
    worker = Worker()
    worker.gates.telling.allow()
    worker.add("a", "b")
    place = worker.gates.telling.place
    assert place is not None
    words = ToldWords(place)

    assert slots_of(worker.step(("a", 0, 2), ("b", 0, 2))) is None
    loud = StepTable.of(worker.step(("a", 2, 1), ("b", 2, 1)))
    assert loud.slots is not None
    known = ToldRowsOfStep(loud.slots, loud.signals[:, [COUNT]].astype(np.int64))
    for behind in range(1, 11):
        assert worker.step(("a", 2 + behind, 1), ("b", 2 + behind, 1)) == {"quiet": True}
        scores, is_known = words.read(known.behind(behind))
        assert is_known.all()
        assert scores[:, 0].tolist() == [9702 + behind, 9802 + behind]
    assert not words.read(known.behind(10 - TOLD_ROWS))[1].any(), "it was overwritten"


@pytest.mark.parametrize("own", [{"is_traced": True}, {"is_captured": True}, {"selection": ("rule",)}], ids=str)
def test_what_somebody_else_reads_is_sent(own: dict[str, Any]) -> None:
    worker = Worker()
    worker.gates.telling.allow()
    worker.add("a")
    worker.add("b", **own)
    worker.step(("a", 0, 2), ("b", 0, 2))

    for position in range(2, 6):
        readings = worker.step(("a", position, 1), ("b", position, 1))
        assert "quiet" not in readings
        assert slots_of(readings) is None


def test_whatever_is_not_the_next_step_of_the_same_requests_is_sent() -> None:
    worker = Worker()
    worker.gates.telling.allow()
    worker.add("a", "b", "c")

    def is_quiet(*requests: tuple[str, int, int]) -> bool:
        return "quiet" in worker.step(*requests)

    assert not is_quiet(("a", 0, 2), ("b", 0, 2)), "prompts"
    assert [is_quiet(("a", at, 1), ("b", at, 1)) for at in (2, 3, 4)] == [False, True, True]
    assert not is_quiet(("a", 5, 1)), "one has ended"
    assert is_quiet(("a", 6, 1))
    assert not is_quiet(("a", 7, 1), ("c", 0, 2)), "another begins"
    assert [is_quiet(("a", at, 1), ("c", at - 6, 1)) for at in (8, 9)] == [False, True]
    worker.idle()
    assert [is_quiet(("a", at, 1), ("c", at - 6, 1)) for at in (10, 11)] == [False, True]
    worker.gates.telling.break_off()
    assert [is_quiet(("a", at, 1), ("c", at - 6, 1)) for at in (12, 13)] == [False, True]
    worker.gates.set_rules([reader(), driven()])
    assert [is_quiet(("a", at, 1), ("c", at - 6, 1)) for at in (14, 15)] == [True, True], "nothing acts otherwise"
    worker.gates.set_rules([reader(), driven(), rule(AppliesTo.ALL)])
    assert not any(is_quiet(("a", at, 1), ("c", at - 6, 1)) for at in (16, 17, 18)), "a rule acts"


def test_requests_that_controllers_drive_stay_quiet() -> None:
    worker = Worker()
    worker.gates.telling.allow()
    worker.add("a")
    for first, count in ((0, 2), (2, 1), (3, 1)):
        worker.step(("a", first, count))

    def drive(first: int, value: float) -> None:
        firsts, values = np.array([first], np.int64), np.array([value], np.float32)
        worker.gates.drive((ColumnChanges(("a",), np.zeros(1, np.int64), DRIVEN, firsts, values),))

    for position in range(4, 8):
        drive(position, position / 10)
        assert worker.step(("a", position, 1)) == {"quiet": True}


def test_nothing_is_quiet_where_nobody_reads() -> None:
    worker = Worker()
    worker.add("a")
    assert [slots_of(worker.step(("a", at, 1))) for at in (2, 3, 4)] == [None] * 3
    other = Telling(5, 1, CPU, is_output_rank=False)
    other.allow()
    assert (other.place, other.words.shape) == (None, (5, TOLD_ROWS, 1))
    assert Telling(5, 0, CPU, is_output_rank=True).place is None
