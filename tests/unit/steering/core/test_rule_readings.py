"""Traces and counts of rules, from readings as a worker makes them."""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.core.resolved import NOTHING_BROUGHT, resolved_of
from headgate.steering.core.rules import step_readings
from headgate.steering.core.rules.registry import MAX_SELECTIONS
from headgate.steering.core.rules.step_readings import OTHERS, RequestReadings
from headgate.steering.documents.gates import read_gates
from headgate.steering.gates.gate import FOLLOWING, Gate, Leaf, NamedProbe, Then, columns_of
from headgate.steering.gates.step_table import StepTable
from headgate.steering.gates.trace import GateSource, Writes, join_notes
from headgate.steering.programs.codes import EVERYWHERE, Code, gate_field
from headgate.steering.programs.program import Entry, Program
from headgate.steering.spec import SteeringSpec
from tests.fakes.ruled import STEERABLE, Rules, document, unit

COLUMNS = 40
SITE = Site(1, HookPoint.POST_MLP)


def readings(*rows: tuple[str, int, list[dict[int, float]]]) -> StepTable:
    """As a worker tells: of each request the position of its first row, and some columns of each row."""
    values = np.full((sum(len(told) for *_, told in rows), COLUMNS), 7.0, np.float32)  # stale but where told
    listed = [each for *_, told in rows for each in told]
    for value, each in zip(values, listed, strict=True):
        value[list(each)] = list(each.values())
    wire = {
        "ids": tuple(req_id for req_id, *_ in rows),
        "firsts": np.array([first for _, first, _ in rows], np.int64),
        "counts": np.array([len(told) for *_, told in rows], np.int64),
        "has_one_each": all(len(told) == 1 for *_, told in rows),
        "columns": COLUMNS,
        "reported": None,
        "values": values,
    }
    return StepTable.of(wire)


@pytest.fixture
def rules() -> Rules:
    return Rules()


@pytest.fixture
def steps(rules: Rules) -> RequestReadings:
    return RequestReadings(rules.state.rules)


def add(rules: Rules, steps: RequestReadings, req_id: str, *, gates: tuple[Gate, ...] = (), **selected: Any) -> None:
    rules.state.rules.add(req_id, selected.get("selection"), 4)
    resolved = rules.state.resolve(req_id, SteeringSpec(gates=gates), 4)
    steps.add(req_id, resolved, 4, is_traced=True)


def columns(rules: Rules, name: str) -> tuple[int, int]:
    """The columns of the score, and of the strength that acts; that which is shown follows."""
    found = rules.state.rules.find(name)
    assert found is not None
    return found.columns.scores[0].column, found.columns.gates[0].column


def row(rules: Rules, name: str, score: float, applied: float, shown: float | None = None) -> dict[int, float]:
    read, acts = columns(rules, name)
    return {read: score, acts: applied, acts + 1: applied if shown is None else shown}


def test_a_rule_that_came_late_has_null_before(rules: Rules, steps: RequestReadings) -> None:
    rules.on("first")
    add(rules, steps, "a")
    notes = [steps.take(readings(("a", 0, [row(rules, "first", 2.0, 1.0)])), ())["a"]]
    rules.on("late", applies_to="opt_out")
    steps.change_rules({"a": 2})

    both = {**row(rules, "first", 3.0, 1.0), **row(rules, "late", 4.0, 0.5)}
    notes.append(steps.take(readings(("a", 1, [both, both])), ())["a"])
    rules.off("first")
    steps.change_rules({"a": 3})
    notes.append(steps.take(readings(("a", 3, [row(rules, "late", 5.0, 0.0)])), ())["a"])

    trace = join_notes(notes, None)
    assert trace["positions"] == [0, 1, 2, 3]
    assert trace["scores"] == {"first": [2.0, 3.0, 3.0, None], "late": [None, None, 4.0, 5.0]}
    assert trace["gates"]["first"] == {"strength": [1.0, 1.0, 1.0, None], "applied": [1.0, 1.0, 1.0, None]}
    assert trace["gates"]["late"] == {"strength": [None, None, 0.5, 0.0], "applied": [None, None, 0.5, 0.0]}


