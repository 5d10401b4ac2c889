"""Mean, variance and covariance of rows that come in pieces, in float64, merged without losing digits.

Pieces are merged as Chan, Golub and LeVeque do: each is centred by its own mean first, and the difference of the two
means adds ``n_a * n_b / n * outer(d, d)``. Nothing is the difference of two large sums.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from headgate.consumers.moments.low_rank import LowRankScatter

Float64Array = npt.NDArray[np.float64]
CovarianceKind = Literal["full", "sketch", "none"]


class RunningMoments:
    """Moments of the rows so far.

    Attributes:
        num_rows: How many.
        mean: float64 ``[width]``; zeros before the first row.
        squares: float64 ``[width]``: the sum of squared distances from the mean, by element.
        scatter: float64 ``[width, width]``: the sum of outer products of the distances; None unless the kind is
            ``full``.
        low_rank: Its sketch; None unless the kind is ``sketch``.

    Args:
        width: Elements of a row.
        kind: How covariance is kept.
        rank: Of the sketch.
    """

    def __init__(self, width: int, kind: CovarianceKind, rank: int) -> None:
        self.num_rows = 0
        self.mean: Float64Array = np.zeros(width)
        self.squares: Float64Array = np.zeros(width)
        self.scatter: Float64Array | None = np.zeros((width, width)) if kind == "full" else None
        self.low_rank = LowRankScatter(width, rank) if kind == "sketch" else None

    def add(self, rows: Float64Array) -> None:
        """Add finite rows, ``[N, width]``."""
        if not len(rows):
            return
        mean = rows.mean(axis=0)
        centred = rows - mean
        between = self._shift(len(rows), mean)
        self.squares += np.einsum("nw,nw->w", centred, centred) + between * between
        if self.scatter is not None:
            self.scatter += centred.T @ centred
            self.scatter += np.outer(between, between)
        if self.low_rank is not None:
            self.low_rank.add(np.concatenate((centred, between[None])))

    def merge(self, other: RunningMoments) -> None:
        """Add what `other` has seen; it must be of the same width and kind."""
        if not other.num_rows:
            return
        between = self._shift(other.num_rows, other.mean)
        self.squares += other.squares + between * between
        if self.scatter is not None and other.scatter is not None:
            self.scatter += other.scatter
            self.scatter += np.outer(between, between)
        if self.low_rank is not None and other.low_rank is not None:
            self.low_rank.merge(other.low_rank)
            self.low_rank.add(between[None])

    def _shift(self, num_new: int, mean: Float64Array) -> Float64Array:
        """Count new rows of that mean; return the row whose outer product the shift adds to the scatter."""
        total = self.num_rows + num_new
        difference = mean - self.mean
        between: Float64Array = difference * np.sqrt(self.num_rows * (num_new / total))
        self.mean = self.mean + difference * (num_new / total)
        self.num_rows = total
        return between
