"""How well a probe does on labelled rows: figures, and a picture of them.

Figures come from scores alone: ROC curve, its area, and thresholds. A row is said to be of the class if its score is
above the threshold, not if it is equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.probe import Probe, ProbeError, Scores
from headgate.steering.probes.examples import Captures, Examples, Labels, examples_of, positive_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Flags = npt.NDArray[np.bool_]


class Roc(NamedTuple):
    """The ROC curve: one point for each distinct score, from the strictest threshold to the laxest.

    Attributes:
        thresholds: float64 ``[k]``, descending; the first is the largest score, above which nothing is.
        false_positive: float64 ``[k]``: share of the negative rows above the threshold.
        true_positive: float64 ``[k]``: share of the positive rows above it.
    """

    thresholds: Scores
    false_positive: Scores
    true_positive: Scores

    @property
    def area(self) -> float:
        """AUROC: the chance that a positive row scores higher than a negative one; ties count half."""
        widths = np.diff(self.false_positive)
        return float((widths * (self.true_positive[1:] + self.true_positive[:-1]) / 2).sum())


def roc(scores: Any, is_positive: Any) -> Roc:
    """Return the curve of scores ``[n]`` of rows that are positive or not.

    Raises:
        ProbeError: If a score is not finite, or only one of the two classes is there.
    """
    values, flags = _checked(scores, is_positive)
    order = np.argsort(-values, kind="stable")
    values, flags = values[order], flags[order]
    ends = np.flatnonzero(np.append(np.diff(values) != 0, True))  # the last row of each distinct score
    true, false = np.cumsum(flags)[ends], np.cumsum(~flags)[ends]
    # Above a score lie the rows of those before it; below the smallest lie all.
    thresholds = np.append(values[ends], np.nextafter(values[-1], -math.inf))
    return Roc(thresholds, np.append(0, false) / false[-1], np.append(0, true) / true[-1])


def threshold_at(scores: Any, is_positive: Any, false_positive: float) -> float:
    """Return the smallest score of a negative row above which at most that share of the negative rows lies.

    Args:
        scores: ``[n]``.
        is_positive: ``[n]``.
        false_positive: The share, from 0 to below 1.

    Raises:
        ProbeError: As `roc`, or if the share is out of range.
    """
    if not 0 <= false_positive < 1:
        raise ProbeError(f"expected a false-positive rate from 0 to below 1, got {false_positive}")
    values, flags = _checked(scores, is_positive)
    negative = np.sort(values[~flags])[::-1]
    # Shares such as 0.29 of 100 are a little less than a whole number in binary.
    return float(negative[min(int(false_positive * len(negative) + 1e-9), len(negative) - 1)])


def _checked(scores: Any, is_positive: Any) -> tuple[Scores, Flags]:
    values, flags = np.asarray(scores, np.float64), np.asarray(is_positive, np.bool_)
    if values.ndim != 1 or values.shape != flags.shape:
        raise ProbeError(f"expected one score for each row, got the shapes {values.shape} and {flags.shape}")
    if not np.isfinite(values).all():
        raise ProbeError(f"the score of row {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    if flags.all() or not flags.any():
        raise ProbeError(
            f"all {len(flags)} rows are {'positive' if flags.any() else 'negative'}; both kinds are needed"
        )
    return values, flags


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
    """The ROC curve; see `headgate.steering.probes.judging.Roc`."""

    thresholds: list[float]
    fpr: list[float]
    tpr: list[float]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a probe on labelled rows.

    Attributes:
        site: The name of the site.
        pooling: The rows of each request that were scored.
        classes: The probe's classes.
        num_requests: Requests.
        num_rows: Rows; `num_positive` of them are of a probe's one class.
        num_positive: None for several classes.
        accuracy: Share of the rows whose class is predicted rightly: by scores above 0, or by the largest score. None
            for a cosine probe, whose scores have no middle.
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
