"""The staging ring: what the forward scatters is what arrives, whatever is wanted, however little memory there is."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from headgate.capture.planning.step_plan import PackGroup, SiteSet, StepPlan
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.sites import Site
from headgate.capture.staging.host_rows import StagedRows
from headgate.capture.staging.ring import StagingRing
from tests.fakes.pipeline import HIDDEN, ROW_BYTES, SITES, TIMEOUT_S, row_values, when_it_waits
from tests.fakes.staged import collected, groups_in

MAX_TOKENS = 256
LARGE = 1 << 20
MIN_ROWS = 32
"""The smallest host memory there can be for a few sites."""


def make_ring(
    sites: Sequence[Site] = SITES, *, num_rows: int = 16, max_tokens: int = 8, staging_bytes: int = LARGE
) -> StagingRing:
    return StagingRing(
        sites=sites,
        num_rows=num_rows,
        max_tokens=max_tokens,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
        staging_bytes=staging_bytes,
    )


def plan_of(token_rows: Sequence[int], *groups: tuple[Sequence[Site], Sequence[int]]) -> StepPlan:
    """A plan for one request whose positions are its batch rows."""
    rows = np.array(token_rows, dtype=np.int64)
    return StepPlan(
        token_rows=rows,
        groups=tuple(
            PackGroup(
                site_set=SiteSet(tuple(sites), np.array([SITES.index(site) for site in sites])),
                rows=np.array(chosen, dtype=np.int64),
                positions=rows[np.array(chosen, dtype=np.int64)],
                masks=np.ones(len(chosen), dtype=np.int64),
                spans=(("request-1", 0, len(chosen)),),
            )
            for sites, chosen in groups
        ),
    )


def forward(ring: StagingRing, num_tokens: int, step: int = 1) -> None:
    """What the model does: scatter a value at every site for every batch row."""
    for index, buffer in enumerate(ring.site_rows):
        values = row_values(step, np.arange(num_tokens), index)
        buffer.index_put_((ring.slots[:num_tokens],), values)


def contents(staged: Sequence[StagedRows], step: int = 1) -> dict[tuple[Site, int], int]:
    """``{(site, position): how often}`` of rows, each checked to hold what it should."""
    found: dict[tuple[Site, int], int] = {}
    for part in staged:
        part.wait()
        for group, rows in groups_in(part):
            for site, values in zip(group.sites, rows, strict=True):
                assert torch.equal(values, row_values(step, group.positions, SITES.index(site)))
                for position in group.positions.tolist():
                    found[site, position] = found.get((site, position), 0) + 1
        part.release()
    return found


def test_wanted_rows_arrive_and_no_others() -> None:
    ring = make_ring()
    plan = plan_of([1, 2, 5], (SITES[:2], [0, 1, 2]), (SITES[2:], [1]))

    ring.begin(plan)
    forward(ring, 7)
    found = contents(collected(ring, plan))

    assert found == {(site, row): 1 for site in SITES[:2] for row in (1, 2, 5)} | {(SITES[2], 2): 1}
    assert (ring.counters.steps, ring.counters.rows, ring.counters.bytes) == (1, 3, 7 * ROW_BYTES)


def test_rows_that_nobody_wants_go_to_the_trash_slots_padding_included() -> None:
    ring = make_ring(num_rows=16, max_tokens=8)

    ring.begin(plan_of([5], (SITES, [0])))
    ring.begin(plan_of([1, 2], (SITES, [0, 1])))

    assert ring.slots.tolist() == [16, 1, 2, 19, 20, 21, 22, 23]


def test_an_idle_step_after_a_step_leaves_no_slot_behind() -> None:
    ring = make_ring(num_rows=16, max_tokens=8)

    ring.begin(plan_of([0, 7], (SITES, [0, 1])))
    ring.begin(None)

    assert ring.slots.tolist() == list(range(16, 24))


def test_more_rows_than_trash_slots_share_them() -> None:
    ring = make_ring(num_rows=200, max_tokens=200)

    assert set(ring.slots.tolist()) == set(range(200, len(ring.site_rows[0])))


def test_nothing_ever_moves() -> None:
    ring = make_ring()
    addresses = ring.site_rows[0].data_ptr(), ring.slots.data_ptr()

    for step in range(20):
        plan = plan_of([0, step % 8 or 1], (SITES, [0, 1]))
        ring.begin(plan)
        forward(ring, 8)
        contents(collected(ring, plan))
    ring.begin(None)

    assert (ring.site_rows[0].data_ptr(), ring.slots.data_ptr()) == addresses


def test_each_step_takes_the_slots_behind_the_last_steps_until_the_ring_is_round() -> None:
    ring, used = make_ring(num_rows=10, max_tokens=8), []

    for _ in range(4):
        ring.begin(plan_of([0, 1, 2], (SITES, [0, 1, 2])))
        used.append(ring.slots[:3].tolist())

    assert used == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]]


@pytest.mark.parametrize("staging_rows", [MIN_ROWS, 3 * MIN_ROWS, 1000])
def test_a_step_that_does_not_fit_comes_in_parts_each_with_all_sites_of_its_rows(staging_rows: int) -> None:
    ring = make_ring(num_rows=64, max_tokens=64, staging_bytes=staging_rows * ROW_BYTES)
    plan = plan_of(range(64), (SITES[:1], range(64)), (SITES[1:], range(0, 64, 2)))

    ring.begin(plan)
    forward(ring, 64)
    found, parts = {}, []

    def check(part: StagedRows) -> None:
        by_site = {site: set(group.positions.tolist()) for group, _ in groups_in(part) for site in group.sites}
        evens = {position for position in by_site[SITES[0]] if position % 2 == 0}
        assert evens == by_site.get(SITES[1], set()) == by_site.get(SITES[2], set())
        for group, _ in groups_in(part):
            assert group.spans == (("request-1", 0, len(group.rows)),)
        found.update(contents([part]))
        parts.append(part)

    ring.keep(plan)
    ring.collect(check, patience_s=0)

    assert len(found) == 64 + 2 * 32
    assert set(found.values()) == {1}
    assert len(parts) == 1 if staging_rows == 1000 else len(parts) > 1


def filled_ring() -> tuple[StagingRing, StepPlan, list[StagedRows]]:
    """A ring whose host memory two steps have filled, the plan of each, and what holds the memory."""
    ring = make_ring(num_rows=64, max_tokens=16, staging_bytes=MIN_ROWS * ROW_BYTES)
    plan = plan_of(range(16), (SITES[:1], range(16)))
    held = []
    for _ in range(2):
        ring.begin(plan)
        forward(ring, 16)
        held += collected(ring, plan)
    return ring, plan, held


def test_full_host_memory_holds_up_the_step_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, plan, held = filled_ring()
    waits = when_it_waits(ring.memory.arena._freed, monkeypatch)
    thread = threading.Thread(target=lambda: waits.wait(TIMEOUT_S) and contents(held))
    thread.start()

    ring.begin(plan)
    forward(ring, 16, step=2)
    found = contents(collected(ring, plan, patience_s=TIMEOUT_S), step=2)
    thread.join(TIMEOUT_S)

    assert len(found) == 16
    assert ring.counters.stalls == 1
    assert ring.counters.dropped_rows == 0


def test_rows_are_lost_and_counted_when_nothing_becomes_free_in_time() -> None:
    ring, plan, held = filled_ring()
    ring.begin(plan)

    assert collected(ring, plan) == []

    assert ring.counters.dropped_rows == 16
    for part in held:
        part.release()
    assert ring.staged_bytes == 0


@pytest.mark.parametrize("staging_rows", [MIN_ROWS, 1000])
def test_rows_come_with_the_tokens_they_were_computed_from(staging_rows: int) -> None:
    ring = make_ring(num_rows=64, max_tokens=64, staging_bytes=staging_rows * ROW_BYTES)
    plan = plan_of(range(0, 64, 3), (SITES[:1], range(22)), (SITES[1:], range(0, 22, 2)))
    token_ids = torch.arange(1000, 1064, dtype=torch.int32)

    ring.begin(plan, token_ids)
    token_ids.fill_(-5)  # the next step's tokens take the same memory
    forward(ring, 64)
    checked = []

    def check(part: StagedRows) -> None:
        part.wait()
        for group, _ in groups_in(part):
            assert np.array_equal(part.token_ids(group), 1000 + group.positions)
        contents([part])
        checked.append(part)

    ring.keep(plan)
    ring.collect(check, patience_s=0)
    assert sum(len(group.rows) for part in checked for group in part.groups) == 22 + 11


def test_tokens_that_nobody_knows_are_none() -> None:
    ring, plan = make_ring(), plan_of([0], (SITES, [0]))
    ring.begin(plan)
    (part,) = collected(ring, plan)

    assert part.token_ids(plan.groups[0]) is None


def test_steps_that_are_kept_are_collected_together() -> None:
    ring = make_ring(num_rows=16, max_tokens=8)
    plan, other = plan_of([0, 1], (SITES, [0, 1])), plan_of([2, 4], (SITES[:1], [0]), (SITES[1:], [1]))

    for step in (plan, other):
        ring.begin(step, torch.arange(8, dtype=torch.int32))
        forward(ring, 8)
        ring.keep(step)
    assert (ring.num_kept_rows, ring.counters.steps) == (4, 2)
    (part,) = collected(ring)

    assert [part.token_ids(group).tolist() for group in part.groups] == [[0, 1], [2], [4]]
    expected = {(site, row): 1 for site in SITES for row in (0, 1, 4)} | {(SITES[0], 2): 1}
    del expected[SITES[0], 4]
    assert contents([part]) == expected
    assert (ring.num_kept_rows, ring.kept_since, collected(ring)) == (0, None, [])


def test_kept_rows_are_collected_before_the_ring_goes_round() -> None:
    ring, plans = make_ring(num_rows=10, max_tokens=8), [plan_of([0, 1, 2, 3], (SITES, range(4))) for _ in range(3)]

    for plan in plans[:2]:
        assert not ring.has_to_collect(plan)
        ring.begin(plan)
        forward(ring, 8)
        ring.keep(plan)
    assert ring.has_to_collect(plans[2])
    with pytest.raises(RuntimeError, match="was not collected"):
        ring.begin(plans[2])

    assert contents(collected(ring)) == {(site, row): 2 for site in SITES for row in range(4)}
    ring.begin(plans[2])
    assert ring.slots[:4].tolist() == [0, 1, 2, 3]


def test_a_ring_made_in_inference_mode_serves_outside_of_it_and_the_other_way_round() -> None:
    plan = plan_of([0, 1], (SITES, [0, 1]))
    with torch.inference_mode():
        ring = make_ring()
        ring.begin(plan)
        forward(ring, 2)
        (staged,) = collected(ring, plan)

    assert len(contents([staged])) == 2 * len(SITES)
    ring.begin(plan)
    forward(ring, 2)
    assert len(contents(collected(ring, plan))) == 2 * len(SITES)


def test_reset_makes_it_as_new() -> None:
    ring = make_ring(num_rows=16, max_tokens=8)
    ring.begin(plan_of([0, 1], (SITES, [0, 1])))
    forward(ring, 2)

    ring.reset()

    assert ring.slots.tolist() == list(range(16, 24))
    assert not any(rows.any() for rows in ring.site_rows)
    ring.begin(plan_of([0], (SITES, [0])))
    assert ring.slots.tolist() == [0, *range(17, 24)]


def test_slots_become_free_though_the_receiver_of_rows_fails() -> None:
    ring, plan = make_ring(), plan_of([0], (SITES, [0]))
    freed = []
    ring._copier.free_after_copy = lambda start, stop: freed.append((start, stop))
    ring.begin(plan)
    ring.keep(plan)

    def fail(part: StagedRows) -> None:
        part.release()
        raise OSError("no receiver")

    with pytest.raises(OSError, match="no receiver"):
        ring.collect(fail, patience_s=0)

    assert freed == [(0, 1)]
    assert (ring.num_kept_rows, ring.staged_bytes) == (0, 0)


def test_a_step_is_collected_once() -> None:
    ring, plan = make_ring(), plan_of([0], (SITES, [0]))
    ring.begin(plan)
    collected(ring, plan)

    with pytest.raises(RuntimeError, match="was not begun, or was collected already"):
        collected(ring, plan)


def test_memory_that_cannot_hold_a_row_of_every_site_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=f"at least {MIN_ROWS * ROW_BYTES} are needed"):
        make_ring(staging_bytes=(MIN_ROWS - 1) * ROW_BYTES)


def test_a_ring_that_cannot_hold_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="7 rows cannot hold a step of 8 tokens"):
        make_ring(num_rows=7, max_tokens=8)