def test_rows_that_are_computed_again_are_told_once(rules: Rules, steps: RequestReadings) -> None:
    rules.on("calm")
    add(rules, steps, "a")
    told = row(rules, "calm", 1.0, 1.0)
    steps.take(readings(("a", 0, [told] * 4)), ())

    assert steps.take(readings(("a", 0, [told, told])), ()) == {}
    assert steps.take(readings(("a", 0, [told] * 5)), ())["a"]["first"] == 4


def test_a_prompt_without_its_first_token_has_the_rows_that_were_computed_last(
    rules: Rules, steps: RequestReadings
) -> None:
    rules.on("calm")
    add(rules, steps, "a")
    chunks = [(0, 1.0, 2), (0, 2.0, 2), (2, 3.0, 1), (1, 4.0, 2), (3, 5.0, 1), (0, 6.0, 5)]

    notes = [steps.take(readings(("a", first, [row(rules, "calm", score, 1.0)] * n)), ()) for first, score, n in chunks]

    trace = join_notes([each["a"] for each in notes], None)
    assert trace["positions"] == [0, 1, 2, 3, 4]
    assert trace["scores"] == {"calm": [2.0, 4.0, 4.0, 5.0, 6.0]}


@pytest.mark.parametrize("is_on", [True, False], ids=["another rule", "no rule"])
def test_a_prompt_that_begins_again_under_other_rules_has_nothing_of_those_before(
    rules: Rules, steps: RequestReadings, is_on: bool
) -> None:
    """Row 0 comes from the prefix cache then; without a rule nothing is read any more."""
    rules.on("old")
    add(rules, steps, "a")
    steps.describe("a", 4)
    notes = [steps.take(readings(("a", 0, [row(rules, "old", 1.0, 1.0)] * 3)), ())["a"]]
    rules.off("old")
    if is_on:
        rules.on("new")
    steps.change_rules({"a": 3})

    again = steps.begin_again("a")
    assert again is not None
    assert steps.begin_again("a") is None
    notes.append(again)
    if is_on:
        notes.append(steps.take(readings(("a", 1, [row(rules, "new", 2.0, 1.0)] * 3)), ())["a"])

    trace = join_notes(notes, None)
    assert trace["positions"] == ([1, 2, 3] if is_on else [])
    assert trace["scores"] == ({"new": [2.0] * 3} if is_on else {})
    assert trace == join_notes(steps.log("a"), None)
    assert steps.counts.rules == ({"old": 3, "new": 3} if is_on else {"old": 3})


def test_the_last_row_of_a_preempted_request_is_of_the_rules_that_came_meanwhile(
    rules: Rules, steps: RequestReadings
) -> None:
    """Rows 0 to 4 were computed before; the fifth is computed with them, for the first time."""
    add(rules, steps, "a")
    notes = [steps.take(readings(("a", first, [{}] * count)), ())["a"] for first, count in ((0, 4), (4, 1))]
    rules.on("calm")
    steps.change_rules({"a": 5})

    notes.append(steps.take(readings(("a", 0, [row(rules, "calm", 1.0, 1.0)] * 6)), ())["a"])

    assert join_notes(notes, None)["gates"]["calm"]["applied"] == [None] * 5 + [1.0]
    assert steps.counts.rules == {"calm": 1}


def test_names_of_a_request_and_of_rules_are_told_apart(rules: Rules, steps: RequestReadings) -> None:
    gate = {key: value for key, value in document().items() if key != "applies_to"}
    rules.on("calm")
    add(rules, steps, "a", gates=read_gates([{"name": "calm", **gate}], STEERABLE))

    told = readings(("a", 0, [{**dict.fromkeys(range(8), 0.25), **row(rules, "calm", 3.0, 1.0)}]))
    note = join_notes([steps.take(told, ())["a"]], None)

    assert note["scores"] == {"calm": [0.25], "calm (rule)": [3.0]}
    assert {name: told["applied"] for name, told in note["gates"].items()} == {"calm": [0.25], "calm (rule)": [1.0]}


