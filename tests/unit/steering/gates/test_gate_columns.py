"""Columns of gates: every number has its own, and traces name them as clients do."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.gates.gate import (
    Always,
    Condition,
    ConditionGroup,
    Gate,
    GatePhase,
    InlineProbe,
    Leaf,
    NamedProbe,
    Negation,
    Then,
    columns_of,
    num_columns,
)
from headgate.steering.gates.step_table import StepTable
from headgate.steering.programs.codes import Combine

SITE = Site(1, HookPoint.POST_MLP)


def leaf(name: str | None = None) -> Leaf:
    weight = np.ones(4, np.float32)
    return Leaf(reading=InlineProbe(site=SITE, weight=weight) if name is None else NamedProbe(name), threshold=0.0)


def gate(name: str, when: Condition) -> Gate:
    return Gate(name=name, when=when, then=Then(observes=True))


leaves = st.sampled_from([None, "anger", "joy"]).map(leaf) | st.sampled_from(GatePhase).map(Always)
conditions = st.recursive(
    leaves,
    lambda inner: (
        st.builds(
            lambda combine, found: ConditionGroup(combine, tuple(found)),
            st.sampled_from([Combine.ANY, Combine.ALL]),
            st.lists(inner, min_size=1, max_size=3),
        )
        | inner.map(Negation)
    ),
    max_leaves=5,
)


@given(st.lists(conditions, min_size=1, max_size=4), st.integers(0, 9))
def test_no_two_numbers_share_a_column(given_conditions, first):
    gates = [gate(f"g{at}", when) for at, when in enumerate(given_conditions)]

    columns = columns_of(gates, first)

    taken = [score.column for score in columns.scores]
    for column in columns.gates:
        taken += range(column.first, column.first + num_columns(column.gate.when))
        taken += range(column.column, column.column + 3)
    assert sorted(taken) == list(range(first, first + columns.num_columns))


def test_a_named_probe_has_one_score_and_inline_ones_are_named_after_their_gate():
    two = ConditionGroup(Combine.ANY, (leaf(), leaf("anger"), leaf()))

    columns = columns_of([gate("a", two), gate("b", ConditionGroup(Combine.ALL, (leaf("anger"), leaf())))])

    assert [score.name for score in columns.scores] == ["a", "anger", "a.1", "b"]


def test_readings_are_parted_by_request():
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    readings = {
        "ids": ("a", "b"),
        "firsts": np.array([7, 0]),
        "counts": np.array([1, 2]),
        "has_one_each": False,
        "columns": 2,
        "reported": None,
        "values": values,
    }

    found = [(rows.req_id, rows.first, rows.signals.tolist()) for rows in StepTable.of(readings).rows({"a", "b"})]

    assert found == [("a", 7, [[0, 1]]), ("b", 0, [[2, 3], [4, 5]])]
