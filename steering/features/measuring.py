"""Figures of a coder on rows: how many features are active, how much variance is left, the largest activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.steering.features.source_coder import SourceCoder
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.features.tensors import Array

LARGEST_NORM = 10.0
"""Rows longer than this multiple of the usual length are left out: attention sinks, which SAEs are not trained on."""

BLOCK_BYTES = 128 << 20
"""Bytes of activations at a time."""


class Figures(NamedTuple):
    """Figures of a coder on rows.

    Attributes:
        l0: Mean number of active features of a row.
        fvu: Fraction of variance unexplained: squares of the error by squares of the distance to the mean row. None
            if the rows of the write site are not there, or the coder is one of several that write it.
        threshold: Of kinds that select: mean over rows of the least activation that was selected.
        num_dead: Features that no row activates.
        largest: ``[F]``: the largest activation of each feature.
    """

    l0: float
    fvu: float | None
    threshold: float | None
    num_dead: int
    largest: npt.NDArray[np.float32]


def measure(coder: SparseCoder, rows: Array, written: Array | None) -> Figures:
    """Encode rows and decode them again.

    Args:
        coder: An SAE or transcoder.
        rows: ``[n, D]`` of its read site.
        written: ``[n, O]`` of its write site: for an SAE the same rows. None if they are not known.
    """
    largest = np.zeros(coder.num_features, np.float32)
    error, active, least = 0.0, 0, []
    for index in _blocks(len(rows), coder.num_features):
        activations = coder.encode(rows[index])
        is_active = activations > 0
        active += int(is_active.sum())
        np.maximum(largest, activations.max(axis=0), out=largest)
        if coder.kind.selects:
            found = np.where(is_active, activations, np.inf).min(axis=1)
            least.extend(found[np.isfinite(found)])
        if written is not None:
            error += float(np.square(written[index] - coder.decode(activations, rows[index]), dtype=np.float64).sum())
    total = 0.0 if written is None else float(np.square(written - written.mean(axis=0), dtype=np.float64).sum())
    return Figures(
        l0=active / len(rows),
        fvu=error / total if written is not None and total else None,
        threshold=float(np.mean(least)) if least else None,
        num_dead=int((largest == 0).sum()),
        largest=largest,
    )


def with_figures(source: SourceCoder, figures: Figures) -> SourceCoder:
    """Return the coder with the figures that single features need: largest activations, and a threshold of top-k."""
    changes: dict[str, Array] = {"max_activations": figures.largest.astype(np.float64)}
    if source.kind.selects and source.threshold is None and figures.threshold is not None:
        changes["threshold"] = np.full(len(source.bias), figures.threshold)
    return replace(source, **changes)  # type: ignore[arg-type]


def _blocks(num_rows: int, num_features: int) -> Sequence[slice]:
    size = max(1, BLOCK_BYTES // (4 * num_features))
    return [slice(start, start + size) for start in range(0, num_rows, size)]