def test_rows_are_counted_where_a_rule_acts(rules: Rules, steps: RequestReadings) -> None:
    rules.on("all")
    rules.on("some", applies_to="opt_in")
    rules.on("watch", then="observe")
    add(rules, steps, "plain")
    add(rules, steps, "in", selection=("some",))
    rest = {**row(rules, "all", 1.0, 1.0), **row(rules, "watch", 1.0, 0.0, shown=1.0)}
    quiet = {**row(rules, "all", 1.0, 0.0), **row(rules, "watch", 1.0, 0.0, shown=float("nan"))}
    chosen = {**rest, **row(rules, "some", 1.0, 0.5)}

    steps.take(readings(("plain", 0, [rest, quiet, rest]), ("in", 0, [chosen])), ())

    assert steps.counts.rules == {"all": 3, "some": 1, "watch": 3}


def test_steps_that_were_launched_before_a_rule_came_do_not_count(rules: Rules, steps: RequestReadings) -> None:
    add(rules, steps, "a")
    rules.on("calm")
    steps.change_rules({"a": 5})

    steps.take(readings(("a", 4, [{}])), ())
    assert steps.counts.rules == {}
    steps.take(readings(("a", 5, [row(rules, "calm", 1.0, 1.0)])), ())
    assert steps.counts.rules == {"calm": 1}


def test_a_trace_has_each_row_once_and_none_for_numbers_that_json_lacks(steps: RequestReadings) -> None:
    """The gate writes at once in the prompt; on generated rows what the row before handed on when it was reported."""
    columns = columns_of([Gate(name="g", when=Leaf(reading=NamedProbe("anger"), threshold=0.0), then=Then())])
    column, zeros = columns.gates[0].column, np.zeros(4, np.float32)
    late, early = (
        Program.from_entries(
            [Entry(SITE, Code.ADD, None, zeros, (), gate_field(EVERYWHERE, column, is_early=is_early))],
            "float32",
        )
        for is_early in (False, True)
    )
    source = GateSource.of(columns, (late, early))
    steps.add("a", resolved_of(SteeringSpec(), (late, early), NOTHING_BROUGHT, 5, source), 5, is_traced=True)
    signals = np.arange(4 * COLUMNS, dtype=np.float32).reshape(4, -1)
    signals[1, columns.scores[0].column] = np.nan

    def told(first: int, rows: Any) -> Any:
        note = steps.take(readings(("a", first, [dict(enumerate(each)) for each in rows])), ()).get("a")
        return note if note is None else join_notes([note], None)

    first, again = told(4, signals[:3]), told(4, signals[:2])
    behind = told(6, signals[[3, 2]])

    assert first["positions"] == [4, 5, 6]
    assert first["scores"] == {"anger": [0.0, None, 2.0 * COLUMNS]}
    expected = [signals[0, column], signals[0, column + FOLLOWING], signals[1, column + FOLLOWING]]
    assert first["gates"]["g"] == {"strength": signals[:3, column + 1].tolist(), "applied": expected}
    assert again is None
    assert behind["positions"] == [7]
    assert behind["gates"]["g"]["applied"] == [signals[2, column + FOLLOWING]]


STRANGER = ("stranger", 0, [{}, {}])
"""Two rows of a request without gates: with them a step is not one of single rows."""


def scoped(scope: str) -> dict[str, Any]:
    if scope == "from before":  # at a site before the probe's, where the strength of the row before acts
        return {"then": {"vectors": {"post_mlp": {"0": unit(1)}}}, "scope": "next_token"}
    return {"then": "observe"} if scope == "observe" else {"scope": scope}


def add_all(rules: Rules, steps: tuple[RequestReadings, ...], scopes: list[str]) -> None:
    """Add a request for each scope, whose id is its number; the third is not traced."""
    gate = {key: value for key, value in document().items() if key != "applies_to"}
    for at, scope in enumerate(scopes):
        gates = read_gates([{"name": f"gate{at % 2}", **gate, **scoped(scope)}], STEERABLE)
        rules.state.rules.add(str(at), None, 4)
        resolved = rules.state.resolve(str(at), SteeringSpec(gates=gates), 4)
        for each in steps:
            each.add(str(at), resolved, 4, is_traced=at != 2)


