"""Probes from labelled rows: `fit`, with figures of requests that were held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headgate.capture.probe import POOLINGS, Pooling, Probe, ProbeError, ProbeKind, Scores
from headgate.capture.schema.errors import shown
from headgate.capture.schema.sites import Site
from headgate.steering.probes.examples import Captures, Examples, Labels, examples_of, positive_of
from headgate.steering.probes.judging import Evaluation, judge, threshold_at

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
        bias: Bias of a linear probe.
        name: Name of the class of high scores.
        threshold: As in `Probe`, like the rest.
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
        threshold: As in `Probe`, like the rest.
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


Method = Literal["mean_difference", "logistic"]

_MAX_ITERATIONS = 5000


def fit(
    captures: Captures | Any,
    labels: Labels | Sequence[Any],
    *,
    at: Site | str,
    method: Method = "mean_difference",
    pooling: Pooling = "last_prompt",
    positive: str | None = None,
    fpr: float = 0.01,
    held_out: float = 0.25,
    seed: int = 0,
    regularization: float = 1.0,
) -> Probe:
    """Make a linear probe that separates classes of rows, and measure it on requests that it was not fitted on.

    ::

        probe = fit("captures", {"req-1": True, "req-2": False, ...}, at="12.post_mlp", method="logistic")
        probe.threshold, probe.metadata["held_out_auroc"]

    Args:
        captures: A root of captures, requests of one, or an array ``[n, hidden]`` of rows.
        labels: A label by request id, by tag, or by ``tag/request_id``; of an array one for each row.
        at: The site.
        method: ``mean_difference``: the unit vector from the mean of the negative rows to that of the positive ones;
            the score is 0 halfway. ``logistic``: logistic regression on standardised rows, by scikit-learn
            (``pip install 'headgate[probes]'``); of more than two classes, too.
        pooling: The rows of a request that count; see `Probe.pooling`. An array's are taken as they are.
        positive: The label of high scores, against all others; needed where none of two labels says so by itself.
        fpr: The threshold lets this share of the negative rows fire: held out, or of all where nothing is.
        held_out: Share of the requests of each class that the probe is judged by; 0 for none.
        seed: Seed of the choice of these requests.
        regularization: Of ``logistic``: the strength of its L2 penalty, the inverse of scikit-learn's ``C``.

    Raises:
        ProbeError: If rows or labels are missing, or cannot be separated; the message says which.
        CaptureFileError: If captures cannot be read.
    """
    site = site_of(at)
    if pooling not in POOLINGS:
        raise ProbeError(f"expected one of {', '.join(POOLINGS)}; got {shown(pooling)}", "pooling")
    if method not in ("mean_difference", "logistic"):
        raise ProbeError(f"unknown method {shown(method)}; expected 'mean_difference' or 'logistic'")
    if not 0 <= held_out < 1:
        raise ProbeError(f"expected a share held_out from 0 to below 1, got {held_out}")
    if not regularization > 0:
        raise ProbeError(f"expected a regularization above 0, got {regularization}")
    examples = examples_of(captures, labels, site, pooling)
    name = positive_of(examples.labels.tolist(), positive)
    train, test = split(examples, held_out, seed)
    made = (
        _mean_difference(train, name, site)
        if method == "mean_difference"
        else _logistic(train, name, site, regularization)
    )
    return _finished(made, train, test, pooling=pooling, fpr=fpr, about={"method": method, "seed": str(seed)})


def split(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples | None]:
    """Hold out that share of the requests of each class, at least one of each; None if the share is 0.

    Raises:
        ProbeError: If a class has one request alone.
    """
    if share == 0:
        return examples, None
    groups, first = np.unique(examples.groups, return_index=True)
    classes = examples.labels[first]
    generator = np.random.default_rng(seed)
    chosen: list[npt.NDArray[np.int64]] = []
    for label in np.unique(classes):
        members = generator.permutation(groups[classes == label])
        if len(members) < 2:
            raise ProbeError(
                f"one request alone is labelled {str(label)!r}, so none can be held out; label more, or hold out none: "
                "held_out=0, or --held-out 0"
            )
        chosen.append(members[: min(max(1, round(share * len(members))), len(members) - 1)])
    is_test = np.isin(examples.groups, np.concatenate(chosen))
    return examples.taken(~is_test), examples.taken(is_test)


def _mean_difference(examples: Examples, positive: str | None, site: Site) -> Probe:
    if positive is None:
        known = ", ".join(np.unique(examples.labels).tolist())
        raise ProbeError(f"mean_difference tells two classes apart; name the positive one, or use logistic: {known}")
    is_positive = examples.labels == positive
    plus, minus = (examples.rows[chosen].mean(axis=0, dtype=np.float64) for chosen in (is_positive, ~is_positive))
    length = np.linalg.norm(plus - minus)
    if length == 0:
        raise ProbeError(f"the classes have the same mean at {site.name}")
    weight = (plus - minus) / length
    return Probe(site=site, weight=weight[None], bias=np.array([-weight @ (plus + minus) / 2]), classes=(positive,))


def _logistic(examples: Examples, positive: str | None, site: Site, regularization: float) -> Probe:
    learn = sklearn()
    labels: Any = examples.labels if positive is None else examples.labels == positive
    model = learn.pipeline.make_pipeline(
        learn.preprocessing.StandardScaler(),
        learn.linear_model.LogisticRegression(C=1.0 / regularization, max_iter=_MAX_ITERATIONS),
    )
    model.fit(examples.rows.astype(np.float64), labels)
    if model[-1].n_iter_.max() >= _MAX_ITERATIONS:
        raise ProbeError(f"logistic regression did not converge in {_MAX_ITERATIONS} steps; raise regularization")
    return from_sklearn(model, at=site, classes=None if positive is None else (positive,))


def _finished(
    made: Probe, train: Examples, test: Examples | None, *, pooling: Pooling, fpr: float, about: dict[str, str]
) -> Probe:
    judged = train if test is None else test
    is_binary = len(made.classes) == 1
    scores = made.scores(judged.rows)
    threshold = threshold_at(scores[:, 0], judged.labels == made.classes[0], fpr) if is_binary else None
    parts: dict[str, Examples] = {"train": train} | ({} if test is None else {"held_out": test})
    for name, part in parts.items():
        about[f"{name}_requests"] = str(len(np.unique(part.groups)))
        about[f"{name}_rows"] = str(len(part.rows))
    if test is not None:
        about |= _figures(judge(made, test, fpr=fpr))
    if is_binary:
        about["threshold_fpr"] = repr(fpr)
        about["threshold_rows"] = "train" if test is None else "held_out"
    return Probe(
        site=made.site,
        weight=made.weight,
        bias=made.bias,
        classes=made.classes,
        threshold=threshold,
        pooling=pooling,
        model=train.model,
        metadata=about,
    )


def _figures(evaluation: Evaluation) -> dict[str, str]:
    figures = {
        "held_out_accuracy": evaluation.accuracy,
        "held_out_auroc": evaluation.auroc,
        "held_out_fpr": evaluation.chosen.fpr if evaluation.chosen else None,
        "held_out_tpr": evaluation.chosen.tpr if evaluation.chosen else None,
    }
    show: Callable[[float], str] = "{:.6g}".format
    return {name: show(value) for name, value in figures.items() if value is not None}
