"""Rows that gates wrote, as an engine core learns of them from workers that count by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headgate.steering.core.rules import step_readings
from headgate.steering.core.steering_core import SteeringCore
from headgate.steering.gates.gate import COUNT, Gate, InlineProbe, ModuleThen, Then, columns_of
from headgate.steering.gates.trace import GateSource
from headgate.steering.programs.codes import CODE, CODE_MASK, Code, GateFlag, GateScope
from headgate.steering.programs.program import Program
from headgate.steering.spec import SteeringSpec, to_wire
from tests.unit.steering.core.test_core_gates import (
    CONFIG,
    LATE,
    READ,
    STEERABLE,
    VECTORS,
    WEIGHT,
    NoWorkers,
    adding,
    core_with,
    gate,
)

AT_THE_END = InlineProbe(site=LATE, weight=WEIGHT, bias=0.0, is_cosine=False, where="steering_gates[1].when.probe")


class Workers(NoWorkers):
    """Two ranks, of which the first tells what a test puts there."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.num_asked = 0

    def call_workers(self, method: str, args: Any) -> list[object]:
        if method != "ask_counts":
            return super().call_workers(method, args)
        self.num_asked += 1
        told, self.told = self.told, []
        return [told, []]


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def core(workers: Workers) -> SteeringCore:
    core = SteeringCore("float32", 64, workers, CONFIG, steerable=STEERABLE)
    core.state.probes = core_with().state.probes
    return core


def accept(core: SteeringCore, req_id: str, *gates: Gate, **wire: Any) -> bool:
    """Whether workers may count what the request's gates write."""
    found = core.accept(req_id, {**to_wire(SteeringSpec(gates=gates)), **wire}, 5)
    core.offer(req_id, priority=0, is_session=False, is_offline=False)
    assert found is not None
    return bool(found.get("counted"))


def states(gates: tuple[Gate, ...], *counts: float) -> np.ndarray:
    columns = columns_of(gates)
    found = np.full(columns.num_columns + 3, np.nan, np.float32)
    found[[each.column + COUNT for each in columns.gates]] = counts
    return found


def rows(core: SteeringCore) -> dict[str, int]:
    found: dict[str, int] = core.call("dynamic", {})["gates"]
    assert core.call("counts", {})["gate_rows"] == found
    return found


def test_what_workers_count_is_added_up_while_a_request_runs_and_when_it_has_ended(core, workers):
    both = (gate(name="one"), gate(name="two"))
    assert accept(core, "a", *both)

    assert core.take_readings({"written": [("a", states(both, 3, np.nan), False, False)]}, ()) == {}
    assert rows(core) == {"one": 3, "two": 0}
    workers.told = [("a", states(both, 5, 1), False, False)]
    assert rows(core) == {"one": 5, "two": 1}
    core.release("a")
    core.take_readings({"written": [("a", states(both, 6, 1), True, True)]}, ())

    assert rows(core) == {"one": 6, "two": 1}


def test_counts_that_begin_anew_are_added_to_those_before(core):
    one = (gate(name="one"),)
    accept(core, "a", *one)
    for count, is_last in ((4, True), (2, False), (3, True), (1, False)):
        core.take_readings({"written": [("a", states(one, count), is_last, False)]}, ())

    assert rows(core) == {"one": 8}


def test_what_a_request_counted_before_it_began_anew_may_come_when_it_has_ended(core):
    one = (gate(name="one"),)
    accept(core, "a", *one)
    core.release("a")
    for count, has_ended in ((4, False), (3, True), (9, True)):  # nobody knows it any more at the last
        core.take_readings({"written": [("a", states(one, count), True, has_ended)]}, ())

    assert rows(core) == {"one": 7}


def test_a_request_is_counted_by_its_own_names_also_after_another_had_its_id(core):
    one, other = (gate(name="one"),), (gate(name="other"),)
    accept(core, "a", *one)
    core.release("a")
    core.take_readings({"written": [("a", states(one, 2), True, True)]}, ())
    accept(core, "a", *other)
    core.take_readings({"written": [("a", states(other, 3), True, True)]}, ())

    assert rows(core) == {"one": 2, "other": 3}


@pytest.mark.parametrize(
    ("gates", "wire"),
    [
        pytest.param((gate(),), {"trace": True}, id="traced"),
        pytest.param(
            (gate(), gate(AT_THE_END, threshold=0.0, name="early", scope=GateScope.NEXT, then=adding(READ))),
            {},
            id="early",
        ),
        pytest.param((gate(scope=GateScope.REST, conversation="c"),), {}, id="of a conversation"),
    ],
)
def test_of_others_rows_are_told(core, gates, wire):
    assert GateSource.of(columns_of(gates), core.state.resolve("x", SteeringSpec(gates=gates), 5).own).columns
    assert not accept(core, "a", *gates, **wire)


def test_rows_of_a_phase_in_which_a_gate_writes_nothing_do_not_count(core):
    core.operator.register("calm", SteeringSpec(decode=VECTORS))
    then = Then(module=ModuleThen("calm"))

    prefill, decode = core.state.resolve("x", SteeringSpec(gates=(gate(then=then),)), 5).own

    assert [marks(prefill), marks(decode)] == [[True], [False]]
    assert accept(core, "a", gate(then=then))


def marks(program: Program | None) -> list[bool]:
    """Whether each gate of a program is marked as one that writes nothing there."""
    assert program is not None
    codes = program.codes[:, CODE]
    return [bool(code & GateFlag.UNWRITTEN) for code in codes[codes & CODE_MASK == Code.GATE].tolist()]


def test_workers_are_asked_only_where_they_may_have_counted(core, workers):
    assert rows(core) == {}
    assert workers.num_asked == 0
    accept(core, "a", gate())
    rows(core)
    assert workers.num_asked == 2


def test_of_requests_that_ended_nothing_piles_up(core, monkeypatch):
    monkeypatch.setattr(step_readings, "MAX_ENDED", 2)
    one = (gate(name="one"),)
    for req_id in "abc":
        accept(core, req_id, *one)
        core.release(req_id)

    core.take_readings({"written": [(req_id, states(one, 1), True, True) for req_id in "abc"]}, ())

    assert rows(core) == {"one": 2}
