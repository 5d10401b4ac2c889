"""Vectors are stored alike alone and together, and what rounding takes from them is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.steering.programs.lowering import StoredVector, StoredVectors, store
from headgate.steering.vectors.dtypes import StoredType, widen
from headgate.steering.vectors.sums import round_to

HIDDEN = 24
DTYPES: tuple[StoredType, ...] = ("bfloat16", "float16", "float32")


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """A row of float32 of any size: exact in bfloat16, or not; or with values that are as small as there are."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    row = (rng.standard_normal(HIDDEN) * 2.0 ** draw(st.integers(-100, 60))).astype(np.float32)
    if draw(st.booleans()):
        row = widen(round_to(row, "bfloat16"), "bfloat16")
    if draw(st.booleans()):
        row[0] = draw(st.sampled_from([0.0, -0.0, 1e-45, -1e-38, 2.0**-120]))
    return np.zeros_like(row) if draw(st.integers(0, 9)) == 0 else row


def told(found: StoredVector) -> tuple[object, ...]:
    rest = found.rest()
    about = None if rest is None else (rest.stored.tobytes(), rest.factor)
    return found.stored.tobytes(), found.factor, found.peak, found.norm, found.unit_peak if found.norm else None, about


@given(dtype=st.sampled_from(DTYPES), vectors=st.lists(rows(), min_size=1, max_size=4))
def test_vectors_are_stored_alike_alone_and_together(dtype: StoredType, vectors: list[np.ndarray]) -> None:
    together = store(vectors, dtype)

    assert [told(one) for one in together] == [told(store([vector], dtype)[0]) for vector in vectors]


@given(dtype=st.sampled_from(DTYPES), vector=rows())
def test_a_row_and_its_rest_are_the_vector_up_to_rounding(dtype: StoredType, vector: np.ndarray) -> None:
    (found,) = store([vector], dtype)
    rest = found.rest()
    values, largest = vector.astype(np.float64), float(np.abs(vector).max())

    whole = found.factor * found.row.astype(np.float64)
    assert found.is_zero == (found.norm == 0) == (not vector.any())
    assert (rest is None) == np.array_equal(whole, values)
    if rest is not None:
        left = np.abs(values - whole)
        assert np.abs(left - rest.factor * np.abs(rest.row.astype(np.float64))).max() <= left.max() / 128
    assert largest == 0 or 0.5 <= float(np.abs(found.row).max()) <= 1
    assert not found.is_exact or rest is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_not_stored(value: float, dtype: StoredType) -> None:
    with pytest.raises(AssertionError, match="not finite"):
        store([np.ones(HIDDEN, np.float32), np.full(HIDDEN, value, np.float32)], dtype)


def test_a_vector_that_was_not_given_with_others_is_stored_once_all_the_same() -> None:
    given_before, later = np.ones(HIDDEN, np.float32), np.full(HIDDEN, 3, np.float32)
    vectors = StoredVectors([given_before, given_before], "bfloat16")

    found = vectors.of(later)

    assert vectors.of(later) is found
    assert found.factor * found.row[0] == 3
    assert vectors.of(given_before).row[0] == 0.5
