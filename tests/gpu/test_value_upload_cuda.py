"""Numbers on their way to places on a GPU: each write has its own, however far the GPU is behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headgate.steering.worker import device_tables
from headgate.steering.worker.device_tables import DeviceTables
from headgate.steering.worker.gates.step_gates import GateWrites, StepGates
from headgate.steering.worker.transfers import NUM_BUFFERS, PinnedValues, value_upload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

NUM_PLACES, NUM_STEPS = 4096, 400
SLEEP_CYCLES = 2_000_000
DEVICE = torch.device("cuda", 0)
NO_SLOTS, NO_PLACES = np.empty(0, np.int32), np.empty(0, np.int64)


@pytest.mark.parametrize("sizes", [(1,), (64,), (1500, 3, 64)], ids=str)
@pytest.mark.parametrize("sleeps", [1, 7, 3 * NUM_BUFFERS], ids="sleeps every {}".format)
def test_each_write_has_its_own_values_and_nothing_waits(sizes: tuple[int, ...], sleeps: int) -> None:
    rng = np.random.default_rng(3)
    flat = torch.zeros(NUM_PLACES, device=DEVICE)
    upload = value_upload(flat, max(sizes))
    assert isinstance(upload, PinnedValues)
    host_places = [rng.permutation(NUM_PLACES)[:size] for size in sizes]
    places = [torch.from_numpy(each).to(DEVICE) for each in host_places]
    given = [rng.normal(size=sizes[step % len(sizes)]).astype(np.float32) for step in range(NUM_STEPS)]
    log = torch.zeros(NUM_STEPS, NUM_PLACES, device=DEVICE)

    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, values in enumerate(given):
            if step % sleeps == 0:
                torch.cuda._sleep(SLEEP_CYCLES)
            passed = values.copy()
            upload.write(places[step % len(sizes)], passed)
            passed.fill(np.nan)  # it is the caller's again
            log[step].copy_(flat)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    expected = np.zeros(NUM_PLACES, np.float32)
    for step, found in enumerate(log.cpu().numpy()):
        expected[host_places[step % len(sizes)]] = given[step]
        np.testing.assert_array_equal(found, expected, err_msg=f"step {step}")


@pytest.mark.parametrize("is_seen", [True, False], ids=["read by the GPU", "copied"])
def test_states_are_the_same_whichever_way_they_come(is_seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that changes coefficients alone, behind one that has the same places, and among others."""
    if not is_seen:
        monkeypatch.setattr(device_tables, "value_upload", lambda flat, num_values: None)
    rng = np.random.default_rng(5)
    gates = StepGates(max_tokens=64, max_num_seqs=64, num_columns=96, device=DEVICE).tensors
    states = gates.states
    updates = device_tables.GateUpdates(gates)
    tables = DeviceTables(
        num_sites=1, num_slots=2, num_rows=2, max_tokens=64, hidden_size=8, dtype=torch.float32, device=DEVICE
    )
    tables._gate_updates = updates
    log, expected = [], np.zeros((NUM_STEPS, states.numel()), np.float32)
    known = np.full(states.numel(), np.nan, np.float32)
    places = NO_PLACES
    for step in range(NUM_STEPS):
        if step % 50 == 0:
            places = rng.permutation(states.numel())[:64]
            torch.cuda._sleep(SLEEP_CYCLES)
        values = rng.normal(size=64).astype(np.float32)
        cleared = np.array([step % 129], np.int32) if step % 20 == 19 else NO_SLOTS
        tables._update_gates(GateWrites(cleared=cleared, state_places=places, states=values))
        log.append(states.flatten().clone())
        known.reshape(129, 96)[cleared] = np.nan
        known[places] = values
        expected[step] = known

    np.testing.assert_array_equal(torch.stack(log).cpu().numpy(), expected)
