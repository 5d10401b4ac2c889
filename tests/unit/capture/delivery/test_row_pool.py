"""Host memory is used again, but never while somebody can still read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.delivery.row_packets import IDLE_S, MIN_BYTES, REGION_BYTES, RowPool
from headgate.capture.schema.config import MIB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_have_the_shape_and_dtype_asked_for(dtype: torch.dtype) -> None:
    pool = RowPool(64 * MIB)

    for shape in [(2, 3, 4), (3, 1000, 512), (1, 1, MIN_BYTES)]:
        rows = pool.empty(shape, dtype)
        rows.fill_(1)
        assert (rows.shape, rows.dtype, rows.is_contiguous()) == (shape, dtype, True)


def test_memory_is_used_again_once_the_last_view_is_gone() -> None:
    pool = RowPool(64 * MIB)
    rows = pool.empty((2, 1024, 512), torch.float32)
    address, view = rows.data_ptr(), rows[1:, 5:7]

    del rows
    other = pool.empty((2, 1024, 512), torch.float32)
    assert other.data_ptr() != address
    del view

    assert pool.empty((2, 1024, 512), torch.float32).data_ptr() == address


def test_numpy_views_keep_the_memory_too() -> None:
    pool = RowPool(64 * MIB)
    array = pool.empty((1024, 1024), torch.float32).fill_(7).numpy()

    pool.empty((1024, 1024), torch.float32).fill_(8)

    assert (array == 7).all()


def test_views_of_views_of_bytes_keep_their_memory() -> None:
    pool = RowPool(64 * MIB)
    array = pool.empty_bytes((4, MIB))
    array[:] = 7
    address, view = array.ctypes.data, np.ascontiguousarray(array)[2:].reshape(-1)[3:].data.cast("B")

    del array
    pool.empty_bytes((4, MIB))[:] = 8
    assert set(view[:100]) == {7}
    del view

    assert {pool.empty_bytes((4, MIB)).ctypes.data, pool.empty_bytes((4, MIB)).ctypes.data} >= {address}


def test_memory_is_used_again_in_any_size() -> None:
    pool = RowPool(64 * MIB)
    address = pool.empty_bytes((12, MIB)).ctypes.data

    pieces = [pool.empty_bytes((size, MIB)) for size in (5, 4, 3)]

    assert sorted(piece.ctypes.data for piece in pieces)[0] == address
    assert sum(piece.nbytes for piece in pieces) == 12 * MIB
    assert pool.free_bytes == 0, "all of it lies where the first array lay"
    del pieces
    assert pool.empty_bytes((12, MIB)).ctypes.data == address, "parts that lie next to each other are one again"


def test_few_bytes_are_an_array_of_their_own() -> None:
    assert RowPool(0).empty_bytes((3, 5)).shape == (3, 5)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.booleans()), max_size=20))
def test_nobodys_rows_ever_change(demands: list[tuple[int, int, bool]]) -> None:
    pool, held = RowPool(4 * MIB), []

    for number, (mebibytes, keep, is_bytes) in enumerate(demands):
        rows: Any = pool.empty_bytes((mebibytes, MIB)) if is_bytes else pool.empty((mebibytes, MIB), torch.uint8)
        rows[:] = number
        held.append((number, rows[:, -3:]))
        del rows
        held = held[len(held) - keep :] if keep else []
        assert all((view == value).all() for value, view in held)


def test_what_nobody_used_for_some_time_goes_back_to_the_system() -> None:
    now = 0.0
    pool = RowPool(10 * MIB, clock=lambda: now)
    held = [pool.empty((size, MIB), torch.uint8) for size in range(1, 9)]
    assert pool.free_bytes == 0
    del held

    now = IDLE_S
    pool.empty((2, MIB), torch.uint8)
    assert pool.free_bytes == 36 * MIB, "it was in use at the begin of that time"
    now = 2 * IDLE_S
    rows = pool.empty((2, MIB), torch.uint8)

    assert pool.free_bytes == 10 * MIB
    assert (pool.empty_bytes((20, MIB)) == 0).all(), "the system gives other pages, cleared, when it is used again"
    del rows


def test_what_is_free_for_a_moment_is_kept() -> None:
    now = 0.0
    pool = RowPool(0, clock=lambda: now)
    for second in range(4 * int(IDLE_S)):
        now = float(second)
        held = [pool.empty((1, MIB), torch.uint8) for _ in range(20)]
        held.clear()

    assert pool.free_bytes == 20 * MIB


def test_a_region_takes_more_than_it_has_usually() -> None:
    pool = RowPool(0)

    large, other = pool.empty_bytes((3, REGION_BYTES // 2)), pool.empty_bytes((1, MIN_BYTES))

    assert large.shape == (3, REGION_BYTES // 2)
    assert not np.shares_memory(large, other)
