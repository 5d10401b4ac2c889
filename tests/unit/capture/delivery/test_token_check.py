"""Rows are checked against the tokens that their request really has."""

from __future__ import annotations

import numpy as np

from headgate.capture.delivery.completeness import TokenCheck
from tests.fakes.pipeline import final_state


def note(check: TokenCheck, positions: list[int], token_ids: list[int]) -> None:
    check.note(np.array(positions, dtype=np.int64), np.array(token_ids, dtype=np.int32))


def test_rows_of_the_requests_own_tokens_are_in_order() -> None:
    check = TokenCheck(num_prompt=2)

    note(check, [0, 1], [100, 101])
    note(check, [2], [102])

    assert check.mismatch(final_state(2, num_tokens=4)) is None


def test_a_row_of_another_token_is_named_with_both() -> None:
    check = TokenCheck(num_prompt=2)

    note(check, [0, 1, 200], [100, 7, 300])
    text = check.mismatch(final_state(2, num_tokens=500))

    assert text is not None
    assert "1 captured rows were not computed" in text
    assert "(position 1: token 7, expected 101)" in text


def test_positions_that_were_not_captured_and_rows_computed_in_vain_prove_nothing() -> None:
    check = TokenCheck(num_prompt=4)

    note(check, [3, 4, 5], [103, 999, 999])

    assert check.mismatch(final_state(4)) is None
    assert check.mismatch(final_state(4, num_tokens=4)) is None
