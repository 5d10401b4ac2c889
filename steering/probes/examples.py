"""Labelled rows that probes are made from and judged by: of captured requests, pooled, or plain arrays."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headgate.capture.engine.contracts.parts import stored_requests
from headgate.capture.files.reading import read_text, refusing
from headgate.capture.probe import FloatArray, Pooling, ProbeError
from headgate.capture.schema.errors import shown
from headgate.capture.schema.results import StoredRequest, whole_rows
from headgate.capture.schema.sites import Site

Labels = Mapping[str, Any]
"""A label, a text, a number or a truth value, by ``tag/request_id``, by request id, or by tag."""

_IDS = ("request_id", "id")
_TRUE = {"1", "true", "yes", "positive"}
_SHOWN = 10


def read_labels(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read a file of labels.

    ``.json`` holds an object of labels by request id, by tag, or by ``tag/request_id``; or a list of objects with
    ``request_id`` (or ``id``), ``tag`` or both, and ``label``. ``.jsonl`` holds such an object on each line, ``.csv``
    the same as columns, named in its first line.

    Raises:
        ProbeError: If it cannot be read, lacks something, or gives two labels for one name.
    """
    place = Path(path)
    readers = {".json": _of_json, ".jsonl": _of_lines, ".csv": _of_csv}
    if place.suffix not in readers:
        raise ProbeError(f"{place}: expected labels in a file named {', '.join('*' + suffix for suffix in readers)}")
    try:
        with refusing(place, ProbeError, "cannot be read"):
            return _joined(place, readers[place.suffix](place, read_text(place, ProbeError)))
    except OSError as error:
        raise ProbeError(f"{place}: cannot be read: {error}") from error


def _of_json(place: Path, text: str) -> list[tuple[str, str]]:
    document = _parsed(text, str(place))
    if isinstance(document, dict):
        return [(name, label_of(label, f"{place}: {name!r}")) for name, label in document.items()]
    if not isinstance(document, list):
        raise ProbeError(f"{place}: expected an object of labels, or a list of objects; got {shown(document)}")
    return [_entry(value, f"{place}: entry {index}") for index, value in enumerate(document)]


def _of_lines(place: Path, text: str) -> list[tuple[str, str]]:
    lines = ((f"{place}: line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    return [_entry(_parsed(line, where), where) for where, line in lines]


def _parsed(text: str, where: str) -> Any:
    """Read JSON whose objects have each key once; of two, Python's reader keeps the last."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ProbeError(f"{where}: {key!r} stands there twice")
            found[key] = value
        return found

    return json.loads(text, object_pairs_hook=unique)


def _of_csv(place: Path, text: str) -> list[tuple[str, str]]:
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True, strict=True)
    return [_entry(row, f"{place}: line {reader.line_num}") for row in reader]


def _entry(value: Any, where: str) -> tuple[str, str]:
    if not isinstance(value, Mapping):
        raise ProbeError(f"{where}: expected an object with request_id or tag, and label; got {shown(value)}")
    request = next((value[key] for key in _IDS if value.get(key) not in (None, "")), None)
    parts = [str(part) for part in (value.get("tag"), request) if part not in (None, "")]
    if not parts:
        raise ProbeError(f"{where}: expected request_id (or id) or tag; got {', '.join(map(str, value)) or 'nothing'}")
    return "/".join(parts), label_of(value.get("label"), where)


def label_of(label: Any, where: str) -> str:
    """Return a label as a text.

    Raises:
        ProbeError: If it is none.
    """
    if hasattr(label, "item"):
        label = label.item()  # numpy's numbers
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    if not isinstance(label, str | int | float) or not str(label).strip():
        raise ProbeError(f"{where}: expected a label, a text or a number; got {shown(label)}")
    return str(label).strip()


def _joined(place: Path, entries: Iterable[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, label in entries:
        if found.setdefault(name, label) != label:
            raise ProbeError(f"{place}: {name!r} is labelled {found[name]!r} and {label!r}")
    if not found:
        raise ProbeError(f"{place}: has no labels")
    return found


def labels_of(requests: Iterable[StoredRequest], labels: Labels) -> list[str]:
    """Return the label of each request: by its tag and id, or else by its id, or else by its tag.

    Raises:
        ProbeError: If a request has none, or a label is of no request; the message names them.
    """
    found, missing, used = [], [], set()
    for request in requests:
        names = (f"{request.tag}/{request.request_id}", request.request_id, request.tag)
        name = next((name for name in names if name in labels), None)
        if name is None:
            missing.append(names[0])
            continue
        used.add(name)
        found.append(label_of(labels[name], repr(name)))
    if missing:
        raise ProbeError(
            f"{len(missing)} captured requests have no label: {_listed(missing)}; label them, or keep them in a root "
            "of their own"
        )
    if unused := [str(name) for name in labels if name not in used]:
        raise ProbeError(f"{len(unused)} labels are of no captured request: {_listed(unused)}")
    return found


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def positive_of(labels: Iterable[str], positive: str | None) -> str | None:
    """Return the label of the positive class; None if there are more than two classes and none was named.

    Args:
        labels: All.
        positive: The one that was named; if None, that of two labels that says so by itself, such as 1 or true.

    Raises:
        ProbeError: If it is not among the labels, there is only one, or nothing says which of two it is.
    """
    known = sorted(set(labels))
    if positive is not None and positive not in known:
        raise ProbeError(f"no request has the label {positive!r}; labels: {', '.join(known)}")
    if len(known) < 2:
        raise ProbeError(f"expected requests of two classes or more; all are labelled {', '.join(known) or 'nothing'}")
    if positive is not None or len(known) > 2:
        return positive
    says = [label for label in known if label.lower() in _TRUE]
    if len(says) != 1:
        raise ProbeError(f"which label is positive, {known[0]!r} or {known[1]!r}? Name it: positive=, or --positive")
    return says[0]


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
        CaptureFileError: If some columns of its rows were captured alone.
    """
    name = f"{request.tag}/{request.request_id}"
    if site not in request.sites:
        there = ", ".join(found.name for found in request.sites) or "none"
        raise ProbeError(f"{name}: {site.name} was not captured; sites that were: {there}")
    index = _indices(request, pooling, name)
    rows = whole_rows(request, site)[index]
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
