"""Labels of requests: files of them, and which request has which."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headgate.capture.engine.contracts.captures import StoredRequest
from headgate.capture.files.reading import read_text, refusing
from headgate.capture.probes.probe import ProbeError
from headgate.capture.schema.errors import shown

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
