"""What a batch view and a final state promise to those who compute with them."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.capture.schema.batch import BatchView, FinalState


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_the_tokens_of_a_batch_are_those_scheduled() -> None:
    view = BatchView(("a", "b"), starts=ints(0, 3), num_scheduled=ints(3, 1), num_computed=ints(0, 7))

    assert view.num_tokens == 4


def test_a_start_too_many_is_refused() -> None:
    """vLLM's ``query_start_loc`` has a closing entry; over a single request it would broadcast."""
    with pytest.raises(AssertionError, match=r"starts, .*: int64 \(2,\), .*, expected int64 \(1,\) each"):
        BatchView(("a",), starts=ints(0, 3), num_scheduled=ints(3), num_computed=ints(0))


def test_arrays_of_another_dtype_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"num_computed: .*, int32 \(1,\), expected int64"):
        BatchView(("a",), starts=ints(0), num_scheduled=ints(3), num_computed=np.zeros(1, dtype=np.int32))


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "num_rows"),
    [
        pytest.param(5, 3, 7, id="the-last-sampled-token-has-no-row"),
        pytest.param(5, 1, 5, id="one-token-is-sampled-from-the-prompt"),
        pytest.param(5, 0, 5, id="aborted-before-a-token-was-sampled"),
        pytest.param(1, 1, 1, id="one-token-prompt"),
    ],
)
def test_a_whole_request_has_a_row_for_each_token_but_the_last_sampled(
    num_prompt: int, num_output: int, num_rows: int
) -> None:
    final = FinalState(
        num_prompt_tokens=num_prompt, token_ids=np.zeros(num_prompt + num_output, dtype=np.int64), status="stop"
    )

    assert final.num_rows == num_rows
