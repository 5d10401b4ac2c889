"""Rows on disk: they come back bit for bit, leave nothing behind, and a full disk is an error that one can handle."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.delivery.consumer_queue import SpillFile
from headgate.capture.delivery.row_packets import Packet
from headgate.capture.schema.consumer import RowBlock
from headgate.capture.schema.errors import ConfigError, ConsumerError
from tests.fakes.pipeline import SITES, consumer_request, packet


def blocks(number: int, num_rows: int) -> Packet:
    return packet([(consumer_request(f"request-{number}"), range(num_rows))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    spill = SpillFile(None)
    rows = torch.randn(len(SITES), 5, 4).to(dtype)
    rows[0, 0, 0] = torch.nan
    ((made, owners),) = blocks(1, 5).parts
    stored = replace(made, rows=rows)

    ((loaded, whose),) = spill.load(spill.store(Packet([(stored, owners)]))).parts
    spill.close()

    assert torch.equal(loaded.rows.view(torch.uint8), rows.view(torch.uint8))
    assert loaded.rows.dtype == dtype
    assert (loaded.sites, loaded.spans) == (stored.sites, stored.spans)
    assert loaded.positions is stored.positions
    assert whose is owners


def test_slices_of_a_larger_tensor_are_stored_alone() -> None:
    spill = SpillFile(None)
    whole = torch.arange(3 * 8 * 4, dtype=torch.float32).reshape(3, 8, 4)
    part = RowBlock(sites=SITES, rows=whole[:, 2:4], positions=np.array([2, 3]), spans=())

    stored = spill.store(Packet([(part, ())]))

    assert stored.num_bytes == part.rows.nbytes == spill.pending_bytes
    assert torch.equal(spill.load(stored).blocks[0].rows, whole[:, 2:4])
    assert spill.pending_bytes == 0
    spill.close()


@given(st.lists(st.booleans(), max_size=40), st.integers(100, 400))
def test_whatever_is_stored_comes_back_in_order_across_segments(is_store: list[bool], segment_bytes: int) -> None:
    spill = SpillFile(None, segment_bytes=segment_bytes)
    waiting, next_number = [], 0

    for store in is_store:
        if store:
            waiting.append((next_number, spill.store(blocks(next_number, 1 + next_number % 3))))
            next_number += 1
        elif waiting:
            number, spilled = waiting.pop(0)
            assert torch.equal(spill.load(spilled).blocks[0].rows, blocks(number, 1 + number % 3).blocks[0].rows)

    assert spill.pending_bytes == sum(spilled.num_bytes for _, spilled in waiting)
    for _, spilled in waiting:
        spill.discard(spilled)
    spill.close()
    assert spill.pending_bytes == 0


def test_files_have_no_name_and_their_space_is_free_once_they_were_read(tmp_path: Path) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    spill = SpillFile(str(tmp_path), segment_bytes=1)

    stored = [spill.store(blocks(number, 4)) for number in range(5)]

    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == open_files + 5
    for spilled in stored:
        spill.load(spilled)
    assert len(os.listdir("/proc/self/fd")) == open_files + 1
    spill.close()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_rows_stored_before_closing_can_still_be_loaded() -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    spill = SpillFile(None)
    stored = spill.store(blocks(1, 2))

    spill.close()

    assert torch.equal(spill.load(stored).blocks[0].rows, blocks(1, 2).blocks[0].rows)
    assert len(os.listdir("/proc/self/fd")) == open_files


def full_disk(allowed_bytes: int) -> Callable[[int, memoryview, int], int]:
    """A `os.pwrite` onto a disk with so much space."""
    left = allowed_bytes
    pwrite = os.pwrite

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = pwrite(descriptor, data[: min(left, len(data))], offset)
        left -= written
        return written

    return write


def test_a_full_disk_stores_nothing_and_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spill = SpillFile(None)
    kept = spill.store(blocks(1, 4))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_disk(10))
        with pytest.raises(OSError, match="No space left"):
            spill.store(blocks(2, 4))
    after = spill.store(blocks(3, 4))

    assert spill.pending_bytes == kept.num_bytes + after.num_bytes
    assert torch.equal(spill.load(kept).blocks[0].rows, blocks(1, 4).blocks[0].rows)
    assert torch.equal(spill.load(after).blocks[0].rows, blocks(3, 4).blocks[0].rows)
    spill.close()


def test_a_file_that_lost_its_end_is_an_error_and_not_wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    spill = SpillFile(None)
    stored = spill.store(blocks(1, 4))
    monkeypatch.setattr(os, "preadv", lambda _descriptor, _buffers, _offset: 0)

    with pytest.raises(ConsumerError, match="ends 192 bytes early"):
        spill.load(stored)

    assert spill.pending_bytes == 0
    spill.close()


def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"capture.spill_dir: cannot write to .*missing"):
        SpillFile(str(tmp_path / "missing"))
