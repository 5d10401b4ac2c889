"""Rows with labels for scikit-learn: ``partial_fit`` in batches, or arrays with groups by request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.consumers.datasets.view import DatasetView, RowBatch


class LabelledRows(NamedTuple):
    """Rows that scikit-learn takes as they are.

    Attributes:
        rows: float32 ``[rows, hidden]``, C order: ``X``.
        labels: ``[rows]``: ``y``.
        groups: int64 ``[rows]``: the request of each row, for `GroupKFold` and the like.
    """

    rows: npt.NDArray[np.float32]
    labels: npt.NDArray[Any]
    groups: npt.NDArray[np.int64]


def labelled(batches: Iterable[RowBatch], labels: Mapping[str, Any], site: str | None = None) -> Iterator[LabelledRows]:
    """Batches with a label for each row: that of its request.

    Args:
        batches: `Dataset.batches` or `Dataset.mixed`.
        labels: By request id, tag, or ``tag/request_id``, in which the more exact name wins.
        site: Its name; optional if there is only one.

    Raises:
        KeyError: If a request has no label.
    """
    known: dict[int, Any] = {}
    for batch in batches:
        groups = batch.requests
        numbers, inverse = np.unique(groups, return_inverse=True)
        for number in numbers.tolist():
            if number not in known:
                known[number] = _label_of(batch.view, number, labels)
        values = np.array([known[number] for number in numbers.tolist()])
        yield LabelledRows(np.ascontiguousarray(batch.float32(site)), values[inverse], groups)


def _label_of(view: DatasetView, request: int, labels: Mapping[str, Any]) -> Any:
    request_id, tag = view.request_id(request), view.tag(request)
    for name in (f"{tag}/{request_id}", request_id, tag):
        if name in labels:
            return labels[name]
    raise KeyError(f"{tag}/{request_id}: no label; give one by request id, by tag or by tag/request_id")
