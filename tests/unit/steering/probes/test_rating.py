"""ROC curves and thresholds, against scikit-learn and against counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.probe import ProbeError
from headgate.steering.probes.judging import roc, threshold_at

metrics = pytest.importorskip("sklearn.metrics", exc_type=ImportError)


@st.composite
def scored(draw: st.DrawFn) -> tuple[Any, Any]:
    """Scores, many of them equal, of rows of both classes."""
    flags = draw(st.lists(st.booleans(), min_size=2, max_size=60).filter(lambda found: len(set(found)) == 2))
    values = st.integers(-3, 3).map(float) | st.floats(-1e6, 1e6)
    return np.array(draw(st.lists(values, min_size=len(flags), max_size=len(flags)))), np.array(flags)


@given(scored())
def test_the_area_is_that_of_scikit_learn(given_rows: tuple[Any, Any]) -> None:
    scores, flags = given_rows

    assert roc(scores, flags).area == pytest.approx(metrics.roc_auc_score(flags, scores), abs=1e-12)


@given(scored())
def test_the_curve_is_that_of_scikit_learn(given_rows: tuple[Any, Any]) -> None:
    scores, flags = given_rows
    false, true, _ = metrics.roc_curve(flags, scores, drop_intermediate=False)

    found = roc(scores, flags)

    np.testing.assert_allclose(found.false_positive, false, atol=1e-12)
    np.testing.assert_allclose(found.true_positive, true, atol=1e-12)


@given(scored())
def test_each_point_of_the_curve_counts_the_rows_above_its_threshold(given_rows: tuple[Any, Any]) -> None:
    scores, flags = given_rows
    found = roc(scores, flags)

    for threshold, false, true in zip(*found, strict=True):
        assert false == pytest.approx((scores[~flags] > threshold).mean())
        assert true == pytest.approx((scores[flags] > threshold).mean())


@given(scored(), st.floats(0, 1, exclude_max=True))
def test_a_threshold_lets_no_more_than_its_share_fire_and_no_lower_one_does(
    given_rows: tuple[Any, Any], share: float
) -> None:
    scores, flags = given_rows

    threshold = threshold_at(scores, flags, share)

    negative = scores[~flags]
    assert threshold in negative
    assert (negative > threshold).sum() <= share * len(negative) + 1e-6
    lower = negative[negative < threshold]
    assert all((negative > other).sum() > share * len(negative) - 1e-6 for other in lower)


def test_a_share_that_binary_cannot_hold_counts_as_it_is_written() -> None:
    scores = np.arange(101.0)
    flags = scores == 100

    assert [(scores[~flags] > threshold_at(scores, flags, share)).sum() for share in (0.29, 0.57, 0.58, 0.07)] == [
        *(29, 57, 58, 7)
    ]


@pytest.mark.parametrize(
    ("scores", "flags", "message"),
    [
        ([1.0, 2.0], [True, True], "all 2 rows are positive"),
        ([1.0, 2.0], [False, False], "all 2 rows are negative"),
        ([1.0, np.nan], [True, False], "the score of row 1 is not finite"),
        ([1.0], [True, False], "one score for each row"),
    ],
)
def test_rows_that_cannot_be_rated_are_refused(scores: Any, flags: Any, message: str) -> None:
    for rate in (roc, lambda *rows: threshold_at(*rows, 0.1)):
        with pytest.raises(ProbeError, match=message):
            rate(scores, flags)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ProbeError, match="false-positive rate from 0 to below 1"):
        threshold_at([1.0, 2.0], [True, False], share)
