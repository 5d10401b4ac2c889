"""The planner against a loop that is too simple to be wrong, over random schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.batch import BatchView, Int64Array
from headgate.capture.plan import PackGroup, StepPlan, StepPlanner
from headgate.capture.positions import PositionSelector
from headgate.capture.sites import Site
from headgate.capture.spec import CaptureSpec
from tests.strategies import SITES, Step, schedules, site_sets

Wanted = dict[tuple[Site, int], tuple[str, int, int]]
"""``{(site, batch row): (request, position, mask)}``"""


@cache
def is_wanted(selector: PositionSelector, position: int, num_prompt: int) -> bool:
    return bool(selector.mask(np.array([position]), np.array([num_prompt]))[0])


class SlowPlanner:
    """What `StepPlanner` computes, one row, one consumer and one site at a time."""

    def __init__(self, sites: tuple[Site, ...]) -> None:
        self.sites = sites
        self.requests: dict[str, tuple[int, Mapping[int, CaptureSpec]]] = {}
        self.taken: dict[str, int] = {}

    def add(self, req_id: str, num_prompt: int, specs: Mapping[int, CaptureSpec]) -> None:
        self.requests[req_id], self.taken[req_id] = (num_prompt, specs), 0

    def remove(self, req_id: str) -> None:
        self.requests.pop(req_id, None)

    def plan(self, view: BatchView) -> Wanted:
        wanted: Wanted = {}
        for i, req_id in enumerate(view.req_ids):
            if req_id not in self.requests:
                continue
            for offset in range(int(view.num_scheduled[i])):
                position = int(view.num_computed[i]) + offset
                if position >= self.taken[req_id]:
                    self.taken[req_id] = position + 1
                    self._want(wanted, req_id, position, int(view.starts[i]) + offset)
        return wanted

    def _want(self, wanted: Wanted, req_id: str, position: int, batch_row: int) -> None:
        num_prompt, specs = self.requests[req_id]
        for bit, spec in specs.items():
            if is_wanted(spec.positions, position, num_prompt):  # type: ignore[arg-type]  # selectors are hashable
                for site in set(spec.sites) & set(self.sites):
                    mask = wanted.get((site, batch_row), (req_id, position, 0))[2]
                    wanted[site, batch_row] = (req_id, position, mask | 1 << bit)


def unpacked(plan: StepPlan | None) -> Wanted:
    """The plan as a flat table; fails if a (site, row) pair is in it twice."""
    wanted: Wanted = {}
    if plan is None:
        return wanted
    for group in plan.groups:
        for req_id, start, stop in group.spans:
            for k in range(start, stop):
                batch_row = int(plan.token_rows[group.rows[k]])
                for site in group.sites:
                    assert (site, batch_row) not in wanted
                    wanted[site, batch_row] = (req_id, int(group.positions[k]), int(group.masks[k]))
    return wanted


def check_form(plan: StepPlan, view: BatchView, sites: tuple[Site, ...]) -> None:
    """Everything that `StepPlan` and `PackGroup` say about themselves."""
    assert plan.groups
    assert len({group.sites for group in plan.groups}) == len(plan.groups)
    for group in plan.groups:
        assert [sites[index] for index in group.site_ids] == list(group.sites)
        assert (np.diff(group.site_ids) > 0).all()
        assert len(group.rows) == len(group.positions) == len(group.masks) == group.spans[-1][2]
        assert {array.dtype for array in (plan.token_rows, group.site_ids, *group_arrays(group))} == {np.dtype("int64")}
        assert group.spans[0][1] == 0
        assert all(before[2] == after[1] for before, after in pairwise(group.spans))
        order = [view.req_ids.index(req_id) for req_id, _, _ in group.spans]
        assert order == sorted(set(order))
        for _, start, stop in group.spans:
            assert start < stop
            assert (np.diff(group.positions[start:stop]) > 0).all()


def group_arrays(group: PackGroup) -> tuple[Int64Array, ...]:
    return group.rows, group.positions, group.masks


def tell(planner: StepPlanner | SlowPlanner, step: Step) -> None:
    for req_id in step.left:
        planner.remove(req_id)
    for arrival in step.arrived:
        planner.add(arrival.req_id, arrival.num_prompt, arrival.specs)


def follow(planner: StepPlanner, step: Step) -> StepPlan | None:
    tell(planner, step)
    return planner.plan(step.view)


@settings(max_examples=1500)
@given(steps=schedules(), sites=site_sets() | st.just(SITES))
def test_every_row_goes_to_its_own_request_position_and_consumers(steps: list[Step], sites: tuple[Site, ...]) -> None:
    planner, reference = StepPlanner(sites), SlowPlanner(sites)

    for step in steps:
        plan = follow(planner, step)
        tell(reference, step)
        expected = reference.plan(step.view)

        assert unpacked(plan) == expected
        assert (plan is None) == (not expected)
        if plan is not None:
            check_form(plan, step.view, sites)
            assert plan.token_rows.tolist() == sorted({row for _, row in expected})


@settings(max_examples=400)
@given(steps=schedules())
def test_a_position_is_captured_once_however_often_it_is_computed(steps: list[Step]) -> None:
    planner, lives = StepPlanner(SITES), Counter[str]()
    captured = Counter[tuple[Site, str, int, int]]()

    for step in steps:
        lives.update(arrival.req_id for arrival in step.arrived)
        for (site, _), (req_id, position, _) in unpacked(follow(planner, step)).items():
            captured[site, req_id, lives[req_id], position] += 1

    assert not [row for row, times in captured.items() if times > 1]


@settings(max_examples=200)
@given(steps=schedules())
def test_requests_of_other_ids_change_nothing_for_a_request(steps: list[Step]) -> None:
    """A neighbour, whatever it wants, neither takes nor gives rows."""
    together, alone = StepPlanner(SITES), StepPlanner(SITES)

    for step in steps:
        kept = [arrival for arrival in step.arrived if arrival.req_id == "request-0"]
        plan = unpacked(follow(together, step))
        expected = unpacked(follow(alone, Step(step.left, tuple(kept), step.view)))

        assert {key: row for key, row in plan.items() if row[0] == "request-0"} == expected
