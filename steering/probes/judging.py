"""How well a probe does on labelled rows: figures, and a picture of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headgate.capture.probes.probe import Probe, ProbeError, Scores
from headgate.steering.probes.examples import Captures, Examples, examples_of
from headgate.steering.probes.labels import Labels, positive_of
from headgate.steering.probes.rating import Flags, roc, threshold_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that fire at a threshold.

    Attributes:
        threshold: Rows with a higher score fire.
        fpr: Share of the negative rows that fire.
        tpr: Share of the positive rows that fire.
    """

    threshold: float
    fpr: float
    tpr: float


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """The ROC curve; see `headgate.steering.probes.rating.Roc`."""

    thresholds: list[float]
    fpr: list[float]
    tpr: list[float]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a probe on labelled rows.

    Attributes:
        site: The name of the site.
        pooling: The rows of each request that were scored.
        classes: Of the probe.
        num_requests: Requests.
        num_rows: Rows, of which `num_positive` are of a probe's one class.
        num_positive: None for several classes.
        accuracy: Share of the rows whose class is told rightly: by scores above 0, or by the largest score. None for a
            cosine probe, whose scores have no middle.
        auroc: Area under `roc`; None for several classes, like the rest.
        own: What the probe's own threshold does, if it has one.
        chosen: What the threshold does that was chosen here, at `chosen_fpr`.
        chosen_fpr: The share of negative rows that may fire.
        roc: The curve.
    """

    site: str
    pooling: str
    classes: list[str]
    num_requests: int
    num_rows: int
    num_positive: int | None
    accuracy: float | None
    auroc: float | None
    own: Rates | None
    chosen: Rates | None
    chosen_fpr: float
    roc: Curve | None


def evaluate(
    probe: Probe,
    captures: Captures | Any,
    labels: Labels | Sequence[Any],
    *,
    fpr: float = 0.01,
    positive: str | None = None,
) -> Evaluation:
    """Judge a probe on captured requests, or an array of rows; arguments as of `headgate.steering.probes.fit`.

    Args:
        probe: The probe.
        captures: Its rows are pooled as the probe says.
        labels: One of them is the probe's class, or `positive`; of a probe of several classes all are its own.
        fpr: Where a threshold is chosen.
        positive: The label of the probe's one class.

    Raises:
        ProbeError: As `fit`.
        CaptureFileError: If captures cannot be read.
    """
    return judge(probe, named_examples(probe, captures, labels, positive), fpr=fpr)


def named_examples(
    probe: Probe, captures: Captures | Any, labels: Labels | Sequence[Any], positive: str | None
) -> Examples:
    """Return the rows that `evaluate` judges a probe by; labels are the probe's."""
    return _named(probe, examples_of(captures, labels, probe.site, probe.pooling), positive)


def _named(probe: Probe, examples: Examples, positive: str | None) -> Examples:
    """Return the examples with the probe's name for its class."""
    known = sorted(set(examples.labels.tolist()))
    if len(probe.classes) > 1:
        if others := [label for label in known if label not in probe.classes]:
            raise ProbeError(f"the probe tells {', '.join(probe.classes)} apart; no label may be {', '.join(others)}")
        return examples
    (name,) = probe.classes
    wanted = positive_of(known, name if positive is None and name in known else positive)
    if wanted is None:
        raise ProbeError(f"which label is {name!r}? Name one: positive=, or --positive; labels: {', '.join(known)}")
    labels = np.where(examples.labels == wanted, name, f"not {name}")
    return Examples(rows=examples.rows, labels=labels, groups=examples.groups, model=examples.model)


def judge(probe: Probe, examples: Examples, *, fpr: float) -> Evaluation:
    """Return the figures of a probe on examples whose labels are names of its classes."""
    scores = probe.scores(examples.rows)
    is_binary = len(probe.classes) == 1
    flags = examples.labels == probe.classes[0]
    curve = roc(scores[:, 0], flags) if is_binary else None
    chosen = threshold_at(scores[:, 0], flags, fpr) if is_binary else None
    return Evaluation(
        site=probe.site.name,
        pooling=probe.pooling,
        classes=list(probe.classes),
        num_requests=len(np.unique(examples.groups)),
        num_rows=len(examples.rows),
        num_positive=int(flags.sum()) if is_binary else None,
        accuracy=_accuracy(probe, scores, examples),
        auroc=None if curve is None else curve.area,
        own=None if probe.threshold is None else _rates(scores[:, 0], flags, probe.threshold),
        chosen=None if chosen is None else _rates(scores[:, 0], flags, chosen),
        chosen_fpr=fpr,
        roc=None
        if curve is None
        else Curve(
            thresholds=curve.thresholds.tolist(), fpr=curve.false_positive.tolist(), tpr=curve.true_positive.tolist()
        ),
    )


def _accuracy(probe: Probe, scores: Scores, examples: Examples) -> float | None:
    if probe.kind == "cosine" and len(probe.classes) == 1:
        return None
    if len(probe.classes) == 1:
        return float(((scores[:, 0] > 0) == (examples.labels == probe.classes[0])).mean())
    return float((np.array(probe.classes)[scores.argmax(axis=1)] == examples.labels).mean())


def _rates(scores: Scores, flags: Flags, threshold: float) -> Rates:
    fires = scores > threshold
    return Rates(threshold=threshold, fpr=float(fires[~flags].mean()), tpr=float(fires[flags].mean()))


def plot(probe: Probe, examples: Examples, evaluation: Evaluation) -> Figure:
    """Return a matplotlib figure: the ROC curve with the chosen threshold, and the scores of both classes.

    Raises:
        ProbeError: If the probe has several classes, or matplotlib is not installed; the message names the extra.
    """
    if evaluation.roc is None or evaluation.chosen is None:
        raise ProbeError("a picture shows a probe of one class; this one has several")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ProbeError(f"matplotlib is needed: pip install 'headgate[plot]' ({error})") from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(evaluation.roc.fpr, evaluation.roc.tpr)
    left.plot([0, 1], [0, 1], color="grey", linestyle=":")
    left.plot(evaluation.chosen.fpr, evaluation.chosen.tpr, "o", label=f"threshold {evaluation.chosen.threshold:.4g}")
    left.set(xlabel="false-positive rate", ylabel="true-positive rate", title=f"AUROC {evaluation.auroc:.4f}")
    left.legend(loc="lower right")
    scores, flags = probe.scores(examples.rows)[:, 0], examples.labels == probe.classes[0]
    name = probe.classes[0].replace("$", r"\$")
    right.hist([scores[flags], scores[~flags]], bins=40, label=[f"label {name}", "other labels"], histtype="step")
    right.axvline(evaluation.chosen.threshold, color="grey", linestyle="--")
    right.set(xlabel=f"score at {evaluation.site}", ylabel="rows", title=f"pooling: {evaluation.pooling}")
    right.legend()
    return figure
