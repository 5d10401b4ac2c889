"""Numbers that come to known places on the device: no buffer is written as long as the GPU may read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headgate.steering.worker import transfers
from headgate.steering.worker.device_tables import DeviceTables
from headgate.steering.worker.gates.step_gates import GateWrites, StepGates
from headgate.steering.worker.rows.step_rows import StepRows
from headgate.steering.worker.transfers import NUM_BUFFERS, HostValues, PinnedValues

NUM_PLACES, MOST = 12, 5


class Gpu:
    """Does what was launched later, as a GPU that is behind does; it stands for the memory that is written, too.

    Attributes:
        flat: What it has written.
        log: The same behind each write.
        waited: How much was done for each event that was waited for.
    """

    def __init__(self) -> None:
        self.flat = torch.zeros(NUM_PLACES)
        self.log: list[list[float]] = []
        self.waited: list[int] = []
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._num_done = 0

    def index_copy_(self, dim: int, places: Tensor, source: Tensor) -> None:
        self._waiting.append((places, source))

    def run(self, number: int) -> int:
        """Do some of what waits; returns how much that was."""
        now, self._waiting = self._waiting[:number], self._waiting[number:]
        for places, source in now:
            self.log.append(self.flat.index_copy_(0, places, source).tolist())
        self._num_done += len(now)
        return len(now)

    @property
    def num_launched(self) -> int:
        return self._num_done + len(self._waiting)

    def event(self) -> Event:
        return Event(self)

    def run_to(self, number: int) -> None:
        self.waited.append(self.run(max(number - self._num_done, 0)))


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._at = gpu, 0

    def record(self) -> None:
        self._at = self._gpu.num_launched

    def synchronize(self) -> None:
        self._gpu.run_to(self._at)


def pinned_values(gpu: Any) -> PinnedValues:
    pinned = torch.zeros(NUM_BUFFERS, MOST)
    return PinnedValues(gpu, pinned, pinned, [gpu.event(), gpu.event()])


@given(seed=st.integers(0, 1 << 32), rate=st.sampled_from([0.0, 0.3, 0.9, 1.1]))
def test_each_write_has_its_own_values_however_far_the_gpu_is_behind(seed: int, rate: float) -> None:
    rng, gpu, flat, expected = np.random.default_rng(seed), Gpu(), torch.zeros(NUM_PLACES), []
    upload = pinned_values(gpu)
    for number in range(5 * NUM_BUFFERS):
        places = torch.from_numpy(rng.permutation(NUM_PLACES)[: rng.integers(MOST + 1)])
        values = np.arange(len(places), dtype=np.float32) + 10.0 * number
        expected.append(flat.index_copy_(0, places, torch.tensor(values)).tolist())
        upload.write(places, values)
        values.fill(np.nan)  # it is the caller's again
        gpu.run(rng.poisson(rate))
    gpu.run(len(expected))

    assert gpu.log == expected


def test_a_gpu_that_is_a_few_steps_behind_is_never_waited_for() -> None:
    gpu, behind = Gpu(), NUM_BUFFERS // 2
    upload = pinned_values(gpu)
    for number in range(10 * NUM_BUFFERS):
        upload.write(torch.tensor([0]), np.array([number], np.float32))
        if number >= behind:
            gpu.run(1)

    assert gpu.waited == [0] * 20


def test_a_forward_on_the_host_reads_the_array() -> None:
    flat = torch.zeros(4)

    upload = transfers.value_upload(flat, 4)
    assert isinstance(upload, HostValues)
    upload.write(torch.tensor([3, 1]), np.array([1.0, 2.0], np.float32))

    assert flat.tolist() == [0.0, 2.0, 0.0, 1.0]


NO_SLOTS, NO_PLACES = np.empty(0, np.int32), np.empty(0, np.int64)
NOTHING = StepRows(np.zeros(8, np.int32), 0, False, None)
NUM_SLOTS, NUM_COLUMNS = 3, 4


def gated_tables() -> tuple[DeviceTables, Tensor]:
    """Return tables, and the states of their gates."""
    gates = StepGates(max_tokens=8, max_num_seqs=1, num_columns=NUM_COLUMNS, device=torch.device("cpu")).tensors
    tables = DeviceTables(
        num_sites=1,
        num_slots=2,
        num_rows=2,
        max_tokens=8,
        hidden_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_op_sites=1,
        max_entries=1,
        gates=gates,
    )
    return tables, gates.states


class Noted:
    """Notes what is written the short way."""

    def __init__(self, upload: Any) -> None:
        self.count = 0
        self._upload = upload

    def write(self, places: Tensor, values: Any) -> None:
        self.count += 1
        self._upload.write(places, values)


@pytest.mark.parametrize("has_upload", [True, False], ids=["short way", "usual way"])
def test_coefficients_alone_take_the_short_way_once_their_places_are_known(has_upload: bool) -> None:
    tables, states = gated_tables()
    updates: Any = tables._gate_updates
    noted = Noted(updates._upload)
    updates._upload = noted if has_upload else None
    places, others = np.array([1, 6, 11]), np.array([0, 6])
    expected = np.full(NUM_SLOTS * NUM_COLUMNS, np.nan, np.float32)
    tokens, slots = np.ones((2, 2), np.int32), np.array([2], np.int32)

    steps: list[tuple[Any, bool, dict[str, Any]]] = [
        (places, False, {}),
        (places, True, {}),
        (places, True, {}),
        (places, False, {"tokens": tokens}),
        (places, False, {"cleared": slots}),
        (places, False, {"columns": ((0, 1),)}),
        (places, False, {"places": others, "strengths": np.ones(2, np.float32)}),
        (places, True, {}),
        (others, False, {}),
        (others, True, {}),
        (places, False, {}),
        (NO_PLACES, False, {"tokens": tokens}),
        (places, True, {}),
    ]
    for step, (where, is_short, more) in enumerate(steps):
        values, before = np.arange(len(where), dtype=np.float32) + 10.0 * step, noted.count
        writes = GateWrites(**{"state_places": where, "states": values, **more})
        tables.update(None, NOTHING, writes)

        table = expected.reshape(NUM_SLOTS, NUM_COLUMNS)
        table[more.get("cleared", NO_SLOTS)] = np.nan
        for first, end in more.get("columns", ()):
            table[:, first:end] = np.nan
        expected[where] = values
        np.testing.assert_array_equal(states.numpy().reshape(-1), expected, err_msg=f"step {step}")
        assert noted.count - before == (is_short and has_upload), step
