"""What programs change stays within the range of numbers, whatever their factors are."""

from __future__ import annotations

import pytest
import torch

from headgate.steering.programs.codes import MAX_CHANGE, MAX_CHANGE_FLOAT16, Code, Edit, FeatureActivation
from tests.kernels.test_run_programs import Entry, Example


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1e38, -1e38, 3e30])
def test_changes_that_leave_the_range_of_numbers_are_cut_and_none_stays_that_is_no_number(scale, dtype):
    """Rows that are not finite would spoil the KV cache for whoever has its blocks next."""
    away = Entry(Code.LINEAR, 1, 1, (1.0, 1.0, scale))
    feature = Entry(Code.FEATURE | FeatureActivation.RELU | Edit.TIMES, 1, 2, (1.0, 1.0, 1e3, 0.0, scale))
    long = [[away], [away, away, Entry(Code.NORM_ADD, 0, 2, (0.0, 1.0, scale))], [feature], [away, feature]]
    example = Example([*long, [Entry(Code.ADD, 0, 2, (0.0, 2.0))]], rows=[1, 2, 3, 4, 5, 0], dtype=dtype)
    largest = MAX_CHANGE_FLOAT16 if dtype == torch.float16 else MAX_CHANGE

    found, expected = example.run()[:5], example.expected(torch.float32)[:5]

    assert torch.isfinite(found).all()
    assert (found.abs() <= largest).all()
    assert (expected.abs() <= largest).all()
    assert (found[:4].abs().amax(-1) == largest).any()
    assert torch.isfinite((example.value[:5].float() + found).to(dtype)).all()
    torch.testing.assert_close(found[4], expected[4], rtol=1e-5, atol=1e-5)  # its neighbour's is its own
