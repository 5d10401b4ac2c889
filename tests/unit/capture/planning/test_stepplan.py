"""Runs of steps that are alike: planned by adding one, kept in the ring, and taken out of it as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.planning.planner import StepPlanner
from headgate.capture.planning.step_plan import PackGroup, joined
from headgate.capture.schema.batch import BatchView
from headgate.capture.schema.positions import Named
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from tests.fakes.pipeline import SITES
from tests.unit.capture.staging.test_staging import make_ring, plan_of

Row = tuple[Site, str, int, int, int]


def rows_of(groups: Iterable[PackGroup], before: int = 0) -> Counter[Row]:
    """Site, request, position, mask, and place among the wanted rows; a request's rows ascend."""
    found: Counter[Row] = Counter()
    for group in groups:
        for req_id, start, stop in group.spans:
            assert (np.diff(group.positions[start:stop]) > 0).all()
            for row in range(start, stop):
                what = (int(group.positions[row]), int(group.masks[row]), before + int(group.rows[row]))
                found.update((site, req_id, *what) for site in group.sites)
    return found


def planner_of(wants: list[int]) -> StepPlanner:
    """Requests 0, 1, ... with prompts of 4 tokens; each wants all positions of so many sites, 0: nothing."""
    planner = StepPlanner(SITES)
    for index, count in enumerate(wants):
        spec = CaptureSpec(sites=SITES[:count], positions=Named("all"), options={})
        planner.add(str(index), 4, {index % 3: spec} if count else {})
    return planner


def decoding(computed: list[int]) -> BatchView:
    count = len(computed)
    ones = np.ones(count, dtype=np.int64)
    return BatchView(tuple(map(str, range(count))), np.arange(count), ones, np.array(computed))


@given(
    st.lists(st.integers(0, len(SITES)), min_size=1, max_size=5).filter(any),
    st.lists(st.sampled_from(["on", "on", "on", "back", "collect"]), min_size=1, max_size=12),
)
def test_steps_of_a_run_are_together_what_they_are_one_by_one(wants: list[int], moves: list[str]) -> None:
    planner, slow = planner_of(wants), planner_of(wants)
    computed, kept, alone, before = [10 + index for index in range(len(wants))], [], Counter[Row](), 0

    for move in [*moves, "collect"]:
        if move == "collect":
            assert rows_of(joined(kept) if kept else ()) == alone
            kept, alone, before = [], Counter(), 0
            continue
        slow.remove("nobody")  # it leaves the run, and looks at each step anew
        plans = planner.plan(decoding(computed)), slow.plan(decoding(computed))
        assert (plans[0] is None) == (plans[1] is None)
        if plans[0] is not None and plans[1] is not None:
            assert plans[0].token_rows.tolist() == plans[1].token_rows.tolist()
            assert rows_of(plans[0].groups) == rows_of(plans[1].groups)
            kept.append(plans[0])
            alone += rows_of(plans[1].groups, before)
            before += len(plans[0].token_rows)
        # Where a request goes back, as after a preemption, positions that were taken are not taken again.
        computed = [max(position - 2, 4) if move == "back" else position + 1 for position in computed]


def test_a_run_comes_as_one_group_whose_requests_lie_together() -> None:
    planner = planner_of([len(SITES), 0, len(SITES)])
    plans = [plan for step in range(3) if (plan := planner.plan(decoding([7 + step] * 3))) is not None]

    (group,) = joined(plans)

    assert group.spans == (("0", 0, 3), ("2", 3, 6))
    assert group.positions.tolist() == [7, 8, 9, 7, 8, 9]
    assert group.rows.tolist() == [0, 2, 4, 1, 3, 5]
    assert joined(plans[1:])[0].positions.tolist() == [8, 9, 8, 9]
    assert len(joined([plans[0], plans[2]])) == 2  # not one after the other


def test_the_same_rows_of_the_next_step_get_the_slots_behind() -> None:
    ring, plan, found = make_ring(num_rows=16, max_tokens=8), plan_of([0, 1, 2], (SITES, range(3))), []

    for step in (plan, plan, None, plan, plan, plan_of([1], (SITES, [0])), plan):
        ring.begin(step)
        found.append(ring.slots[:4].tolist())

    assert found[:3] == [[0, 1, 2, 19], [3, 4, 5, 19], [16, 17, 18, 19]]
    assert found[3:] == [[6, 7, 8, 19], [9, 10, 11, 19], [16, 12, 18, 19], [13, 14, 15, 19]]
