"""Host memory is used again, but never while somebody can still read it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.delivery.buffer_pool import MIN_BYTES, RowPool
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


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), max_size=20))
def test_nobodys_rows_ever_change(demands: list[tuple[int, int]]) -> None:
    pool, held = RowPool(4 * MIB), []

    for number, (mebibytes, keep) in enumerate(demands):
        rows = pool.empty((mebibytes, MIB // 4), torch.float32).fill_(number)
        held.append((number, rows[:, -3:]))
        del rows
        held = held[len(held) - keep :] if keep else []
        assert all((view == value).all() for value, view in held)


def test_memory_that_nobody_uses_is_limited() -> None:
    pool = RowPool(10 * MIB)
    held = [pool.empty((size, MIB), torch.uint8) for size in range(1, 9)]
    assert pool.free_bytes == 0
    del held
    assert pool.free_bytes > 30 * MIB

    held = [pool.empty((20, MIB), torch.uint8)]

    assert pool.free_bytes <= 10 * MIB
    del held
