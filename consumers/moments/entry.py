"""The state of one site, phase and tag, and how two of them become one.

Mean, variance and covariance of rows that come in pieces are computed in float64 and merged without losing digits.
Covariance is kept whole, or as its largest directions with a bound of what they lack.

Pieces are merged as Chan, Golub and LeVeque do: each is centred by its own mean first, and the difference of the two
means adds ``n_a * n_b / n * outer(d, d)``. Nothing is the difference of two large sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import Float64Array, Int64Array
from headgate.capture.schema.errors import CaptureFileError

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


@dataclass(slots=True)
class QuantileSketch:
    """Counts of numbers in buckets whose bounds grow by a constant factor (the DDSketch of Masson, Rim and Lee).

    Every quantile that it returns is within ``relative_error`` of a number that was added at that rank. A merged
    sketch is the very sketch of all numbers together, in whatever order and pieces they came. Of numbers from 1e-300
    to 1e300 it has at most 70,000 buckets at 1 %; of the lengths of a model's rows, some hundreds.

    Attributes:
        relative_error: Above 0 and below 1.
        counts: By bucket; bucket i holds numbers above ``growth ** (i - 1)`` up to ``growth ** i``.
        num_zeros: Numbers that were 0.
        total: Sum of all numbers.
        least: The smallest; infinity before the first.
        most: The largest; minus infinity before the first.
    """

    relative_error: float
    counts: dict[int, int] = field(default_factory=dict)
    num_zeros: int = 0
    total: float = 0.0
    least: float = float("inf")
    most: float = float("-inf")

    @property
    def num_values(self) -> int:
        """How many numbers were added."""
        return self.num_zeros + sum(self.counts.values())

    @property
    def mean(self) -> float | None:
        """The mean of all numbers, exact but for rounding; None without any."""
        count = self.num_values
        return self.total / count if count else None

    def add(self, values: Float64Array) -> None:
        """Add finite numbers that are at least 0."""
        if not len(values):
            return
        positive = values[values > 0]
        self.num_zeros += len(values) - len(positive)
        buckets = np.ceil(np.log(positive) / np.log(self._growth)).astype(np.int64)
        for bucket, count in zip(*(part.tolist() for part in np.unique(buckets, return_counts=True)), strict=True):
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.total += float(values.sum())
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))

    def merge(self, other: QuantileSketch) -> None:
        """Add everything that `other` was given; it must have the same error."""
        if other.relative_error != self.relative_error:
            raise ValueError(f"sketches of errors {self.relative_error} and {other.relative_error} cannot be merged")
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.num_zeros += other.num_zeros
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    def quantile(self, share: float) -> float | None:
        """Return the number below which that share of all lies; None without any. 0 and 1 give the exact extremes."""
        count = self.num_values
        if not count:
            return None
        rank = share * (count - 1)
        if rank <= 0:
            return self.least
        if rank >= count - 1:
            return self.most
        seen = self.num_zeros
        if rank < seen:
            return 0.0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if rank < seen:
                break
        middle = 2 * self._growth**bucket / (self._growth + 1)
        return min(max(middle, self.least), self.most)

    def arrays(self) -> tuple[Int64Array, Int64Array]:
        """Return buckets, ascending, and their counts; both int64."""
        ordered = sorted(self.counts.items())
        pairs = np.array(ordered, dtype=np.int64).reshape(-1, 2)
        return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])

    @property
    def _growth(self) -> float:
        return (1 + self.relative_error) / (1 - self.relative_error)


Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

BATCH_ROWS = 256
"""Rows that are put together before they are added: one product of large matrices instead of many of small ones."""


class MomentsKey(NamedTuple):
    """Which rows.

    Attributes:
        tag: Of their requests.
        site: Name of the site.
        phase: ``prefill`` for tokens of the prompt, ``decode`` for generated ones.
    """

    tag: str
    site: str
    phase: Phase


class MomentsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The facts that two states must have in common before they can be merged.

    Attributes:
        consumer: Name of the consumer's instance: two with one root would count the same rows twice.
        model: Name of the model.
        hidden_size: Width of a row, unless `widths` has another.
        covariance: How covariance is kept.
        rank: Of a sketch of it.
        quantile_error: Relative error of the quantiles of norms.
        skip_positions: Rows at positions below it were left out.
        max_norm: By site name, or for all sites under ``*``: longer rows were left out as attention sinks.
        widths: By site name, of sites whose rows have another width. A state may have sites that another has not.
    """

    consumer: str
    model: str
    hidden_size: int
    covariance: CovarianceKind
    rank: int
    quantile_error: float
    skip_positions: int
    max_norm: dict[str, float]
    widths: dict[str, int] = msgspec.field(default_factory=dict)

    def width_of(self, site: str) -> int:
        """Width of a row of that site."""
        return self.widths.get(site, self.hidden_size)

    def check_same(self, other: MomentsSettings, where: str) -> None:
        """Raise `CaptureFileError` unless `other` is the same; `where` is the file that has `other`."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if name == "widths":
                theirs = ours | {site: width for site, width in theirs.items() if site in ours}
            if ours != theirs:
                raise CaptureFileError(
                    f"{where}: its moments were made with {name} {theirs!r}, expected {ours!r}; moments of other rows "
                    "are not mixed with them: choose another root, or move that file away"
                )

    def limit_of(self, site: str) -> float:
        """The longest row of that site that counts; infinity without a limit."""
        return self.max_norm.get(site, self.max_norm.get("*", float("inf")))

    def entry_bytes(self, site: str) -> int:
        """Memory of one entry of that site, and of its part of a file."""
        width = self.width_of(site)
        wide = {"full": width, "sketch": self.rank, "none": 0}[self.covariance]
        return 8 * width * (2 + wide) + 4 * width * BATCH_ROWS


class MomentsEntry:
    """Moments and norms of the rows of one site, phase and tag.

    Attributes:
        moments: Mean, variance and covariance.
        norms: Lengths of the rows.
        num_skipped: Rows left out since they lie at the beginning of a request (`skip_positions`).
        num_sinks: Rows left out since they were longer than `max_norm`.
        num_not_finite: Rows left out since they hold NaN or infinity.
    """

    def __init__(self, settings: MomentsSettings, site: str) -> None:
        self._max_norm = settings.limit_of(site)
        self.moments = RunningMoments(settings.width_of(site), settings.covariance, settings.rank)
        self.norms = QuantileSketch(settings.quantile_error)
        self.num_skipped = 0
        self.num_sinks = 0
        self.num_not_finite = 0
        self._waiting: list[npt.NDArray[np.float32]] = []
        self._num_waiting = 0

    def add(self, rows: npt.NDArray[np.float32]) -> None:
        """Add rows, ``[N, width]``; they are copied."""
        self._waiting.append(rows.copy())
        self._num_waiting += len(rows)
        if self._num_waiting >= BATCH_ROWS:
            self.settle()

    def settle(self) -> None:
        """Bring everything that was added into `moments` and `norms`."""
        if not self._waiting:
            return
        rows = np.concatenate(self._waiting).astype(np.float64)
        self._waiting, self._num_waiting = [], 0
        is_finite = np.isfinite(rows).all(axis=1)
        self.num_not_finite += int(np.count_nonzero(~is_finite))
        rows = rows[is_finite]
        norms = np.linalg.norm(rows, axis=1)
        is_sink = norms > self._max_norm
        self.num_sinks += int(np.count_nonzero(is_sink))
        self.norms.add(norms[~is_sink])
        self.moments.add(rows[~is_sink])

    def merge(self, other: MomentsEntry) -> None:
        """Add what `other`, which is settled and has the same settings, has seen."""
        self.settle()
        self.moments.merge(other.moments)
        self.norms.merge(other.norms)
        self.num_skipped += other.num_skipped
        self.num_sinks += other.num_sinks
        self.num_not_finite += other.num_not_finite
