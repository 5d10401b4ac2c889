"""Rows of attention sinks, whose norms are far above the others' and which would rule a training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from headgate.consumers.datasets.reading import Bytes
from headgate.consumers.datasets.view import RowView, typed

MULTIPLE = 10.0
"""Times the median norm above which a row is a sink."""
_SAMPLES, _SAMPLE_ROWS = 256, 256


class SinkFilter:
    """Finds rows whose norm is above `MULTIPLE` times the median norm of their site.

    Attributes:
        thresholds: The largest norm that is kept, by site.

    Args:
        samples: Rows by site, uint8 ``[rows, row_bytes]``, whose norms the medians are of; in pieces.
        dtype: Of the rows: ``bfloat16``, ``float16`` or ``float32``.
    """

    def __init__(self, samples: Iterable[Mapping[str, Bytes]], dtype: str) -> None:
        self._dtype = dtype
        norms: dict[str, list[npt.NDArray[np.float32]]] = {}
        for sample in samples:
            for site, rows in sample.items():
                norms.setdefault(site, []).append(self._norms(rows))
        self.thresholds = {site: _threshold(np.concatenate(found)) for site, found in norms.items()}

    def keeps(self, data: Mapping[str, Bytes]) -> npt.NDArray[np.bool_]:
        """bool ``[rows]``: not a sink at any site. Rows with NaN are kept: they are errors, for the trainer to see."""
        is_sink = [self._norms(rows) > self.thresholds[site] for site, rows in data.items()]
        keeps: npt.NDArray[np.bool_] = ~np.logical_or.reduce(is_sink)
        return keeps

    def _norms(self, rows: Bytes) -> npt.NDArray[np.float32]:
        values = typed(rows, self._dtype).astype(np.float32, copy=False)
        norms: npt.NDArray[np.float32] = np.sqrt(np.einsum("nd,nd->n", values, values))
        return norms


def sinks_of(view: RowView, seed: int) -> SinkFilter:
    """A filter of the rows of a data set.

    The medians are of a sample: 256 places, drawn by `seed`, with 256 rows each; all rows of a smaller data set.
    """
    if len(view) <= _SAMPLES * _SAMPLE_ROWS:
        places = np.arange(0, len(view), _SAMPLE_ROWS)
    else:
        places = np.sort(np.random.default_rng(seed).integers(0, len(view) - _SAMPLE_ROWS, _SAMPLES))
    samples = (view.read(place, min(place + _SAMPLE_ROWS, len(view))) for place in places.tolist())
    return SinkFilter(samples, view.dtype)


def _threshold(norms: npt.NDArray[np.float32]) -> float:
    finite = norms[np.isfinite(norms)]
    return MULTIPLE * float(np.median(finite)) if len(finite) else float("inf")
