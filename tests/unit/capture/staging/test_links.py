"""Where runs of rows begin, by which they are copied."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.staging.device_copy import run_starts


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
