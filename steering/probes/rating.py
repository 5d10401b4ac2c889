"""How well scores tell one class from the rest: ROC curve, its area, and thresholds. numpy only.

A row is said to be of the class if its score is above the threshold, not if it is equal.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.probes.probe import ProbeError, Scores

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
