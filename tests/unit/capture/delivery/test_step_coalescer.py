"""Rows of several steps, taken together: the same rows as step by step, each request's next to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.delivery import row_packets
from headgate.capture.delivery.row_packets import RowPool, StepCoalescer
from headgate.capture.planning.planner import StepPlanner
from headgate.capture.schema.batch import BatchView
from headgate.capture.schema.config import HELD_STEPS
from headgate.capture.schema.positions import Named
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.capture.staging.host_rows import StagedRows
from tests.fakes.pipeline import HIDDEN, ROW_BYTES, SITES, row_values
from tests.fakes.staged import collected
from tests.strategies import SITES as MANY_SITES
from tests.strategies import Step, schedules
from tests.unit.capture.staging.test_staging import MAX_TOKENS, forward, make_ring

Row = tuple[str, Site, int]
POOL = RowPool(0)


def rows_of(held: StepCoalescer) -> dict[Row, tuple[tuple[float, ...], int | None, int]]:
    """``{(request, site, position): (row, token, mask)}`` of everything that is held; each occurs once."""
    found: dict[Row, tuple[tuple[float, ...], int | None, int]] = {}
    for group, rows in held.copy_out(POOL):
        assert rows.shape == (len(group.sites), len(group.positions), HIDDEN)
        assert [start for _, start, _ in group.spans] == [0, *(stop for *_, stop in group.spans)][:-1]
        assert group.spans[-1][2] == len(group.positions) == len(group.masks)
        assert len({req_id for req_id, *_ in group.spans}) == len(group.spans)
        for req_id, start, stop in group.spans:
            assert (np.diff(group.positions[start:stop]) > 0).all()
            for index, site in enumerate(group.sites):
                for row in range(start, stop):
                    key = (req_id, site, int(group.positions[row]))
                    assert key not in found
                    token = None if group.token_ids is None else int(group.token_ids[row])
                    found[key] = (tuple(rows[index, row].tolist()), token, int(group.masks[row]))
    return found


class Ring:
    """Steps through a planner and a ring, as a session takes them; ids that live twice get two names."""

    def __init__(self, sites: Sequence[Site] = SITES, *, has_tokens: bool = True) -> None:
        self.staging = make_ring(sites, num_rows=MAX_TOKENS, max_tokens=MAX_TOKENS, staging_bytes=64 << 20)
        self.planner = StepPlanner(sites)
        self._has_tokens = has_tokens
        self._names: dict[str, str] = {}
        self._num_steps = 0

    def add(self, req_id: str, num_prompt: int, specs: Mapping[int, CaptureSpec]) -> None:
        name = self._names[req_id] = f"{req_id}, step {self._num_steps}"
        self.planner.add(name, num_prompt, specs)

    def step(self, view: BatchView, times: int = 1) -> list[list[StagedRows]]:
        """The rows of one step, as often as they are to be collected."""
        self._num_steps += 1
        plan = self.planner.plan(replace(view, req_ids=tuple(self._names[req_id] for req_id in view.req_ids)))
        if plan is None:
            return [[] for _ in range(times)]
        tokens = torch.arange(MAX_TOKENS, dtype=torch.int32) + 1000 * self._num_steps if self._has_tokens else None
        found = []
        for _ in range(times):
            self.staging.begin(plan, tokens)
            forward(self.staging, MAX_TOKENS, self._num_steps)
            found.append(collected(self.staging, plan))
        return found


@given(schedules(), st.booleans(), st.booleans())
def test_steps_that_are_held_together_are_what_they_are_one_by_one(
    steps: list[Step], has_tokens: bool, has_own_blocks: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_packets, "OWN_BYTES", 2 * ROW_BYTES)
        together = StepCoalescer(1 << 40, has_own_blocks=has_own_blocks)
    ring, one_by_one = Ring(MANY_SITES, has_tokens=has_tokens), dict[Row, Any]()
    for step in steps:
        for arrival in step.arrived:
            ring.add(arrival.req_id, arrival.num_prompt, arrival.specs)
        first, second = ring.step(step.view, times=2)
        for part in first:
            together.add(part)
        for part in second:
            alone = StepCoalescer(0)
            alone.add(part)
            rows = rows_of(alone)
            assert not rows.keys() & one_by_one.keys()
            one_by_one |= rows

    assert all(together.has(req_id) for req_id, *_ in one_by_one)
    assert rows_of(together) == one_by_one
    assert ring.staging.staged_bytes == 0
    assert not together


def decodes(*req_ids: str, at: int) -> BatchView:
    ones = np.ones(len(req_ids), dtype=np.int64)
    return BatchView(req_ids, np.arange(len(req_ids)), ones, at * ones)


def test_a_request_s_rows_of_all_steps_are_next_to_each_other() -> None:
    ring, held = Ring(), StepCoalescer(1 << 20)
    for req_id in ("request-1", "request-2"):
        ring.add(req_id, 4, {0: CaptureSpec(sites=SITES, positions=Named("all"))})
    for at in range(4, 7):
        for part in ring.step(decodes("request-1", "request-2", at=at))[0]:
            held.add(part)

    ((group, rows),) = held.copy_out(POOL)

    assert [(start, stop) for _, start, stop in group.spans] == [(0, 3), (3, 6)]
    assert group.positions.tolist() == [4, 5, 6, 4, 5, 6]
    assert group.token_ids is not None
    assert group.token_ids.tolist() == [1000, 2000, 3000, 1001, 2001, 3001]
    for index in range(len(SITES)):
        for row, (step, batch_row) in enumerate([(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1)]):
            assert torch.equal(rows[index, row], row_values(step, np.array([batch_row]), index)[0])


def test_many_rows_of_a_request_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_packets, "OWN_BYTES", 3 * len(SITES) * ROW_BYTES)
    monkeypatch.setattr(row_packets, "MIN_BYTES", 1)
    ring, held, pool = Ring(), StepCoalescer(1 << 20, has_own_blocks=True), RowPool(0)
    for req_id in ("few-1", "many", "few-2"):
        ring.add(req_id, 4, {0: CaptureSpec(sites=SITES, positions=Named("all"))})
    for at, req_ids in enumerate([("few-1", "many", "few-2"), ("many",), ("many", "few-2")], start=4):
        for part in ring.step(decodes(*req_ids, at=at))[0]:
            held.add(part)

    (own, rows), (others, _) = held.copy_out(pool)

    assert own.spans == (("many, step 0", 0, 3),)
    assert others.spans == (("few-1, step 0", 0, 1), ("few-2, step 0", 1, 3))
    assert own.token_ids is not None
    assert own.token_ids.tolist() == [1001, 2000, 3000]
    assert others.token_ids is not None
    assert others.token_ids.tolist() == [1000, 1002, 3001]
    size = rows.nbytes
    assert pool.free_bytes == 0
    del rows
    assert pool.free_bytes >= size, "though the others' rows are in use"


def one_request() -> Ring:
    ring = Ring()
    ring.add("request-1", 1, {0: CaptureSpec(sites=SITES, positions=Named("all"))})
    return ring


def hold(ring: Ring, held: StepCoalescer, at: int) -> None:
    for part in ring.step(decodes("request-1", at=at))[0]:
        held.add(part)


def test_it_is_full_by_bytes_and_by_steps() -> None:
    ring, held = one_request(), StepCoalescer(3 * 16 * ROW_BYTES)
    for at in range(3):
        assert not held.is_full
        hold(ring, held, at)
    assert held.is_full
    held.copy_out(POOL)
    assert not held.is_full

    for at in range(HELD_STEPS):
        held = held if at else StepCoalescer(1 << 40)
        assert not held.is_full
        hold(ring, held, 3 + at)
    assert held.is_full


def test_memory_comes_back_even_if_a_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, held = one_request(), StepCoalescer(1 << 20)
    hold(ring, held, 0)
    hold(ring, held, 1)
    assert ring.staging.staged_bytes > 0
    monkeypatch.setattr(torch, "index_select", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        held.copy_out(POOL)

    assert ring.staging.staged_bytes == 0
    assert not held
    assert not held.has("request-1, step 0")
