"""Mean, variance and covariance of rows that come in pieces, in float64, merged without losing digits.

Covariance is kept whole, or as its largest directions with a bound of what they lack.

Pieces are merged as Chan, Golub and LeVeque do: each is centred by its own mean first, and the difference of the two
means adds ``n_a * n_b / n * outer(d, d)``. Nothing is the difference of two large sums.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from headgate.capture.schema.batch import Float64Array

CovarianceKind = Literal["full", "sketch", "none"]


class LowRankScatter:
    """Stands for ``A.T @ A`` of all rows A that were added, by few rows B (Frequent Directions of Liberty).

    ``0 <= x @ (A.T @ A - B.T @ B) @ x <= error`` for every x of unit length. `error` is kept with the sketch; it is at
    most the sum of all squared elements of A divided by ``rank + 1``, and 0 while A has no more than `rank`
    dimensions. Sketches merge, and their bounds add up with what merging takes away.

    Attributes:
        rank: Rows of B once it is full.
        rows: B: float64 ``[0 to rank, width]``.
        error: See above.

    Args:
        width: Elements of a row.
        rank: At least 1.
    """

    def __init__(self, width: int, rank: int) -> None:
        self.rank = rank
        self.rows: Float64Array = np.empty((0, width))
        self.error = 0.0

    def add(self, rows: Float64Array) -> None:
        """Add rows, ``[N, width]``."""
        step = max(self.rank, 64)
        for start in range(0, len(rows), step):
            self._shrink(np.concatenate((self.rows, rows[start : start + step])))

    def merge(self, other: LowRankScatter) -> None:
        """Add what `other` stands for; it must have the same rank."""
        if other.rank != self.rank:
            raise ValueError(f"sketches of ranks {self.rank} and {other.rank} cannot be merged")
        self.error += other.error
        self._shrink(np.concatenate((self.rows, other.rows)))

    def _shrink(self, rows: Float64Array) -> None:
        """Keep `rank` rows: rotate, and take from every squared singular value the largest that is left out."""
        if len(rows) <= self.rank:
            self.rows = rows
            return
        squares, rotation = np.linalg.eigh(rows @ rows.T)  # ascending
        squares = np.maximum(squares, 0.0)
        lost, kept = float(squares[-self.rank - 1]), squares[-self.rank :]
        kept_rows = rotation[:, -self.rank :].T @ rows
        factors = np.sqrt(np.divide(kept - lost, kept, out=np.zeros_like(kept), where=kept > 0))
        self.rows = kept_rows * factors[:, None]
        self.error += lost


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