@given(
    scopes=st.lists(
        st.sampled_from(["this_token", "next_token", "from before", "rest_of_request"]), min_size=1, max_size=4
    ),
    seed=st.integers(0, 2**32 - 1),
    left=st.sets(st.integers(0, 8), max_size=3),
    ruled=st.lists(st.sampled_from(["this_token", "next_token", "from before", "observe"]), max_size=2),
    change=st.integers(0, 8),
    stale=st.integers(-1, 8),
    again=st.integers(-1, 8),
)
@settings(max_examples=60)
def test_steps_of_single_rows_are_counted_and_traced_as_others_are(
    scopes: list[str], seed: int, left: set[int], ruled: list[str], change: int, stale: int, again: int
) -> None:
    """At `stale` a step counts for the first request no more; at `again` rows are computed a second time."""
    rng, rules = np.random.default_rng(seed), Rules()
    for at, scope in enumerate(ruled):
        rules.on(f"rule{at}", **scoped(scope))
    alone, beside = RequestReadings(rules.state.rules), RequestReadings(rules.state.rules)
    add_all(rules, (alone, beside), scopes)
    traces: list[dict[str, list[Any]]] = [defaultdict(list), defaultdict(list)]
    expected = set()

    for step in range(9):
        ids = [str(at) for at in range(len(scopes)) if at % 2 or step != 5]
        signals = [rng.choice([float(step == 7), 1.0, np.nan if step == 4 else 1.0], COLUMNS) for _ in ids]
        position = 2 + step - (step == again)
        expected |= {position} if "0" in ids and step != stale else set()
        told = [(req_id, position, [dict(enumerate(each))]) for req_id, each in zip(ids, signals, strict=True)]
        steps = readings(*told, *([STRANGER] if step in left else [])), readings(*told, STRANGER)
        for notes, each, table in zip(traces, (alone, beside), steps, strict=True):
            for req_id, note in each.take(table, {"0"} if step == stale else ()).items():
                notes[req_id].append(note)
        if step in (change, 6):
            _ = [each.settle() for each in (alone, beside)]
        if step == change:
            rules.on("late", **scoped(scopes[0] if scopes[0] == "from before" else "this_token"))
            _ = [each.change_rules(dict.fromkeys(ids, 2 + step + 2)) for each in (alone, beside)]
        if step == 6:
            _ = [each.forget("1") for each in (alone, beside)]

    joined = [{req_id: join_notes(notes, None) for req_id, notes in found.items()} for found in traces]
    assert joined[0] == joined[1]
    assert joined[0]["0"]["positions"] == sorted(expected)
    assert alone.counts.gates == beside.counts.gates
    assert alone.counts.rules == beside.counts.rules
    assert alone.counts.gates["gate0"] > 0


