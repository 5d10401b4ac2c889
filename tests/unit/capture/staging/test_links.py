"""Runs of rows, and rectangles of runs, by which they are copied."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.staging.device_copy import PitchedCopier, Rectangle, rectangles_of, run_starts


@pytest.mark.parametrize(
    ("index", "starts"),
    [
        ([7], [0]),
        ([7, 8, 9], [0]),
        ([7, 9, 10, 2], [0, 1, 3]),
        ([3, 3, 4], [0, 1]),
        ([5, 4, 3], [0, 1, 2]),
    ],
)
def test_a_run_ends_where_the_next_number_is_not_one_more(index, starts):
    assert run_starts(np.array(index, dtype=np.int64)).tolist() == starts


@given(st.lists(st.integers(0, 20), min_size=1))
def test_runs_put_together_are_the_index(index):
    starts = run_starts(np.array(index, dtype=np.int64)).tolist()

    runs = [index[start:stop] for start, stop in zip(starts, [*starts[1:], len(index)], strict=True)]

    assert [number for run in runs for number in run] == index
    assert all(run == list(range(run[0], run[0] + len(run))) for run in runs)
    assert all(after[0] != before[-1] + 1 for before, after in pairwise(runs))


def found_in(index, max_distance, most=None):
    array = np.array(index, dtype=np.int64)
    return rectangles_of(array, run_starts(array), max_distance=max_distance, most=most)


def test_the_same_slots_of_all_sites_are_one_rectangle():
    slots = [site * 100 + slot for site in range(34) for slot in range(7, 20)]

    assert found_in(slots, 1000) == [Rectangle(0, 7, 13, 34, 100)]
    assert found_in(slots, 99) == [Rectangle(13 * site, 100 * site + 7, 13, 1, 0) for site in range(34)]


def test_more_rectangles_than_are_wanted_are_not_looked_for():
    assert found_in([1, 5, 6, 20, 3], 100, most=3) is None
    assert found_in([1, 5, 6, 20, 3], 100, most=4) is not None


numbers = st.lists(st.integers(0, 20), min_size=1, max_size=40)
grids = st.builds(
    lambda start, height, width, step: [
        start + step * row + column for row in range(height) for column in range(width)
    ],
    st.integers(0, 20),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 12),
)


@given(st.lists(numbers | grids, min_size=1, max_size=4), st.integers(0, 12))
def test_rectangles_bring_each_row_to_its_place(parts, max_distance):
    index = [number for part in parts for number in part]
    target = [None] * len(index)

    for each in found_in(index, max_distance):
        assert each.num_runs == 1 or each.num_rows <= each.distance <= max_distance
        for run in range(each.num_runs):
            for row in range(each.num_rows):
                place = each.start + run * each.num_rows + row
                assert target[place] is None
                target[place] = each.row + run * each.distance + row

    assert target == index


class Driver:
    """The CUDA driver's library, as far as it is called, over the memory of this process."""

    def __init__(self, error=0):
        self.cuMemcpy2DAsync_v2 = self
        self._error = error

    def __call__(self, about, stream):
        copy = about._obj
        assert (copy.srcMemoryType, copy.dstMemoryType, stream) == (2, 1, 77)  # from the device to the host
        for run in range(0 if self._error else copy.Height):
            source, target = copy.srcDevice + run * copy.srcPitch, copy.dstHost + run * copy.dstPitch
            ctypes.memmove(target, source, copy.WidthInBytes)
        return self._error


def copier(monkeypatch, driver, source):
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: driver)
    return PitchedCopier(source, SimpleNamespace(cuda_stream=77))


@given(st.integers(0, 5), st.integers(0, 20), st.integers(1, 6), st.integers(1, 5), st.integers(0, 4))
def test_a_rectangle_is_copied_by_one_call(start, row, num_rows, num_runs, gap):
    distance = num_rows + gap
    source = torch.arange(80 * 3, dtype=torch.bfloat16).view(80, 3)
    target = torch.full((40, 3), -1, dtype=torch.bfloat16)
    expected = target.clone()
    rows = [row + run * distance + each for run in range(num_runs) for each in range(num_rows)]
    expected[start : start + len(rows)] = source[rows]

    with pytest.MonkeyPatch.context() as monkeypatch:
        copier(monkeypatch, Driver(), source).start(Rectangle(start, row, num_rows, num_runs, distance), target)

    assert torch.equal(target, expected)


def test_what_the_driver_refuses_is_an_error(monkeypatch):
    rows = torch.zeros(8, 3)

    with pytest.raises(RuntimeError, match="error 1"):
        copier(monkeypatch, Driver(error=1), rows).start(Rectangle(0, 0, 1, 2, 4), rows)
    with pytest.raises(UnsupportedError, match="cuMemcpy2DAsync_v2"):
        copier(monkeypatch, SimpleNamespace(), rows)
