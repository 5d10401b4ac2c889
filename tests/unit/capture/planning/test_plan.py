"""What the planner promises, one case each; random schedules are in `test_plan_schedules.py`."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import cast
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.planning import planner
from headgate.capture.planning.planner import WINDOW, PositionList, StepPlanner, list_keys
from headgate.capture.planning.step_plan import StepPlan
from headgate.capture.schema.batch import BatchView
from headgate.capture.schema.config import MAX_CONSUMERS
from headgate.capture.schema.positions import MAX_LISTED, MAX_POSITION, Indices, Named, PositionSelector, Span
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from tests.strategies import SITES

ALL, LAST_PROMPT, GENERATED = Named("all"), Named("last_prompt"), Named("all_generated")


def spec(positions: PositionSelector, sites: tuple[Site, ...] = SITES) -> CaptureSpec:
    return CaptureSpec(sites=sites, positions=positions)


def batch(**scheduled: tuple[int, int]) -> BatchView:
    """``request=(num_computed, num_scheduled)``, one after the other."""
    computed, counts = np.array(list(scheduled.values()), dtype=np.int64).reshape(-1, 2).T
    return BatchView(tuple(scheduled), np.cumsum(counts) - counts, counts.copy(), computed.copy())


def planned(planner: StepPlanner, view: BatchView) -> StepPlan:
    """The plan of a step of which something is wanted."""
    plan = planner.plan(view)
    assert plan is not None
    return plan


def positions_of(plan: StepPlan | None) -> dict[str, list[int]]:
    """``{request: positions}`` of a plan with one group."""
    if plan is None:
        return {}
    (group,) = plan.groups
    return {req_id: group.positions[start:stop].tolist() for req_id, start, stop in group.spans}


def test_a_chunked_prompt_is_taken_chunk_by_chunk() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 5, {0: spec(Named("all_prompt"))})

    plans = [planner.plan(batch(a=(0, 3))), planner.plan(batch(a=(3, 1))), planner.plan(batch(a=(4, 1)))]

    assert [positions_of(plan) for plan in plans] == [{"a": [0, 1, 2]}, {"a": [3]}, {"a": [4]}]


def test_positions_in_the_prefix_cache_are_left_out_and_those_after_them_are_right() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 9, {0: spec(ALL)})

    plan = planned(planner, batch(other=(0, 4), a=(6, 3)))

    assert positions_of(plan) == {"a": [6, 7, 8]}
    assert plan.token_rows.tolist() == [4, 5, 6]


def test_recomputation_after_a_preemption_is_dropped_up_to_the_first_new_position() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 4, {0: spec(ALL)})
    for computed, scheduled in ((0, 4), (4, 1), (5, 1)):
        planner.plan(batch(a=(computed, scheduled)))

    again = planner.plan(batch(a=(0, 5)))
    onwards = planned(planner, batch(b=(0, 2), a=(5, 2)))

    assert again is None
    assert positions_of(onwards) == {"a": [6]}
    assert onwards.token_rows.tolist() == [3]


def test_a_position_counts_as_taken_also_when_it_was_not_wanted_where_it_was_computed() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 2, {0: spec(Indices.of((1, 5)))})
    for computed, scheduled in ((0, 2), (2, 1), (3, 1)):
        planner.plan(batch(a=(computed, scheduled)))

    assert positions_of(planner.plan(batch(a=(0, 6)))) == {"a": [5]}


def test_an_id_that_is_added_again_starts_afresh() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 3, {0: spec(ALL)})
    planner.plan(batch(a=(0, 3)))

    planner.add("a", 2, {0: spec(LAST_PROMPT)})

    assert positions_of(planner.plan(batch(a=(0, 2)))) == {"a": [1]}


def test_an_id_that_is_added_again_without_wants_is_forgotten() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 3, {0: spec(ALL)})

    planner.add("a", 3, {})

    assert planner.plan(batch(a=(0, 3))) is None


def test_requests_come_and_go_while_the_batch_stays_the_same() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 1, {0: spec(ALL)})

    plans = [planner.plan(batch(a=(0, 1), b=(0, 1)))]
    planner.add("b", 1, {0: spec(ALL)})
    plans.append(planner.plan(batch(a=(1, 1), b=(1, 1))))
    planner.remove("a")
    plans.append(planner.plan(batch(a=(2, 1), b=(2, 1))))

    assert [positions_of(plan) for plan in plans] == [{"a": [0]}, {"a": [1], "b": [1]}, {"b": [2]}]


def test_a_neighbour_that_wants_nothing_leaves_its_rows_to_nobody() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 2, {0: spec(ALL)})

    plan = planned(planner, batch(none=(5, 1), a=(0, 2)))

    assert positions_of(plan) == {"a": [0, 1]}
    assert plan.token_rows.tolist() == [1, 2]


def test_uneven_lists_of_several_requests_do_not_mix() -> None:
    """They are searched in one go, up to the highest position there can be."""
    planner = StepPlanner(SITES)
    for req_id, positions in {"a": (0, 2, MAX_POSITION), "b": (1, 2, MAX_POSITION - 1), "c": (0, 1, 5)}.items():
        planner.add(req_id, 3, {0: spec(Indices.of(positions)), 1: spec(Indices.of((*positions[:2], 40)))})

    early = planned(planner, batch(a=(0, 3), b=(0, 3), c=(0, 3)))
    late = planned(planner, batch(a=(MAX_POSITION - 1, 2), b=(MAX_POSITION - 1, 2), c=(30, 11)))

    assert positions_of(early) == {"a": [0, 2], "b": [1, 2], "c": [0, 1]}
    assert positions_of(late) == {"a": [MAX_POSITION], "b": [MAX_POSITION - 1], "c": [40]}
    assert [group.masks.tolist() for group in (*early.groups, *late.groups)] == [[3] * 6, [1, 1, 2]]


@given(
    values=st.sets(st.integers(0, 60), min_size=1).map(sorted),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=12),
    window=st.integers(1, 8),
)
def test_a_list_is_searched_near_the_rows_of_a_step(
    values: list[int], steps: list[tuple[int, int]], window: int
) -> None:
    with mock.patch.object(planner, "WINDOW", window):
        listed, first = PositionList(3, np.array(values, dtype=np.int64)), 0
        for gap, length in steps:
            first += gap
            last = first + length - 1
            found = listed.keys_near(first, last) - list_keys(np.zeros(1, dtype=np.int64), 3)

            assert {p for p in found.tolist() if first <= p <= last} == {p for p in values if first <= p <= last}
            assert len(found) <= max(window, length)
            first = last + 1


def test_what_a_step_looks_at_does_not_grow_with_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    near = PositionList.keys_near
    monkeypatch.setattr(PositionList, "keys_near", lambda *args: (keys := near(*args), looked_at.append(len(keys)))[0])
    planner = StepPlanner(SITES)
    for req_id in "ab":
        planner.add(req_id, 3, {0: spec(Indices.of([*range(0, 3 * MAX_LISTED, 3)[:-1], 2**20]))})

    taken = [positions_of(planner.plan(batch(a=(0, 3), b=(0, 3))))]
    taken += [positions_of(planner.plan(batch(a=(step, 1), b=(step, 1)))) for step in range(3, 600)]

    assert [positions.get("b") for positions in taken if positions] == [[step] for step in range(0, 600, 3)]
    assert max(looked_at) == WINDOW


def test_lists_that_are_over_beside_others_that_go_on() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 1, {0: spec(Indices.of((0, 2, 3))), 1: spec(ALL, SITES[:1])})

    plans = [planned(planner, batch(a=(step, 1))) for step in range(6)]

    wanted = [sorted({bit for group in plan.groups for bit in group.masks.tolist()}) for plan in plans]
    assert wanted == [[1, 3], [2], [1, 3], [1, 3], [2], [2]]


def test_removing_an_unknown_id_changes_nothing() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 3, {0: spec(ALL)})

    planner.remove("b")

    assert positions_of(planner.plan(batch(b=(0, 1), a=(0, 3)))) == {"a": [0, 1, 2]}


def test_one_row_wanted_by_three_consumers_is_packed_once() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 3, {0: spec(ALL), 2: spec(LAST_PROMPT), MAX_CONSUMERS - 1: spec(Span(1))})

    (group,) = planned(planner, batch(a=(0, 3))).groups

    highest = 1 << (MAX_CONSUMERS - 1)
    assert group.sites == SITES
    assert group.masks.tolist() == [1, 1 | highest, 1 | 4 | highest]


def test_sites_are_grouped_by_who_wants_them_and_where() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 3, {0: spec(ALL, SITES[:3]), 1: spec(LAST_PROMPT, SITES[2:4]), 2: spec(ALL, SITES[:1])})

    groups = {
        group.sites: (group.positions.tolist(), group.masks.tolist())
        for group in planned(planner, batch(a=(0, 3))).groups
    }

    assert groups == {
        SITES[:1]: ([0, 1, 2], [5, 5, 5]),
        SITES[1:2]: ([0, 1, 2], [1, 1, 1]),
        SITES[2:3]: ([0, 1, 2], [1, 1, 3]),
        SITES[3:4]: ([2], [2]),
    }


def test_requests_that_want_the_same_sites_share_one_group_in_batch_order() -> None:
    """Whatever their positions: a decode step of many requests is one gather."""
    planner = StepPlanner(SITES)
    selectors: dict[str, PositionSelector] = {
        "a": ALL,
        "b": Span(2, None, 3),
        "c": Indices.of((0, 4, 5)),
        "d": GENERATED,
        "e": Indices.of((1, 3, 5)),
    }
    for req_id, positions in selectors.items():
        planner.add(req_id, 4, {0: spec(positions)})

    (group,) = planned(planner, batch(e=(5, 1), d=(5, 1), a=(5, 1), none=(7, 1), c=(5, 1), b=(5, 1))).groups

    assert group.spans == (("e", 0, 1), ("d", 1, 2), ("a", 2, 3), ("c", 3, 4), ("b", 4, 5))
    assert group.positions.tolist() == [5] * 5


def test_more_requests_than_ever_before_keep_their_own_state() -> None:
    """The tables grow while requests are under way."""
    planner, num_requests = StepPlanner(SITES), 300
    ids = [f"r{i}" for i in range(num_requests)]
    for i, req_id in enumerate(ids):
        planner.add(req_id, 10, {bit: spec(Span(i, i + 2), SITES[bit : bit + 1]) for bit in range(1 + i % 3)})

    plan = planned(planner, batch(**{req_id: (0, i + 1) for i, req_id in enumerate(ids)}))

    first = next(group for group in plan.groups if group.sites == SITES[:1])
    assert first.positions.tolist() == list(range(num_requests))
    assert first.spans == tuple((req_id, i, i + 1) for i, req_id in enumerate(ids))
    later = planned(planner, batch(r7=(8, 1)))
    assert [(group.spans, group.positions.tolist()) for group in later.groups] == [((("r7", 0, 1),), [8])] * 2


def test_sites_of_other_pipeline_stages_are_ignored() -> None:
    planner = StepPlanner(SITES[4:6])
    planner.add("a", 3, {0: spec(ALL, SITES[:5]), 1: spec(ALL, SITES[:2])})
    planner.add("b", 3, {0: spec(ALL, SITES[:4])})

    (group,) = planned(planner, batch(b=(0, 3), a=(0, 1))).groups

    assert (group.sites, group.site_ids.tolist()) == (SITES[4:5], [0])
    assert (group.spans, group.masks.tolist()) == ((("a", 0, 1),), [1])


def unreadable(*req_ids: str) -> BatchView:
    """A batch view that raises when anything but its ids is read."""
    return cast("BatchView", SimpleNamespace(req_ids=req_ids))


@pytest.mark.parametrize(
    ("specs", "scheduled"),
    [
        pytest.param({}, (0, 3), id="no-spec"),
        pytest.param({0: spec(ALL, SITES[2:])}, (0, 3), id="no-site-of-this-worker"),
        pytest.param({0: spec(LAST_PROMPT, SITES[:1])}, (0, 3), id="last-prompt-is-over"),
        pytest.param({0: spec(Indices.of((0, 2)), SITES[:1])}, (0, 3), id="list-is-over"),
        pytest.param({0: spec(Span(0, 3), SITES[:1]), 1: spec(Named("all_prompt"), SITES[:1])}, (1, 2), id="both-over"),
    ],
)
def test_a_batch_of_which_nothing_can_be_wanted_any_more_is_not_even_looked_at(
    specs: dict[int, CaptureSpec], scheduled: tuple[int, int]
) -> None:
    planner = StepPlanner(SITES[:2])
    planner.add("a", 3, specs)
    planner.plan(batch(a=scheduled))

    assert planner.plan(unreadable("a")) is None


def test_a_batch_without_capturing_requests_is_not_looked_at_while_one_waits() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 3, {0: spec(ALL)})

    assert planner.plan(unreadable("b", "c")) is None


def test_a_request_without_tokens_in_the_step_has_no_span() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 3, {0: spec(ALL)})

    assert planner.plan(batch(a=(0, 0))) is None
    assert positions_of(planner.plan(batch(a=(0, 3)))) == {"a": [0, 1, 2]}


def test_equal_site_sets_have_the_same_ids_object_from_step_to_step() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 1, {0: spec(ALL)})
    planner.add("b", 1, {1: spec(GENERATED), 2: spec(Span(0, None, 2))})

    first = planned(planner, batch(a=(0, 1))).groups[0].site_ids
    second = planned(planner, batch(b=(0, 2))).groups[0].site_ids

    assert first is second
    assert not first.flags.writeable


def test_nothing_is_kept_of_requests_that_left() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 2, {0: spec(Indices.of((0, 2, 7)), SITES[1:3])})
    kept = weakref.ref(planned(planner, batch(a=(0, 1))).groups[0].site_ids)

    planner.remove("a")
    gc.collect()

    assert kept() is None


def test_mistakes_of_ours_are_found_where_they_are_made() -> None:
    planner = StepPlanner(SITES)

    with pytest.raises(AssertionError, match="listed twice"):
        StepPlanner((SITES[0], SITES[0]))
    with pytest.raises(AssertionError, match="does not fit a mask"):
        planner.add("a", 3, {MAX_CONSUMERS: spec(ALL)})
    with pytest.raises(AssertionError, match="not resolved"):
        planner.add("a", 3, {0: spec(Indices.of((-1,)))})


def test_rows_that_may_be_wanted_are_those_at_possible_positions() -> None:
    planner = StepPlanner(SITES)
    planner.add("prompt", 10, {0: spec(Named("all_prompt"))})
    planner.add("answer", 10, {0: spec(GENERATED)})
    planner.add("some", 10, {0: spec(Indices.of((2, 12)))})
    before = batch(prompt=(4, 4), answer=(8, 4), some=(0, 4))
    after = batch(prompt=(13, 4), answer=(13, 4), some=(13, 4), nobody=(13, 4))

    chunk, decode = planner.candidates(before), planner.candidates(after)

    assert chunk is not None
    assert decode is not None
    assert chunk.token_rows.tolist() == [0, 1, 2, 3, 6, 7, 10, 11]
    assert decode.token_rows.tolist() == [4, 5, 6, 7, 8, 9, 10, 11], "answer and some: 13 may be 10"
    assert decode.num_copies == 8 * len(SITES)
    assert decode.sites == SITES


def test_a_step_is_planned_with_the_rows_that_counted_among_those_that_were_kept() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 2, {0: spec(ALL)})
    planner.add("b", 2, {0: spec(Indices.of((5, 6)))})
    view = batch(a=(6, 4), b=(6, 4))
    kept = planner.candidates(view)
    assert kept is not None

    assert (kept.is_decided, kept.groups) == (False, ())

    planner.settle(kept, BatchView(("a", "b"), view.starts, np.array([1, 3]), np.array([4, 4])))

    assert (kept.is_decided, kept.num_copies) == (True, 3 * len(SITES))
    (group,) = kept.groups
    assert group.spans == (("a", 0, 1), ("b", 1, 3))
    assert kept.token_rows[group.rows].tolist() == [0, 5, 6]
    assert group.positions.tolist() == [4, 5, 6]


def test_a_step_of_which_nothing_counts_has_no_groups() -> None:
    planner = StepPlanner(SITES)
    planner.add("a", 2, {0: spec(ALL)})
    view = batch(a=(6, 4))
    kept = planner.candidates(view)
    assert kept is not None

    planner.settle(kept, BatchView(("a",), view.starts, np.array([0]), np.array([4])))

    assert (kept.is_decided, kept.groups, kept.num_copies) == (True, (), 0)