@given(
    scope=st.sampled_from(["this_token", "next_token", "from before", "rest_of_request"]),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_rows_are_counted_on_which_a_strength_acts_however_steps_divide_them(
    scope: str, sizes: list[int], seed: int
) -> None:
    rng, rules = np.random.default_rng(seed), Rules()
    rules.on("rule", **scoped(scope))
    steps = RequestReadings(rules.state.rules)
    add_all(rules, (steps,), [scope])
    signals = rng.choice([0.0, 1.0], (sum(sizes), COLUMNS)).astype(np.float32)
    first = 0
    for size in sizes:
        steps.take(readings(("0", first, [dict(enumerate(each)) for each in signals[first : first + size]])), ())
        first += size

    before = np.concatenate([np.zeros((1, COLUMNS), np.float32), signals[:-1]])
    own, rule = steps._own.get("0"), rules.state.rules.find("rule")
    assert own is not None
    assert rule is not None
    for source, found in ((own.source, steps.counts.gates["gate0"]), (rule.source, steps.counts.rules["rule"])):
        applied = [
            written(
                source.decode if position >= 4 else Writes(source.prefill, frozenset()),
                source.strength_columns[0],
                *rows,
            )
            for position, rows in enumerate(zip(signals, before, strict=True))
        ]
        assert found == np.count_nonzero(applied)


def written(writes: Writes, column: int, row: Any, before: Any) -> float:
    """The strength of a gate on a row, from its signals and from those of the row before."""
    if column in writes.late:
        return float(row[column])
    return float(before[column + FOLLOWING]) if column in writes.early else 0.0


def test_a_step_of_requests_that_have_ended_leaves_nothing_behind(rules: Rules, steps: RequestReadings) -> None:
    rules.on("rule", **scoped("from before"))
    add_all(rules, (steps,), ["from before", "this_token"])
    told = readings(("0", 0, [{}]), ("1", 0, [{}, {}]))
    steps.take(told, ())
    for req_id in ("0", "1"):
        steps.settle()
        steps.forget(req_id)
        rules.state.rules.forget(req_id)
    steps.take(told, {"0", "1"})
    steps.settle()

    assert (steps._followed, steps._since) == ({}, {})


def test_names_of_gates_in_one_step_are_limited(rules: Rules, steps: RequestReadings, monkeypatch: Any) -> None:
    monkeypatch.setattr(step_readings, "MAX_NAMES", 1)
    gate = {key: value for key, value in document().items() if key != "applies_to"}
    for name in ("one", "two", "three"):
        add(rules, steps, name, gates=read_gates([{"name": name, **gate}], STEERABLE))

    steps.take(readings(*((name, 0, [{}]) for name in ("one", "two", "three"))), ())

    assert steps.counts.gates == {"one": 1, OTHERS: 2}


def test_names_of_gates_that_are_counted_apart_are_limited(
    rules: Rules, steps: RequestReadings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_readings, "MAX_NAMES", 1)
    gate = {key: value for key, value in document().items() if key != "applies_to"}
    for name in ("one", "two", "three"):
        add(rules, steps, name, gates=read_gates([{"name": name, **gate}], STEERABLE))
        steps.take(readings((name, 0, [{}, {}])), ())

    assert steps.counts.gates == {"one": 2, OTHERS: 4}
    steps.forget("one")
    assert steps.num_gated == 2


def test_what_clients_select_takes_bounded_memory(rules: Rules) -> None:
    """They name rules in any order, and of many rules any set."""
    names = [f"rule{number}" for number in range(3)]
    for name in names:
        rules.on(name, applies_to="opt_in")
    known = rules.state.rules
    for number, order in enumerate(permutations([*names, *names])):
        known.add(f"r{number}", order, 4)
        assert [each.name for each in known.acting(f"r{number}")] == names
        known.forget(f"r{number}")
    assert len(known._now.by_selection) == 1

    known.reserve([f"controller{number}" for number in range(12)])
    for number in range(1 << 12):
        chosen = tuple(f"controller{bit}" for bit in range(12) if number >> bit & 1)
        known.add(f"r{number}", (*chosen, "rule1"), 4)
        assert [each.name for each in known.acting(f"r{number}")] == ["rule1"]
        known.forget(f"r{number}")

    assert len(known._now.by_selection) <= MAX_SELECTIONS


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([(0, 4), (4, 2)], 3.0),
        ([(0, 6)], 2.0),
        ([(0, 5), (5, 1)], 3.0),
        ([(0, 7)], 1.0),
        ([(0, 5), (5, 2)], 1.0),
        ([(0, 6), (0, 7)], 2.0),
        ([(0, 6), (0, 6)], 3.0),
    ],
    ids=str,
)
def test_a_row_after_a_preemption_writes_what_the_worker_hands_it(
    rules: Rules, steps: RequestReadings, chunks: list[tuple[int, int]], expected: float
) -> None:
    """Rows 0 to 5 were computed with the strength 1; the chunks that follow round it another way each: 2, 3.

    A row that begins a chunk takes the state that the row before left; one after others takes what was known of the
    row before when the step began.
    """
    add_all(rules, (steps,), ["from before"])
    own = steps._own["0"].source.strength_columns[0] + FOLLOWING
    notes = [steps.take(readings(("0", first, [{own: 1.0}] * count)), ()).get("0") for first, count in ((0, 5), (5, 1))]

    for value, (first, count) in enumerate(chunks, 2):
        notes.append(steps.take(readings(("0", first, [{own: float(value)}] * count)), ()).get("0"))
    if sum(chunks[-1]) == 6:
        notes.append(steps.take(readings(("0", 6, [{own: 9.0}])), ()).get("0"))

    applied = join_notes([note for note in notes if note is not None], None)["gates"]["gate0"]["applied"]
    assert (len(applied), applied[-1]) == (7, expected)
