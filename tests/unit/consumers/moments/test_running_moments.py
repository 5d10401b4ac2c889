"""Moments that come in pieces are those of all rows at once, also where sums of squares would lose every digit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.consumers.moments.entry import CovarianceKind, LowRankScatter, QuantileSketch, RunningMoments

Float64Array = npt.NDArray[np.float64]
WIDTH = 24


def rows_of(num_rows: int, seed: int = 0, *, offset: float = 0.0) -> Float64Array:
    """Rows with a spectrum that falls, and a mean far from zero."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(WIDTH, WIDTH)) * 0.7 ** np.arange(WIDTH)
    return np.asarray(rng.normal(size=(num_rows, WIDTH)) @ mixing.T + offset)


def gathered(pieces: list[Float64Array], kind: CovarianceKind, rank: int = 6) -> RunningMoments:
    moments = RunningMoments(WIDTH, kind, rank)
    for piece in pieces:
        moments.add(piece)
    return moments


@pytest.mark.parametrize("offset", [0.0, 1e8], ids=["centred", "far from zero"])
@given(cuts=st.lists(st.integers(0, 300), max_size=6), merged=st.booleans())
def test_pieces_make_the_moments_of_all_rows(offset: float, cuts: list[int], merged: bool) -> None:
    rows = rows_of(300, offset=offset)
    pieces = np.split(rows, sorted(cuts))

    if merged:
        moments = RunningMoments(WIDTH, "full", 1)
        for piece in pieces:
            moments.merge(gathered([piece], "full"))
    else:
        moments = gathered(pieces, "full")

    assert moments.num_rows == 300
    assert moments.scatter is not None
    # At 1e8 the rows themselves are rounded to 1.5e-8; a naive sum of squares would be off by more than 1.
    np.testing.assert_allclose(moments.mean, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.squares / 299, rows.var(axis=0, ddof=1), rtol=1e-7)
    np.testing.assert_allclose(moments.scatter / 299, np.cov(rows.T), rtol=1e-6, atol=1e-6)


def test_the_naive_way_would_fail_where_ours_does_not() -> None:
    rows = rows_of(300, offset=1e8)

    naive = (rows * rows).sum(axis=0) / 300 - rows.mean(axis=0) ** 2

    assert np.abs(naive - rows.var(axis=0)).max() > 0.1


@pytest.mark.parametrize("offset", [0.0, 50.0])
@pytest.mark.parametrize("num_parts", [1, 4])
def test_a_sketch_lies_below_the_scatter_by_at_most_its_stated_error(offset: float, num_parts: int) -> None:
    rows = rows_of(1000, offset=offset)
    sketch = RunningMoments(WIDTH, "sketch", 6)
    for part in np.array_split(rows, num_parts):
        sketch.merge(gathered(np.array_split(part, 9), "sketch"))

    assert sketch.low_rank is not None
    assert len(sketch.low_rank.rows) <= 6
    scatter = np.cov(rows.T) * 999
    missing = np.linalg.eigvalsh(scatter - sketch.low_rank.rows.T @ sketch.low_rank.rows)
    assert missing[0] >= -1e-9 * scatter.trace()
    assert missing[-1] <= sketch.low_rank.error * (1 + 1e-9)
    assert 0 < sketch.low_rank.error <= scatter.trace() / 7
    np.testing.assert_allclose(sketch.squares, scatter.diagonal(), rtol=1e-9)


def test_a_sketch_of_few_dimensions_is_exact() -> None:
    basis = np.random.default_rng(1).normal(size=(4, WIDTH))
    rows = np.random.default_rng(2).normal(size=(500, 4)) @ basis
    sketch = gathered(np.array_split(rows, 7), "sketch").low_rank

    assert sketch is not None
    assert sketch.error <= 1e-9 * (rows**2).sum()
    np.testing.assert_allclose(sketch.rows.T @ sketch.rows, np.cov(rows.T) * 499, atol=1e-8)


def test_sketches_of_different_kinds_are_not_merged() -> None:
    with pytest.raises(ValueError, match="ranks 3 and 4"):
        LowRankScatter(WIDTH, 3).merge(LowRankScatter(WIDTH, 4))
    with pytest.raises(ValueError, match=r"0\.01 and 0\.02"):
        QuantileSketch(0.01).merge(QuantileSketch(0.02))


@given(
    values=st.lists(st.floats(0, 1e30).filter(lambda value: value == 0 or value > 1e-30), min_size=1, max_size=60),
    share=st.floats(0, 1),
    cut=st.integers(0, 60),
)
def test_quantiles_are_within_their_error_and_merging_changes_nothing(
    values: list[float], share: float, cut: int
) -> None:
    array = np.array(values)
    whole, first, second = (QuantileSketch(0.01) for _ in range(3))
    whole.add(array)
    first.add(array[:cut])
    second.add(array[cut:])
    first.merge(second)

    expected = np.quantile(array, share, method="lower")
    found = first.quantile(share)
    assert found == whole.quantile(share)
    assert first.counts == whole.counts
    assert found == pytest.approx(expected, rel=0.01 * (1 + 1e-9), abs=0)
    assert first.mean == pytest.approx(array.mean())
    assert (first.quantile(0.0), first.quantile(1.0)) == (array.min(), array.max())


def test_without_numbers_there_is_no_quantile() -> None:
    sketch = QuantileSketch(0.01)

    assert (sketch.quantile(0.5), sketch.mean, sketch.num_values) == (None, None, 0)
