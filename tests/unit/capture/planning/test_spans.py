"""Runs of numbers and the spans of a batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.planning.step_plan import MAX_SHARED, count_up, prolonged


@given(runs=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 40)), min_size=1, max_size=20))
def test_runs_of_numbers_follow_each_other(runs: list[tuple[int, int]]) -> None:
    firsts, counts = np.array(runs).T

    found = prolonged(firsts, np.cumsum(counts) - counts, counts)

    assert found.dtype == np.int64
    assert found.tolist() == [number for first, count in runs for number in range(first, first + count)]


starts = st.integers(0, 3000) | st.integers(MAX_SHARED - 3000, MAX_SHARED) | st.integers(1 << 40, 1 << 50)


@given(bounds=st.lists(st.tuples(starts, st.integers(0, 3000)), max_size=8))
def test_numbers_count_up_and_cannot_be_changed(bounds: list[tuple[int, int]]) -> None:
    for start, size in bounds:
        found = count_up(start, start + size)

        assert found.dtype == np.int64
        assert found.tolist() == list(range(start, start + size))
        if size:
            with pytest.raises(ValueError, match="read-only"):
                found[0] = 1
