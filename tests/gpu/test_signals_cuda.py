"""Signals of gates on their way to the host from a GPU: those of their own step, and nothing that waits for it."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from headgate.steering.worker.gates.readings import ReportedColumns, SignalRows, WrittenCounts
from headgate.steering.worker.gates.requests import GatedRequest, GateSlots
from headgate.steering.worker.transfers import PinnedCopies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

NUM_COLUMNS = 96
SLEEP_CYCLES = 2_000_000


@pytest.mark.parametrize("num_rows", [64, 4096], ids=["all columns", "told columns"])
@pytest.mark.parametrize("first", [0, 3])
def test_copies_are_of_their_own_step_and_nothing_waits(num_rows: int, first: int) -> None:
    """The step thread is far ahead of the GPU, and buffers are used again."""
    device = torch.device("cuda")
    signals = torch.zeros(num_rows + first, NUM_COLUMNS, device=device)
    expected = torch.arange(signals.numel(), device=device, dtype=torch.float32).view_as(signals)
    columns, batch_rows = np.array([1, 2, 50], np.int64), np.arange(first, first + num_rows)
    copies, under_way = PinnedCopies(), deque[tuple[int, SignalRows, object]]()

    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(40):
            torch.cuda._sleep(SLEEP_CYCLES)
            torch.add(expected, step, out=signals)
            rows = SignalRows(signals, batch_rows, ReportedColumns(columns, device), copies)
            under_way.append((step, rows, rows.copy()))
            if len(under_way) > 3:
                check(*under_way.popleft(), first)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while under_way:
        check(*under_way.popleft(), first)


def test_counts_are_read_as_they_were_and_nothing_waits() -> None:
    """Behind the step that was launched, and before what is written next."""
    states = torch.zeros(5, NUM_COLUMNS, device="cuda")
    slots, request = GateSlots(5), GatedRequest(2, (), is_counted=True)
    requests = dict.fromkeys("ab", request)
    places = dict(zip(requests, slots.take([*requests])[0].tolist(), strict=True))
    counts = WrittenCounts(states, PinnedCopies(), slots, requests)

    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(20 * SLEEP_CYCLES)
        for value, req_id in enumerate(requests, 1):
            states[places[req_id]].fill_(value)
        assert counts.ask() == []
        counts.read_last("a", has_ended=True)
        states.fill_(torch.nan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    del requests["b"]
    told = [(each.req_id, each.states.tolist(), each.is_last) for piece in counts.take() for each in piece.reported()]

    assert told == [
        (name, [value] * NUM_COLUMNS, last) for name, value, last in (("a", 1, 0), ("b", 2, 0), ("a", 1, 1))
    ]


def check(step: int, rows: SignalRows, copy: object, first: int) -> None:
    found = copy.take()  # type: ignore[attr-defined]
    table = np.arange((first + len(rows.batch_rows)) * NUM_COLUMNS, dtype=np.float32).reshape(-1, NUM_COLUMNS)
    told = table[first:] if rows.reported is None else table[first:][:, rows.reported]
    np.testing.assert_array_equal(found, told + step)
