"""The planner against a loop that is too simple to be wrong, over random schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.planning.planner import StepPlanner
from headgate.capture.planning.step_plan import PackGroup, StepPlan
from headgate.capture.schema.batch import BatchView, Int64Array
from headgate.capture.schema.positions import Named, PositionSelector, Span
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from tests.strategies import SITES, Step, resolved, schedules, selectors, site_sets

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
            for site in set(spec.sites) & set(self.sites):
                selector = spec.positions_at(site)
                if is_wanted(selector, position, num_prompt):  # type: ignore[arg-type]  # selectors are hashable
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


@settings(max_examples=250)
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


@settings(max_examples=150)
@given(steps=schedules())
def test_a_position_is_captured_once_however_often_it_is_computed(steps: list[Step]) -> None:
    planner, lives = StepPlanner(SITES), Counter[str]()
    captured = Counter[tuple[Site, str, int, int]]()

    for step in steps:
        lives.update(arrival.req_id for arrival in step.arrived)
        for (site, _), (req_id, position, _) in unpacked(follow(planner, step)).items():
            captured[site, req_id, lives[req_id], position] += 1

    assert not [row for row, times in captured.items() if times > 1]


@settings(max_examples=80)
@given(steps=schedules())
def test_requests_of_other_ids_change_nothing_for_a_request(steps: list[Step]) -> None:
    """A neighbour, whatever it wants, neither takes nor gives rows."""
    together, alone = StepPlanner(SITES), StepPlanner(SITES)

    for step in steps:
        kept = [arrival for arrival in step.arrived if arrival.req_id == "request-0"]
        plan = unpacked(follow(together, step))
        expected = unpacked(follow(alone, Step(step.left, tuple(kept), step.view)))

        assert {key: row for key, row in plan.items() if row[0] == "request-0"} == expected


@st.composite
def decoding(draw: st.DrawFn) -> tuple[list[tuple[int, CaptureSpec | None]], list[int]]:
    """Requests with what they want, mostly runs of positions, and now and then something else than one token each."""
    bound = st.integers(0, 30)
    run = st.builds(Span, start=bound, stop=st.none() | bound)
    positions = st.sampled_from([Named("all"), Named("all_generated"), Named("last_prompt")]) | run | selectors()
    wants = st.none() | st.builds(CaptureSpec, sites=site_sets(), positions=positions)
    requests = draw(st.lists(st.tuples(st.integers(1, 6), wants), min_size=1, max_size=4))
    return requests, draw(st.lists(st.integers(0, 11), min_size=20, max_size=24))


@settings(max_examples=200)
@given(decoding())
def test_steps_of_decodes_are_planned_like_any_others(
    drawn: tuple[list[tuple[int, CaptureSpec | None]], list[int]],
) -> None:
    requests, events = drawn
    planner, reference = StepPlanner(SITES), SlowPlanner(SITES)
    computed: dict[str, int] = {}

    def add(index: int) -> None:
        num_prompt, wanted = requests[index]
        specs = resolved({} if wanted is None else {index: wanted}, num_prompt)
        for each in (planner, reference):
            each.add(f"request-{index}", num_prompt, specs)
        computed[f"request-{index}"] = num_prompt - 1

    for index in range(len(requests)):
        add(index)
    for event in events:
        batch, first = list(computed), min(computed)
        if event == 11:
            computed[first] = max(computed[first] - 2, 0)  # preempted, and computed again
        elif event == 10:
            add(int(first.rpartition("-")[2]))
        elif event == 9 and len(batch) > 1:
            batch = batch[1:]
        elif event == 8:
            batch = batch[::-1]
        count = np.array([2 if event == 7 and req_id == first else 1 for req_id in batch], dtype=np.int64)
        starts = np.cumsum(count) - count + (event == 6)
        view = BatchView(tuple(batch), starts, count, np.array([computed[each] for each in batch], dtype=np.int64))

        plan, expected = planner.plan(view), reference.plan(view)

        assert unpacked(plan) == expected
        if plan is not None:
            check_form(plan, view, SITES)
        for req_id, taken in zip(batch, count.tolist(), strict=True):
            computed[req_id] += taken


def test_a_step_that_repeats_the_one_before_is_not_planned_anew() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 4, {0: CaptureSpec(sites=SITES, positions=Named("all"))})
    one, no = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)

    plans = [planner.plan(BatchView(("a",), no, one, at * one)) for at in range(3, 6)]

    assert [plan.groups[0].positions.tolist() for plan in plans if plan] == [[3], [4], [5]]
    spans = [plan.groups[0].spans for plan in plans if plan]
    assert spans[2] is spans[1] is spans[0]


@st.composite
def joining(draw: st.DrawFn) -> tuple[CaptureSpec, list[int], list[list[int]]]:
    """What all requests want, a run of positions, the lengths of their prompts, and tokens of each in each step."""
    bound = st.integers(0, 12)
    run = st.builds(Span, start=bound, stop=st.none() | bound)
    positions = draw(st.sampled_from([Named("all"), Named("all_prompt"), Named("last_prompt")]) | run)
    spec = CaptureSpec(sites=draw(site_sets()), positions=positions)
    prompts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    counts = st.lists(st.integers(0, 5), min_size=len(prompts), max_size=len(prompts))
    return spec, prompts, draw(st.lists(counts, min_size=1, max_size=8))


@settings(max_examples=250)
@given(joining())
def test_few_that_want_the_same_are_planned_like_many(drawn: tuple[CaptureSpec, list[int], list[list[int]]]) -> None:
    spec, prompts, steps = drawn
    planner, reference = StepPlanner(SITES), SlowPlanner(SITES)
    names = [f"request-{index}" for index in range(len(prompts))]
    computed = dict.fromkeys(names, 0)
    for name, num_prompt in zip(names, prompts, strict=True):
        for each in (planner, reference):
            each.add(name, num_prompt, resolved({0: spec}, num_prompt))

    for number, counts in enumerate(steps):
        batch = names[number % 2 :][:: -1 if number % 3 == 2 else 1]
        count = np.array(counts[: len(batch)], dtype=np.int64)
        starts = np.cumsum(count) - count
        view = BatchView(tuple(batch), starts, count, np.array([computed[name] for name in batch], dtype=np.int64))

        plan, expected = planner.plan(view), reference.plan(view)

        assert unpacked(plan) == expected
        assert (plan is None) == (not expected)
        if plan is not None:
            check_form(plan, view, SITES)
        for name, taken in zip(batch, count.tolist(), strict=True):
            computed[name] += taken - (number % 4 == 3 and computed[name] > 0)  # now and then one is computed again


def test_one_that_joins_many_is_looked_at_alone() -> None:
    planner = StepPlanner(SITES)
    planner.add("new", 6, {0: CaptureSpec(sites=SITES, positions=Named("last_prompt"))})
    req_ids = (*(f"plain-{index}" for index in range(50)), "new")
    count = np.array([1] * 50 + [6], dtype=np.int64)
    view = BatchView(req_ids, np.cumsum(count) - count, count, np.array([9] * 50 + [0], dtype=np.int64))
    planner._table.advance = None  # type: ignore[assignment, method-assign]  # what takes arrays of all

    plan = planner.plan(view)

    assert plan is not None
    assert plan.token_rows.tolist() == [55]
    assert unpacked(plan) == {(site, 55): ("new", 5, 1) for site in SITES}
