"""Labelled rows that probes are made from and judged by: of captured requests, pooled, or plain arrays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headgate.capture.engine.contracts.captures import StoredRequest
from headgate.capture.engine.contracts.parts import stored_requests
from headgate.capture.probes.probe import FloatArray, Pooling, ProbeError
from headgate.capture.schema.errors import shown
from headgate.capture.schema.sites import Site
from headgate.steering.probes.labels import Labels, label_of, labels_of

Captures = str | os.PathLike[str] | Iterable[StoredRequest]
"""A root of captures, or requests of one."""

RowPooling = Pooling | Literal["response_mean"]
"""Rows of a request that count: those of a probe, or the mean over the generated tokens."""

MAX_ROWS = 256
"""Rows of one request, at most, where every token counts; evenly spread."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Examples:
    """Rows with labels.

    Attributes:
        rows: float32 ``[n, hidden]``.
        labels: ``[n]``.
        groups: int64 ``[n]``: the number of the request that each row is of. A split never cuts one.
        model: Name of the model that gave them, if known.
    """

    rows: FloatArray
    labels: npt.NDArray[np.str_]
    groups: npt.NDArray[np.int64]
    model: str | None = None

    def taken(self, index: npt.NDArray[Any]) -> Examples:
        """Return some of the rows."""
        return Examples(rows=self.rows[index], labels=self.labels[index], groups=self.groups[index], model=self.model)


def examples_of(captures: Captures | Any, labels: Labels | Sequence[Any], site: Site, pooling: Pooling) -> Examples:
    """Return the rows of requests at a site, or of an array ``[n, hidden]``.

    Args:
        captures: A root of captures, requests of one, or an array or tensor.
        labels: By request; of an array one for each row.
        site: The site; rows of an array are from there.
        pooling: ``token``: all rows but that of position 0, whose token sees nothing before it, at most `MAX_ROWS` of
            a request. ``last_prompt`` and ``prompt_mean``: one for each request. Rows of an array are taken as they
            are.

    Raises:
        ProbeError: If rows or labels are missing; the message names the requests.
        CaptureFileError: If there is no such folder, or a file of it is damaged.
    """
    if hasattr(captures, "shape"):
        return _of_array(captures, labels)
    if not isinstance(labels, Mapping):
        raise ProbeError(f"expected labels by request, got a {type(labels).__name__}")
    opened: Any = stored_requests(os.fspath(captures)) if isinstance(captures, str | os.PathLike) else captures
    requests: list[StoredRequest] = list(opened)
    if not requests:
        raise ProbeError(
            f"{shown(captures)}: there are no captured requests; expected the root of a filesystem consumer, "
            "above its tags"
        )
    names = labels_of(requests, labels)
    pieces = [pooled(request, site, pooling) for request in requests]
    sizes = [len(piece) for piece in pieces]
    numbers: dict[tuple[str, str], int] = {}
    groups = [numbers.setdefault((request.tag, request.request_id), len(numbers)) for request in requests]
    return Examples(
        rows=finite(np.concatenate(pieces)),
        labels=np.repeat(np.array(names), sizes),
        groups=np.repeat(np.array(groups, np.int64), sizes),
        model=next((str(request.metadata["model"]) for request in requests if request.metadata.get("model")), None),
    )


def _of_array(rows: Any, labels: Any) -> Examples:
    if hasattr(rows, "detach"):  # a torch tensor, perhaps in bfloat16, which numpy does not know
        rows = rows.detach().cpu().float().numpy()
    with np.errstate(over="ignore"):
        array = np.asarray(rows, np.float32)
    if array.ndim != 2 or not array.size:
        raise ProbeError(f"expected rows [n, hidden], not empty; got the shape {list(array.shape)}")
    if isinstance(labels, Mapping) or len(labels) != len(array):
        got = "labels by request" if isinstance(labels, Mapping) else f"{len(labels)}"
        raise ProbeError(f"expected {len(array)} labels, one for each row; got {got}")
    names = [label_of(label, f"label {index}") for index, label in enumerate(labels)]
    return Examples(rows=finite(array), labels=np.array(names), groups=np.arange(len(array)))


def finite(rows: FloatArray) -> FloatArray:
    """Return rows ``[n, hidden]`` if all values are finite.

    Raises:
        ProbeError: If one is not; the message has the number of its row.
    """
    if not np.isfinite(rows).all():
        raise ProbeError(f"row {int(np.argwhere(~np.isfinite(rows))[0][0])} is not finite")
    return rows


def pooled(request: StoredRequest, site: Site, pooling: RowPooling) -> FloatArray:
    """Return the rows of a request that count, float32 ``[n, hidden]``; one row unless the pooling is ``token``.

    Raises:
        ProbeError: If the site, or a row that the pooling needs, was not captured.
    """
    name = f"{request.tag}/{request.request_id}"
    if site not in request.sites:
        there = ", ".join(found.name for found in request.sites) or "none"
        raise ProbeError(f"{name}: {site.name} was not captured; sites that were: {there}")
    index = _indices(request, pooling, name)
    rows = request.numpy(site)[index]
    if pooling in ("prompt_mean", "response_mean"):
        rows = rows.mean(axis=0, dtype=np.float64, keepdims=True)
    found: FloatArray = rows.astype(np.float32)
    return found


def _indices(request: StoredRequest, pooling: RowPooling, name: str) -> npt.NDArray[np.int64]:
    if pooling == "token":
        index = np.flatnonzero(request.positions > 0)
        if not len(index):
            raise ProbeError(f"{name}: has no rows but that of position 0, which no probe is made from")
        return index[np.linspace(0, len(index) - 1, min(MAX_ROWS, len(index))).astype(np.int64)]
    length = int(request.metadata["num_prompt_tokens"])
    if pooling == "response_mean":
        wanted, selector = np.arange(length, int(request.metadata["num_tokens"]) - 1), "all_generated"
        if not len(wanted):
            raise ProbeError(f"{name}: has no rows of generated tokens: the last one has none; let it generate more")
    elif pooling == "prompt_mean":
        wanted, selector = np.arange(length), "all_prompt"
    else:
        wanted, selector = np.array([length - 1]), "last_prompt"
    index = np.flatnonzero(np.isin(request.positions, wanted))
    if len(index) != len(wanted):
        raise ProbeError(
            f"{name}: {len(index)} of {len(wanted)} rows are there that {pooling} needs, of a prompt of {length} "
            f'tokens; capture with the positions "{selector}"'
        )
    return index
