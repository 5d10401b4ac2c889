"""Changes that travel together: those of one column and different requests, in the order in which they were decided."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headgate.steering.gates.step_table import CoefficientChange, by_column

decided = st.lists(
    st.builds(
        CoefficientChange,
        st.sampled_from("abcd"),
        st.sampled_from([3, 7, 9]),
        st.integers(0, 40),
        st.sampled_from([0.0, 0.5, -1.0]),
    ),
    max_size=24,
)


@given(changes=decided)
def test_changes_of_a_request_and_column_stay_in_their_order(changes: list[CoefficientChange]) -> None:
    pieces = by_column(changes)

    found = [change for piece in pieces for change in piece.each()]
    for key in {change[:2] for change in changes}:
        assert [each for each in found if each[:2] == key] == [each for each in changes if each[:2] == key]
    assert len(found) == len(changes)
    for piece in pieces:
        assert len(set(piece.req_ids)) == len(piece.req_ids) == len(piece.whose)
        assert (piece.firsts.dtype, piece.values.dtype) == (np.int64, np.float32)


def test_no_more_pieces_are_made_than_it_takes() -> None:
    alternating = [CoefficientChange(name, column, 1, 0.5) for name in "abcd" for column in (3, 7)]

    assert len(by_column(alternating)) == 2
    assert len(by_column([*alternating, *alternating[:1]])) == 3
    assert by_column([]) == ()


def test_pieces_travel_to_another_process() -> None:
    pieces = by_column([CoefficientChange("a", 3, 5, 0.5), CoefficientChange("b", 3, 6, 1.0)])

    (found,) = pickle.loads(pickle.dumps(pieces))

    assert list(found.each()) == list(pieces[0].each())
    assert [change.req_id for change in found.where(np.array([False, True])).each()] == ["b"]
