"""Readouts on a GPU: outputs of their own step, with many steps under way, graphs replayed, and nothing that waits."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from headgate.capture.planning.step_plan import SiteSet, StepPlan
from headgate.capture.schema.sites import SiteShape
from headgate.capture.staging.host_rows import StagedRows
from tests.fakes.readouts import Declared, Multiples
from tests.fakes.staged import collected
from tests.gpu.test_staging_cuda import (
    LONG_SLEEP_CYCLES,
    MAX_TOKENS,
    NUM_SITES,
    SHARED,
    SITES,
    Model,
    busy_side_stream,
    check,
    make_ring,
    random_plan,
)


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
@SHARED
def test_outputs_of_readouts_are_of_their_own_step_and_nothing_waits(is_graph: bool, is_shared: bool) -> None:
    """Outputs are a row's first values: its step, batch row and site. Copies lag behind, so that buffers are full."""
    declared: list[Declared] = [(1, SITES[1], Multiples(3, 1.0)), (1, SITES[4], Multiples(3, 1.0))]
    ring = make_ring(num_rows=3 * MAX_TOKENS, is_shared=is_shared, declared=declared)
    model, random = Model(ring, is_graph=is_graph), Random(3)
    read_out = SiteSet((SITES[1], SITES[4]), np.array([NUM_SITES, NUM_SITES + 1]), SiteShape(3, "float32"), True)
    under_way: list[tuple[list[StagedRows], StepPlan, int]] = []

    for step in range(1, 100):
        rows = random_plan(random)
        group = replace(rows.groups[0], site_set=read_out)
        plan = StepPlan(rows.token_rows, (*rows.groups, group) if step % 2 else (group,))
        busy_side_stream(ring, LONG_SLEEP_CYCLES // 100)
        torch.cuda.set_sync_debug_mode("error")
        try:
            ring.begin(plan)
            model.forward(step)
            under_way.append((collected(ring, plan), plan, step))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while len(under_way) > random.choice([1, 3]):
            check(*under_way.pop(0))

    for parts in under_way:
        check(*parts)
    assert ring.counters.dropped_rows == 0
