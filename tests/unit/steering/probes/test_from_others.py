"""Probes from estimators of scikit-learn: their scores are the estimators' own; and from directions."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.schema.sites import Site
from headgate.steering.probes import ProbeError, ProbeKind, from_direction, from_sklearn

linear_model = pytest.importorskip("sklearn.linear_model", exc_type=ImportError)

SITE = "3.post_mlp"


def made(name: str) -> Any:
    from sklearn.svm import LinearSVC

    known: dict[str, Callable[[], Any]] = {
        "logistic": lambda: linear_model.LogisticRegression(),
        "logistic without intercept": lambda: linear_model.LogisticRegression(fit_intercept=False),
        "svc": lambda: LinearSVC(),
        "crammer-singer": lambda: LinearSVC(multi_class="crammer_singer"),
        "ridge": lambda: linear_model.RidgeClassifier(),
        "ridge of several": lambda: linear_model.RidgeClassifierCV(),
        "sgd": lambda: linear_model.SGDClassifier(),
    }
    return known[name]()


NAMES = ("logistic", "logistic without intercept", "svc", "crammer-singer", "ridge", "ridge of several", "sgd")


def rows(num_classes: int, seed: int = 0) -> tuple[Any, Any]:
    """Rows of scales far apart, and their classes."""
    generator = np.random.default_rng(seed)
    classes = np.arange(60) % num_classes
    centres = generator.normal(size=(num_classes, 6))
    return (generator.normal(size=(60, 6)) + centres[classes]) * [1, 10, 0.1, 1, 100, 1] + [
        0,
        5,
        0,
        -3,
        200,
        1,
    ], classes


def close(probe: Any, estimator: Any, x: Any) -> None:
    """Scores are the decision function's, as far as float32 weights allow."""
    expected = np.asarray(estimator.decision_function(x)).reshape(len(x), -1)
    scale = np.abs(x) @ np.abs(probe.weight.T.astype(float)) + np.abs(probe.bias)
    assert (np.abs(probe.scores(x) - expected) <= 2.0**-22 * scale).all()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    num_classes=st.sampled_from([2, 3]),
    scalers=st.lists(
        st.sampled_from([(True, True), (True, False), (False, True), (False, False), "passthrough"]), max_size=3
    ),
    seed=st.integers(0, 5),
)
def test_scores_are_the_decision_function(name: str, num_classes: int, scalers: list[Any], seed: int) -> None:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = rows(num_classes, seed)
    steps = [one if one == "passthrough" else StandardScaler(with_mean=one[0], with_std=one[1]) for one in scalers]
    estimator = make_pipeline(*steps, made(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # estimators that did not converge are as good here
        estimator.fit(x, np.array(["calm", "angry", "sad"])[y])

    probe = from_sklearn(estimator, at=SITE)

    close(probe, estimator, x)
    names = estimator.classes_.tolist()
    assert probe.classes == tuple(names[1:] if num_classes == 2 else names)


def test_an_estimator_alone_a_sparse_one_and_names_of_ones_own() -> None:
    x, y = rows(2)
    estimator = linear_model.LogisticRegression(max_iter=5000).fit(x, y).sparsify()

    probe = from_sklearn(estimator, at=SITE, classes=("angry",), threshold=0.5, pooling="prompt_mean", model="m")

    close(probe, estimator, x)
    assert (probe.classes, probe.threshold, probe.pooling, probe.model) == (("angry",), 0.5, "prompt_mean", "m")
    assert from_sklearn(estimator, at=Site.parse(SITE)).classes == ("1",)


def test_what_is_no_linear_classifier_is_refused() -> None:
    from sklearn.naive_bayes import GaussianNB
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler

    x, y = rows(2)
    ridge = linear_model.RidgeClassifier()
    with pytest.raises(ProbeError, match=r"expected one of LogisticRegression, .* got GaussianNB"):
        from_sklearn(GaussianNB().fit(x, y), at=SITE)
    with pytest.raises(ProbeError, match="is not fitted"):
        from_sklearn(ridge, at=SITE)
    with pytest.raises(ProbeError, match=r"must be StandardScaler; got MinMaxScaler"):
        from_sklearn(make_pipeline(MinMaxScaler(), ridge).fit(x, y), at=SITE)
    with pytest.raises(ProbeError, match="one-of-many labels only"):
        from_sklearn(ridge.fit(x, np.stack([y, 1 - y], axis=1)), at=SITE)
    with pytest.raises(ProbeError, match="not a site: 'x'"):
        from_sklearn(linear_model.RidgeClassifier().fit(x, y), at="x")


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)

    with pytest.raises(ProbeError, match=r"pip install 'headgate\[probes\]'"):
        from_sklearn(object(), at=SITE)


def test_a_direction_is_a_probe() -> None:
    vector = torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16)

    linear = from_direction(vector, at=SITE, bias=0.25, threshold=1.0, name="joy")
    cosine = from_direction([1.0, -2.0, 0.5], at=SITE, kind="cosine")

    assert linear.scores([[1.0, 1.0, 2.0]]).tolist() == [[0.25]]
    assert (linear.classes, linear.threshold, linear.site.name) == (("joy",), 1.0, SITE)
    assert cosine.kind is ProbeKind.COSINE
    assert cosine.scores(np.array([[2.0, -4.0, 1.0]])).item() == pytest.approx(1.0)
    for wrong in ([], [[1.0, 2.0]], ["x"], [0.0]):
        with pytest.raises(ProbeError, match="weight: "):
            from_direction(wrong, at=SITE)
    with pytest.raises(ProbeError, match="kind: expected one of linear, cosine, mlp"):
        from_direction([1.0], at=SITE, kind="tree")
