"""The staging ring under overload: nothing is torn, late or foreign, however the streams and threads interleave.

What a race check of the copies amounts to: a ring of one step, host memory for a part of one, a dispatch thread that
holds on to what it has and lets go in any order, and delays of random length on both streams. Each row says its step,
its batch row and its site; whatever was read is overwritten with a canary before it is given back, so a copy that comes
too late, or into memory that is not its own, is seen. ``compute-sanitizer`` checks the accesses themselves: see
tests/benchmarks/README.md. Needs a CUDA GPU; about a minute and a half.
"""

from __future__ import annotations

import threading
from functools import partial
from random import Random

import pytest
import torch
from test_staging_cuda import MAX_TOKENS, SHARED, SITES, Model, make_ring, plan_of, random_plan

from headgate.capture.planning.step_plan import StepPlan
from headgate.capture.staging import device_copy
from headgate.capture.staging.host_rows import StagedRows
from headgate.capture.staging.ring import StagingRing
from tests.fakes.pipeline import TIMEOUT_S
from tests.fakes.staged import collected, groups_in
from tests.gpu.test_staging_cuda import busy_side_stream

NUM_STEPS = 800
NUM_VALUES = 251
"""Steps are told apart modulo this: bfloat16 holds such integers exactly."""
CANARY = -7.0
MAX_SLEEP_CYCLES = 1_500_000
"""Most of a millisecond: a few steps of these tests."""
WAYS = {
    "as-it-is": {},
    "runs": {"RUN_BYTES": 0, "PACK_BYTES": 0},
    "many-packs": {"FEW_COPIES": 0, "RUN_BYTES": 1 << 40, "PACK_BYTES": 1 << 13},
}
"""Settings of `links` that have rows copied from where they are, or packed in more parts than there are buffers."""


class Dispatch:
    """The dispatch thread: holds on to parts, gives them back in random order, and notes what was wrong with them.

    `hand_on` and `let_go` are called by the step thread. The lock guards `_parts`, `_is_urgent` and `_is_closed`.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._changed = threading.Condition()
        self._parts: list[tuple[StagedRows, int]] = []
        self._is_urgent = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="dispatch of a stress test")
        self.wrong: list[str] = []
        self.num_rows = 0
        self._thread.start()

    def hand_on(self, part: StagedRows, step: int) -> None:
        """A part, and the step that it is of."""
        with self._changed:
            self._parts.append((part, step))
            self._is_urgent = False
            self._changed.notify_all()

    def let_go(self) -> None:
        """The step thread waits for memory: from now until the next part, hold nothing."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()

    def close(self) -> None:
        """Finish everything and end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        depth = 0
        while True:
            with self._changed:
                while len(self._parts) <= depth and not (self._parts and (self._is_urgent or self._is_closed)):
                    if self._is_closed:
                        return
                    assert self._changed.wait(TIMEOUT_S), "the step thread stopped"
                part, step = self._parts.pop(self._random.randrange(len(self._parts)))
            depth = self._random.randrange(6)
            part.wait()
            self._check(part, step)
            for _, rows in groups_in(part):
                rows.fill_(CANARY)
            part.release()

    def _check(self, part: StagedRows, step: int) -> None:
        for group, rows in groups_in(part):
            self.num_rows += len(group.positions) * len(group.sites)
            for site, values in zip(group.sites, rows.float(), strict=True):
                is_right = (
                    bool((values[:, 0] == step % NUM_VALUES).all())
                    and values[:, 1].tolist() == group.positions.tolist()
                    and bool((values[:, 2:] == SITES.index(site)).all())
                )
                if not is_right:
                    self.wrong.append(f"step {step}, {site.name}: {values[:3, :3].tolist()}")


def delay(random: Random, ring: StagingRing) -> None:
    """Now and then, keep one of the streams busy for a while."""
    if random.random() < 0.3:
        torch.cuda._sleep(random.randrange(MAX_SLEEP_CYCLES))
    if random.random() < 0.3:
        busy_side_stream(ring, random.randrange(MAX_SLEEP_CYCLES))


def num_planned(plan: StepPlan) -> int:
    return sum(len(group.rows) * len(group.sites) for group in plan.groups)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in WAYS[request.param].items():
        monkeypatch.setattr(device_copy, name, value)
    return request.param


@SHARED
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_rows", [MAX_TOKENS, 2 * MAX_TOKENS - 1], ids=["one-step-ring", "odd-ring"])
@pytest.mark.parametrize("staging_rows", [128, 2048], ids=["parts", "whole-steps"])
def test_nothing_is_torn_late_or_foreign_under_overload(
    way: str, seed: int, num_rows: int, staging_rows: int, is_shared: bool
) -> None:
    random = Random(seed)
    ring = make_ring(num_rows=num_rows, staging_rows=staging_rows, is_shared=is_shared)
    ring.memory.rows_AD.fill_(CANARY)
    model, dispatch, planned = Model(ring, is_graph=seed % 2 == 0), Dispatch(Random(seed + 100)), 0
    ring.on_wait = dispatch.let_go

    for step in range(1, NUM_STEPS):
        plan = random_plan(random) if random.random() < 0.9 else None
        delay(random, ring)
        ring.begin(plan)
        model.forward(step % NUM_VALUES)
        if plan is not None:
            planned += num_planned(plan)
            ring.keep(plan)
            ring.collect(partial(dispatch.hand_on, step=step), patience_s=TIMEOUT_S)
    dispatch.close()
    torch.cuda.synchronize()

    assert dispatch.wrong == []
    assert (dispatch.num_rows, ring.counters.dropped_rows) == (planned, 0)
    assert ring.counters.stalls > 0 or staging_rows > 128, "the memory was never short: no overload"
    assert bool((ring.memory.rows_AD == CANARY).all()), "a copy came after its memory was given back"
    assert ring.staged_bytes == 0
    for index, rows in enumerate(ring.site_rows):
        assert set(rows[:num_rows, 2:].unique().tolist()) <= {0.0, float(index)}, "a row of another site"


def test_what_is_lost_is_counted_and_the_rest_is_right() -> None:
    """Without patience and with nobody who gives memory back, steps are lost; what came before them is untouched."""
    ring = make_ring(staging_rows=128)
    model, random = Model(ring, is_graph=True), Random(9)
    plan = plan_of(range(8), (range(len(SITES)), range(8)))
    held: list[tuple[StagedRows, int]] = []

    for step in range(1, 60):
        delay(random, ring)
        ring.begin(plan)
        model.forward(step)
        held += [(part, step) for part in collected(ring, plan)]
        if step == 30:
            checked = Dispatch(Random(0))
            for part, of in held:
                checked.hand_on(part, of)
            checked.close()
            assert checked.wrong == []
            held, num_before = [], checked.num_rows
    rest = Dispatch(Random(1))
    for part, of in held:
        rest.hand_on(part, of)
    rest.close()

    assert rest.wrong == []
    assert rest.num_rows > 0
    assert num_before + rest.num_rows + ring.counters.dropped_rows * len(SITES) == 59 * num_planned(plan)
    assert ring.counters.dropped_rows > 0
