"""Directions out of contrast rows: right where the answer is known, refused where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.vectors.directions import mean_difference, pca
from headgate.steering.vectors.phase_vectors import PhaseVectors

SITE, OTHER = Site(1, HookPoint.POST_MLP), Site(2, HookPoint.PRE_ATTN)
HIDDEN = 12
AXIS = np.eye(HIDDEN)[3]


def noise(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN))


def row(vectors: PhaseVectors, site: Site = SITE) -> Any:
    return vectors.float32()[vectors.sites.index(site)]


def test_the_mean_difference_moves_one_mean_onto_the_other() -> None:
    positive, negative = noise(7), noise(5, seed=1)

    found = mean_difference({SITE: positive, OTHER: negative}, {SITE: negative, OTHER: positive})

    expected = np.array([sum(p[i] for p in positive) / 7 - sum(n[i] for n in negative) / 5 for i in range(HIDDEN)])
    np.testing.assert_allclose(row(found), expected, rtol=1e-6)
    np.testing.assert_array_equal(row(found, OTHER), -row(found))
    unit = row(mean_difference({SITE: positive}, {SITE: negative}, normalize=True))
    np.testing.assert_allclose(unit, expected / np.linalg.norm(expected), rtol=1e-6)


@pytest.mark.parametrize("count", [9, 40], ids=["fewer rows than values", "more rows than values"])
@pytest.mark.parametrize("method", ["center", "diff"])
def test_the_principal_component_is_that_of_a_plain_singular_value_decomposition(count: int, method: Any) -> None:
    positive, negative = noise(count) + AXIS, noise(count, seed=1)
    differences = positive - negative

    found = row(pca({SITE: positive}, {SITE: negative}, method=method))

    halves = np.concatenate([differences, -differences]) / 2 if method == "center" else differences
    expected = np.linalg.svd(halves - halves.mean(axis=0))[2][0]
    assert abs(found @ expected) == pytest.approx(1, abs=1e-6)
    votes = int((differences @ found > 0).sum()) - int((differences @ found < 0).sum())
    assert votes > 0 or (votes == 0 and differences.mean(axis=0) @ found > 0)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_component_points_from_the_negative_rows_to_the_positive_ones(sign: int) -> None:
    negative = noise(30)
    positive = negative + sign * (3 * AXIS + 0.01 * noise(30, seed=1))

    found = pca({SITE: positive}, {SITE: negative})
    long = pca({SITE: positive}, {SITE: negative}, normalize=False)

    np.testing.assert_allclose(row(found), sign * AXIS, atol=0.01)
    np.testing.assert_allclose(row(long), sign * 3 * AXIS, atol=0.03)


def test_tensors_in_bfloat16_are_taken() -> None:
    positive, negative = torch.tensor(noise(4)).bfloat16(), torch.tensor(noise(4, seed=1)).bfloat16()

    found = mean_difference({SITE: positive}, {SITE: negative})

    expected = mean_difference({SITE: positive.double().numpy()}, {SITE: negative.double().numpy()})
    assert found == expected


@pytest.mark.parametrize("make", [mean_difference, pca])
@pytest.mark.parametrize(
    ("positive", "negative", "message"),
    [
        ({}, {}, "at least one"),
        ({SITE: noise(3)}, {OTHER: noise(3)}, "only one of them has"),
        ({SITE: noise(3)}, {SITE: noise(3)[:, :5]}, "rows of 12 and 5 values"),
        ({SITE: noise(3)[0]}, {SITE: noise(3)}, r"expected \[n, hidden\]"),
        ({SITE: noise(3)}, {SITE: noise(3)[:0]}, "negative rows at 1.post_mlp: expected"),
        ({SITE: noise(3) * np.nan}, {SITE: noise(3)}, "row 0 is not finite"),
        ({SITE: noise(3)}, {SITE: noise(3)}, "1.post_mlp"),
    ],
    ids=["nothing", "other sites", "widths", "one row", "no rows", "nan", "equal sets"],
)
def test_rows_without_an_answer_are_refused(make: Any, positive: Any, negative: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(positive, negative)


def test_pca_needs_pairs_that_differ_in_more_than_one_way_for_diff() -> None:
    with pytest.raises(ValueError, match="3 positive and 4 negative rows are not pairs"):
        pca({SITE: noise(3)}, {SITE: noise(4)})
    with pytest.raises(ValueError, match="differences are all alike"):
        pca({SITE: noise(3) + AXIS}, {SITE: noise(3)}, method="diff")
    with pytest.raises(ValueError, match="unknown method 'umap'"):
        pca({SITE: noise(3)}, {SITE: noise(3)}, method="umap")  # type: ignore[arg-type]
