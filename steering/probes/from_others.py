"""Probes from a direction, and from estimators of scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from headgate.capture.probes.probe import Pooling, Probe, ProbeError, ProbeKind, Scores
from headgate.capture.schema.errors import shown
from headgate.capture.schema.sites import Site

_ESTIMATORS = {
    "linear_model": ("LogisticRegression", "RidgeClassifier", "RidgeClassifierCV", "SGDClassifier"),
    "svm": ("LinearSVC",),
}


def from_direction(
    vector: Any,
    *,
    at: Site | str,
    kind: ProbeKind | str = ProbeKind.LINEAR,
    bias: float = 0.0,
    name: str = "positive",
    threshold: float | None = None,
    pooling: Pooling = "token",
    model: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Probe:
    """Return the probe that reads a direction.

    Args:
        vector: ``[hidden]``: numbers, an array or a tensor.
        at: The site.
        kind: ``linear`` or ``cosine``.
        bias: Of a linear one.
        name: Of the class of high scores.
        threshold: As of `Probe`, like the rest.
        pooling: See `Probe`.
        model: See `Probe`.
        metadata: See `Probe`.

    Raises:
        ProbeError: If it is no direction.
    """
    if hasattr(vector, "detach"):  # a torch tensor, perhaps in bfloat16, which numpy does not know
        vector = vector.detach().cpu().float().numpy()
    return Probe(
        site=site_of(at),
        kind=ProbeKind(kind) if kind in tuple(ProbeKind) else kind,  # type: ignore[arg-type]
        weight=[vector],  # type: ignore[arg-type]
        bias=[bias],  # type: ignore[arg-type]
        classes=(name,),
        threshold=threshold,
        pooling=pooling,
        model=model,
        metadata=metadata or {},
    )


def from_sklearn(
    estimator: Any,
    *,
    at: Site | str,
    classes: Sequence[str] | None = None,
    threshold: float | None = None,
    pooling: Pooling = "token",
    model: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Probe:
    """Return the probe whose scores are an estimator's ``decision_function``, weights rounded to float32.

    Args:
        estimator: A fitted LogisticRegression, LinearSVC, RidgeClassifier or SGDClassifier, or a pipeline of
            StandardScalers that ends in one; the scalers are folded into weights and bias.
        at: The site.
        classes: Names; those of the estimator if None. Of two classes, the second alone.
        threshold: As of `Probe`, like the rest.
        pooling: See `Probe`.
        model: See `Probe`.
        metadata: See `Probe`.

    Raises:
        ProbeError: If it is another estimator, or not fitted.
    """
    steps: list[Any] = [step for _, step in estimator.steps] if hasattr(estimator, "steps") else [estimator]
    scalers, last = steps[:-1], steps[-1]
    learn = sklearn()
    known = {name: getattr(getattr(learn, module), name) for module, names in _ESTIMATORS.items() for name in names}
    kinds: Any = tuple(known.values())
    if not isinstance(last, kinds):
        raise ProbeError(f"expected one of {', '.join(known)}, or a pipeline that ends in one; got {shown(last)}")
    if not hasattr(last, "coef_"):
        raise ProbeError(f"{shown(last)} is not fitted")
    weight, bias = _linear(last)
    for scaler in reversed(scalers):
        if scaler is None or (isinstance(scaler, str) and scaler == "passthrough"):
            continue
        if not isinstance(scaler, learn.preprocessing.StandardScaler):
            raise ProbeError(f"a pipeline's steps before the last must be StandardScaler; got {shown(scaler)}")
        weight, bias = _folded(scaler, weight, bias)
    names = [str(name) for name in np.asarray(last.classes_).ravel()]
    if len(weight) != (1 if len(names) == 2 else len(names)):
        raise ProbeError(f"{len(weight)} rows of weights for the classes {', '.join(names)}: one-of-many labels only")
    return Probe(
        site=site_of(at),
        weight=weight,  # type: ignore[arg-type]
        bias=bias,  # type: ignore[arg-type]
        classes=tuple(names[-len(weight) :] if classes is None else classes),
        threshold=threshold,
        pooling=pooling,
        model=model,
        metadata=metadata or {},
    )


def _linear(estimator: Any) -> tuple[Scores, Scores]:
    coefficients = estimator.coef_
    weight = np.atleast_2d(coefficients.toarray() if hasattr(coefficients, "toarray") else coefficients)
    bias = np.broadcast_to(np.asarray(estimator.intercept_, np.float64).ravel(), len(weight))
    return weight.astype(np.float64), bias


def _folded(scaler: Any, weight: Scores, bias: Scores) -> tuple[Scores, Scores]:
    """Return the weights for rows before they are scaled: of ``(x - mean) / scale``."""
    if scaler.scale_ is not None:
        weight = weight / scaler.scale_
    if scaler.with_mean:
        bias = bias - weight @ scaler.mean_
    return weight, bias


def site_of(at: Site | str) -> Site:
    """Return a site, by its name or as it is.

    Raises:
        ProbeError: If it is none.
    """
    try:
        return at if isinstance(at, Site) else Site.parse(at)
    except (ValueError, AttributeError) as error:
        raise ProbeError(f"not a site: {shown(at)}; expected LAYER.HOOK such as 12.post_mlp", "at") from error


def sklearn() -> Any:
    """Import the modules of scikit-learn that are used; slow, so only where it is needed.

    Raises:
        ProbeError: If it is not installed; the message names the extra.
    """
    names = ("linear_model", "pipeline", "preprocessing", "svm")
    try:
        return SimpleNamespace(**{name: import_module(f"sklearn.{name}") for name in names})
    except ImportError as error:
        raise ProbeError(f"scikit-learn is needed: pip install 'headgate[probes]' ({error})") from error
