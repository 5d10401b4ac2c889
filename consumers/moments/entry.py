"""The state of one site, phase and tag, and how two of them become one."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import CaptureFileError
from headgate.consumers.moments.quantiles import QuantileSketch
from headgate.consumers.moments.running import CovarianceKind, RunningMoments

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


class MomentsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts that two states must have in common before they can be merged.

    Attributes:
        consumer: Name of the consumer's instance: two with one root would count the same rows twice.
        model: Name of the model.
        hidden_size: Width of a row.
        covariance: How covariance is kept.
        rank: Of a sketch of it.
        quantile_error: Relative error of the quantiles of norms.
        skip_positions: Rows at positions below it were left out.
        max_norm: By site name, or for all sites under ``*``: longer rows were left out as attention sinks.
    """

    consumer: str
    model: str
    hidden_size: int
    covariance: CovarianceKind
    rank: int
    quantile_error: float
    skip_positions: int
    max_norm: dict[str, float]

    def check_same(self, other: MomentsSettings, where: str) -> None:
        """Raise `CaptureFileError` unless `other` is the same; `where` is the file that has `other`."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise CaptureFileError(
                    f"{where}: its moments were made with {name} {theirs!r}, expected {ours!r}; moments of other rows "
                    "are not mixed with them: choose another root, or move that file away"
                )

    def limit_of(self, site: str) -> float:
        """The longest row of that site that counts; infinity without a limit."""
        return self.max_norm.get(site, self.max_norm.get("*", float("inf")))

    @property
    def entry_bytes(self) -> int:
        """Memory of one entry, and of its part of a file."""
        width = self.hidden_size
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
        self.moments = RunningMoments(settings.hidden_size, settings.covariance, settings.rank)
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
