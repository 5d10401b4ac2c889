"""Arrays that travel to the device in one copy, and in several where they are too large for one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS
from headgate.steering.worker import device_tables
from headgate.steering.worker.device_tables import DeviceTables
from headgate.steering.worker.placed_programs import ProgramWrites
from headgate.steering.worker.rows.row_table import TableWrites
from headgate.steering.worker.rows.step_rows import StepRows
from headgate.steering.worker.rows.vector_pool import SlotWrites
from headgate.steering.worker.transfers import pack, packed_size, unpack

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16", "float16", "float32"])
def test_packed_arrays_come_out_as_they_went_in(dtype):
    arrays = [
        np.arange(3, dtype=np.int32),
        RNG.integers(0, 9, (5, 7)).astype(dtype)[:, ::2],
        np.empty((0, 4), np.float32),
        np.arange(2, dtype=np.int64),
    ]
    buffer = np.zeros(packed_size(arrays), np.uint8)

    size = pack(arrays, buffer)

    assert size == len(buffer)
    for found, array in zip(unpack(torch.from_numpy(buffer), arrays), arrays, strict=True):
        np.testing.assert_array_equal(found.numpy(), array, strict=True)


def test_what_does_not_fit_is_not_packed():
    with pytest.raises(AssertionError, match="for a buffer of 15"):
        pack([np.zeros(2, np.int64)], np.zeros(15, np.uint8))


class Sent:
    """Notes what is sent together."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def send(self, arrays):
        self.sizes.append(packed_size(arrays))
        return [torch.from_numpy(np.array(array)) for array in arrays]


SITES, SLOTS, ROWS, OP_SITES, ENTRIES, HIDDEN = 3, 40, 5, 2, 6, 4


def made_tables() -> DeviceTables:
    return DeviceTables(
        num_sites=SITES,
        num_slots=SLOTS,
        num_rows=ROWS,
        max_tokens=8,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_op_sites=OP_SITES,
        max_entries=ENTRIES,
    )


@pytest.mark.parametrize("limit", [256, 1 << 20], ids=["in-pieces", "together"])
def test_tables_are_the_same_however_much_is_sent_together(monkeypatch, limit):
    monkeypatch.setattr(device_tables, "UPLOAD_BYTES", limit)
    monkeypatch.setattr(device_tables, "ENTRIES", 3 if limit == 256 else 1000)
    tables = made_tables()
    sent = Sent()
    monkeypatch.setattr(tables, "_upload", sent)
    changed, places = np.array([1, 3]), np.array([6, 50, 7, 11, 55])
    codes = RNG.integers(1, 9, (len(places), NUM_CODES)).astype(np.int32)
    params = RNG.normal(size=(len(places), NUM_PARAMS)).astype(np.float32)
    counts = np.array([[1, 0], [0, 3]], np.int32)
    columns = RNG.integers(1, SLOTS, (SITES, 2)).astype(np.int32)
    new = SlotWrites(np.arange(1, 31), RNG.normal(size=(30, HIDDEN)).astype(np.float32))
    batch = np.array([1, 1, 3, 0, 0, 0, 0, 0], np.int32)
    groups = np.array([5, 6, 7])

    tables.update(
        TableWrites(new, changed, columns, ProgramWrites(counts, places, codes, params)),
        StepRows(batch, 3, True, groups),
    )

    assert max(sent.sizes) <= tables._limit
    assert (len(sent.sizes) == 1) == (limit != 256)
    np.testing.assert_array_equal(tables.pool[1:31].numpy(), new.vectors)
    np.testing.assert_array_equal(tables.slots[:, :3].numpy(), columns[:, [0, 0, 1]])
    programs = tables.programs
    assert programs is not None
    np.testing.assert_array_equal(programs.active[:, :3].numpy(), counts[:, [0, 0, 1]])
    np.testing.assert_array_equal(programs.counts[:, changed].numpy(), counts)
    np.testing.assert_array_equal(programs.codes.view(-1, NUM_CODES)[places].numpy(), codes)
    np.testing.assert_array_equal(programs.params.view(-1, NUM_PARAMS)[places].numpy(), params)
    np.testing.assert_array_equal(programs.groups[:3].numpy(), groups)
    assert tables.rows[:3].tolist() == [1, 1, 3]
