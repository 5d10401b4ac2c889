"""Every batch row refers to the vectors of its own request and phase."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.schema.batch import BatchView
from headgate.steering.vectors.phase_vectors import PhaseVectors
from headgate.steering.worker.device_tables import DeviceTables
from headgate.steering.worker.rows.row_table import RowTable
from headgate.steering.worker.rows.step_rows import RowResolver
from tests.fakes.steering_tables import CONFIGS, HIDDEN, Device, expected, summed, table, view
from tests.strategies import Step, schedules

MAX_TOKENS = 600

PHASES = (
    (None, None),
    (CONFIGS[1], CONFIGS[1]),
    (CONFIGS[4], None),
    (None, CONFIGS[4]),
    (CONFIGS[2], CONFIGS[6]),
    (summed((0, 5), 2.0), CONFIGS[7]),
)


class SlowResolver:
    """One token at a time, in terms of the vectors' keys."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[int, int]] = {}

    def resolve(self, batch: BatchView) -> dict[int, tuple[str, bool]]:
        """Batch row to request and whether it is in the prompt; rows not listed are padding."""
        found = {}
        for i, req_id in enumerate(batch.req_ids):
            for offset in range(int(batch.num_scheduled[i])):
                position = int(batch.num_computed[i]) + offset
                found[int(batch.starts[i]) + offset] = (req_id, position < self.requests[req_id][0])
        return found


class Followed:
    """A table and its resolver, told of a schedule; the device's rows are only ever copied as far as needed."""

    def __init__(self) -> None:
        self.table: RowTable = table(num_rows=40)
        self.resolver = RowResolver(self.table, MAX_TOKENS)
        self.slow = SlowResolver()
        self.device = Device(self.table)
        self.rows = np.zeros(MAX_TOKENS, dtype=np.int32)

    def tell(self, step: Step) -> None:
        for req_id in sorted(step.left):
            self.table.remove(req_id)
            del self.slow.requests[req_id]
        for arrival in step.arrived:
            config = int(arrival.req_id.split("-")[1]) % len(PHASES)
            self.table.add(arrival.req_id, arrival.num_prompt, *PHASES[config])
            self.slow.requests[arrival.req_id] = (arrival.num_prompt, config)

    def check(self, batch: BatchView, shared: int) -> None:
        resolved = self.resolver.resolve(batch)
        self.device.update()
        self.rows[: resolved.num_changed] = resolved.rows[: resolved.num_changed]
        assert (self.rows == resolved.rows).all()
        tokens = self.slow.resolve(batch)
        for token in range(max(tokens, default=0) + 5):
            acting = nothing = expected(None, None)
            if token in tokens:
                req_id, is_prefill = tokens[token]
                config, phase = self.slow.requests[req_id][1], int(not is_prefill)
                acting = expected(PHASES[shared][phase], PHASES[config][phase])
            row = int(self.rows[token])
            assert (self.device.added_at(row) == acting).all()
            assert (row == 0) == (acting == nothing).all()
        assert resolved.is_steered or not resolved.rows.any()


@settings(max_examples=100, deadline=None)
@given(steps=schedules(), changes=st.lists(st.integers(0, 5), min_size=14, max_size=14))
def test_every_token_refers_to_the_vectors_of_its_request_and_phase(steps: list[Step], changes: list[int]) -> None:
    followed, shared = Followed(), 0

    for step, change in zip(steps, changes, strict=True):
        if change < 2 and shared != change * 4:
            shared = change * 4
            followed.table.set_global(*PHASES[shared])
        followed.tell(step)
        followed.check(step.view, shared)
        followed.check(step.view, shared)


def steered(resolver: RowResolver, batch: BatchView | None, size: int) -> tuple[list[int], int, bool]:
    found = resolver.resolve(batch)
    return found.rows[:size].tolist(), found.num_changed, found.is_steered


def test_the_phase_changes_inside_a_chunk_and_padding_is_unsteered() -> None:
    rows = table()
    resolver = RowResolver(rows, 16)
    rows.add("a", 3, CONFIGS[0], CONFIGS[1])
    rows.add("b", 9)

    assert steered(resolver, view(("a", 5, 0), ("b", 4, 0)), 12) == ([1, 1, 1, 2, 2, 0, 0, 0, 0, 0, 0, 0], 9, True)


def test_nothing_is_copied_while_nothing_changes_and_what_was_left_is_cleared() -> None:
    rows = table()
    resolver = RowResolver(rows, 16)
    rows.add("a", 3, None, CONFIGS[1])
    rows.add("b", 3, None, CONFIGS[1])

    assert steered(resolver, view(("a", 1, 3), ("b", 1, 3)), 3) == ([1, 1, 0], 2, True)
    assert steered(resolver, view(("a", 1, 4), ("b", 1, 4)), 3) == ([1, 1, 0], 0, True)
    rows.remove("b")
    assert steered(resolver, view(("a", 1, 5)), 3) == ([1, 0, 0], 2, True)
    assert steered(resolver, None, 3) == ([0, 0, 0], 1, False)
    assert steered(resolver, None, 3) == ([0, 0, 0], 0, False)
    assert steered(resolver, view(("a", 1, 6)), 3) == ([1, 0, 0], 1, True)
    rows.remove("a")
    assert steered(resolver, view(), 3) == ([0, 0, 0], 1, False)


def test_a_request_that_is_computed_again_is_steered_as_the_first_time() -> None:
    rows = table()
    resolver = RowResolver(rows, 16)
    rows.add("a", 2, CONFIGS[0], CONFIGS[1])
    first = [steered(resolver, view(("a", 2, 0)), 2)[0], *[steered(resolver, view(("a", 1, p)), 1)[0] for p in (2, 3)]]

    again = steered(resolver, view(("a", 4, 0)), 4)[0]

    assert again == [row for step in first for row in step]


def test_a_batch_of_the_same_ids_is_looked_up_again_after_a_change() -> None:
    rows = table()
    device = Device(rows)
    resolver = RowResolver(rows, 16)
    rows.add("a", 2, CONFIGS[0], CONFIGS[0])

    def acts(own: PhaseVectors | None, shared: PhaseVectors | None) -> bool:
        row = steered(resolver, view(("a", 1, 5)), 1)[0][0]
        device.update()
        return bool((device.added_at(row) == expected(shared, own)).all())

    assert acts(CONFIGS[0], None)
    rows.add("a", 2, CONFIGS[1], CONFIGS[1])
    assert acts(CONFIGS[1], None)
    rows.set_global(None, CONFIGS[2])
    assert acts(CONFIGS[1], CONFIGS[2])
    rows.add("a", 2)
    assert acts(None, CONFIGS[2])


def test_an_idle_step_does_not_look_at_the_batch() -> None:
    rows = table()
    resolver = RowResolver(rows, 16)

    assert resolver.resolve(view(("never added", 1, 0))) is resolver.resolve(None)


def test_slots_are_resolved_for_all_sites_at_once() -> None:
    rows = table(num_rows=7)
    tables = DeviceTables(
        num_sites=6,
        num_slots=65,
        num_rows=7,
        max_tokens=8,
        hidden_size=HIDDEN,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    rows.add("a", 1, CONFIGS[1], CONFIGS[3])
    found = RowResolver(rows, 8).resolve(view(("a", 3, 0)))

    tables.update(rows.take_writes(), found)

    slots = tables.slots[:, :4].numpy()
    assert slots.shape == (6, 4)
    for site in range(6):
        assert slots[site].tolist() == [rows.map[site, row] for row in (1, 2, 2, 0)]
    assert not slots[:, 3].any()
