"""Over random schedules, every planned row arrives once, as the forward of its step computed it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.planning.planner import StepPlanner
from headgate.capture.planning.step_plan import PackGroup, StepPlan
from headgate.capture.schema.sites import Site
from headgate.capture.staging.host_rows import StagedRows
from headgate.capture.staging.ring import StagingRing
from tests.fakes.pipeline import HIDDEN, ROW_BYTES, request_number, row_values
from tests.fakes.staged import groups_in
from tests.strategies import SITES as MANY_SITES
from tests.strategies import Step, schedules
from tests.unit.capture.staging.test_staging import MAX_TOKENS, MIN_ROWS, make_ring


@settings(max_examples=40)
@given(
    schedules(MANY_SITES),
    st.sampled_from([2 * MIN_ROWS, 200, 100_000]),
    st.sampled_from([MAX_TOKENS, MAX_TOKENS + 50]),
    st.integers(1, 4),
)
def test_over_random_schedules_every_planned_row_arrives_as_it_was_computed(
    steps: list[Step], staging_rows: int, num_rows: int, kept: int
) -> None:
    ring = make_ring(MANY_SITES, num_rows=num_rows, max_tokens=MAX_TOKENS, staging_bytes=staging_rows * ROW_BYTES)
    planner, waiting = StepPlanner(MANY_SITES), []

    for number, step in enumerate(steps, start=1):
        for req_id in step.left:
            planner.remove(req_id)
        for arrival in step.arrived:
            planner.add(arrival.req_id, arrival.num_prompt, arrival.specs)
        plan = planner.plan(step.view)
        if plan is not None and ring.has_to_collect(plan):
            assert arrived(ring) == sum(map(planned, waiting), Counter())
            waiting = []
        ring.begin(plan)
        for index, buffer in enumerate(ring.site_rows):
            tokens, values = computed(step, index)
            buffer.index_put_((ring.slots[tokens],), values[tokens])
        if plan is not None:
            ring.keep(plan)
            waiting.append(plan)
        if number % kept == 0:
            assert arrived(ring) == sum(map(planned, waiting), Counter())
            waiting = []


def computed(step: Step, site_index: int) -> tuple[np.ndarray, torch.Tensor]:
    """Batch rows that belong to a request, and the value of every batch row at one site."""
    view = step.view
    num_rows = int((view.starts + view.num_scheduled).max(initial=0))
    values, is_taken = torch.zeros(num_rows, HIDDEN), np.zeros(num_rows, dtype=bool)
    for req_id, start, count, first in zip(
        view.req_ids, view.starts, view.num_scheduled, view.num_computed, strict=True
    ):
        values[start : start + count] = row_values(request_number(req_id), np.arange(first, first + count), site_index)
        is_taken[start : start + count] = True
    return np.flatnonzero(is_taken), values


def planned(plan: StepPlan) -> Counter[tuple[Site, str, int, int]]:
    return Counter(
        (site, req_id, int(group.positions[row]), int(group.masks[row]))
        for group in plan.groups
        for site in group.sites
        for req_id, start, stop in group.spans
        for row in range(start, stop)
    )


def arrived(ring: StagingRing) -> Counter[tuple[Site, str, int, int]]:
    found: Counter[tuple[Site, str, int, int]] = Counter()

    def check(part: StagedRows) -> None:
        part.wait()
        for group, rows in groups_in(part):
            for (site, req_id, row), values in rows_of(group, rows):
                expected = row_values(request_number(req_id), group.positions[row : row + 1], MANY_SITES.index(site))
                assert torch.equal(values, expected[0])
                found[site, req_id, int(group.positions[row]), int(group.masks[row])] += 1
        part.release()

    ring.collect(check, patience_s=0)
    return found


def rows_of(group: PackGroup, rows: torch.Tensor) -> Iterator[tuple[tuple[Site, str, int], torch.Tensor]]:
    for index, site in enumerate(group.sites):
        for req_id, start, stop in group.spans:
            for row in range(start, stop):
                yield (site, req_id, row), rows[index, row]
