"""Labels of an SAE's features: texts beside its file, from the exports of others.

The file of ``x.safetensors`` is ``x.safetensors.labels.jsonl``: a line ``{"id": 3, "text": "..."}`` for each label, in
the order of the ids. `read_export` takes Neuronpedia's JSONL (``modelId, layer, index, description``), also as
``.jsonl.gz``, files of this module, and CSV with an id and a text.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headgate.capture.files.reading import MAX_TEXT_BYTES, load_once, read_text, refusing, text_of_line
from headgate.capture.files.writing import replacing
from headgate.capture.schema.errors import shown
from headgate.steering.features.tensors import FeatureFileError

SUFFIX = ".labels.jsonl"
MAX_LABEL = 2000
"""Characters of a label, at most."""
_ID_COLUMNS, _TEXT_COLUMNS = ("id", "index", "feature"), ("text", "label", "description")


class Labels(Mapping[int, str]):
    """The labels of an SAE, by the id of the feature, ascending."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = dict(sorted(texts.items()))

    def __getitem__(self, feature: int) -> str:
        """Return the label of a feature."""
        return self._texts[feature]

    def __iter__(self) -> Iterator[int]:
        """Yield the ids that have labels."""
        return iter(self._texts)

    def __len__(self) -> int:
        """Count the labels."""
        return len(self._texts)

    def of(self, features: Iterable[int]) -> dict[str, str]:
        """Return the labels of features that have one, by their ids as texts, as JSON has them."""
        return {str(one): self._texts[one] for one in sorted(features) if one in self._texts}

    def search(self, query: str, limit: int) -> list[tuple[int, str]]:
        """Return ids and labels that have every word of a query, in any case; the shortest labels first.

        Args:
            query: Words, with blanks between; a word may be a part of one of the label. Without any, every label fits.
            limit: How many, at most.
        """
        words = query.casefold().split()
        found = [(one, text) for one, text in self._texts.items() if all(word in text.casefold() for word in words)]
        return sorted(found, key=lambda entry: (len(entry[1]), entry[0]))[:limit]


NO_LABELS = Labels({})


def labels_path(coder: Path) -> Path:
    """Return where the labels of an SAE's file or folder are."""
    return coder.with_name(coder.name + SUFFIX)


def labels_of(coder: Path) -> Labels:
    """Return the labels of an SAE's file or folder; none if there is no file of them.

    Raises:
        FeatureFileError: If it is damaged.
    """
    path = labels_path(coder)
    return _read(path) if path.exists() else NO_LABELS


def _load(path: Path) -> Labels:
    return Labels(read_export([path]).texts)


_read = load_once(_load, 16)


def write_labels(coder: Path, labels: Mapping[int, str]) -> Path:
    """Write the labels of an SAE's file or folder; earlier ones are replaced at once. Returns the path."""
    target = labels_path(coder)
    with replacing(target) as new, new.open("wb") as file:
        for one, text in sorted(labels.items()):
            file.write(msgspec.json.encode({"id": one, "text": text}) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return target


class Export(NamedTuple):
    """Labels of one SAE, as others give them.

    Attributes:
        texts: By id; of several labels of a feature, the first.
        num_further: Labels beside the first ones.
        sources: ``MODEL/LAYER`` that the files name.
    """

    texts: dict[int, str]
    num_further: int
    sources: tuple[str, ...]


def read_export(paths: Iterable[Path], num_features: int | None = None, source: str | None = None) -> Export:
    """Read files of labels.

    Args:
        paths: Files of one SAE, whose suffixes name their formats.
        num_features: Of the SAE: ids are below.
        source: The layer, as the files write it, of files with labels of several SAEs.

    Raises:
        FeatureFileError: Naming file and line: it is no such file, an id or a text is wrong, or the files have labels
            of several SAEs and `source` is None.
        OSError: If one cannot be read.
    """
    texts: dict[int, str] = {}
    num_further = 0
    sources: dict[str, str] = {}
    for path in paths:
        for where, label in _entries(path):
            one = _id(label.feature, num_features, where)
            if label.layer is not None:
                if source not in (None, label.layer):
                    continue
                sources.setdefault(f"{label.model or ''}/{label.layer}", where)
                if len(sources) > 1:
                    raise FeatureFileError(
                        f"{where}: labels of several SAEs, {' and '.join(sources)}; choose one: --source LAYER"
                    )
            text = _text(label.text, where)
            num_further += one in texts
            if text:
                texts.setdefault(one, text)
    return Export(texts, num_further, tuple(sources))


class _Label(NamedTuple):
    feature: object
    text: object
    layer: str | None = None
    model: str | None = None


def _entries(path: Path) -> Iterator[tuple[str, _Label]]:
    """Yield the labels of a file, each with its place."""
    if path.suffix == ".csv":
        yield from _of_csv(path)
    elif path.suffix == ".jsonl" or path.name.endswith(".jsonl.gz"):
        yield from _of_json_lines(path)
    else:
        raise FeatureFileError(f"{path}: expected labels as .jsonl, .jsonl.gz or .csv")


def _of_json_lines(path: Path) -> Iterator[tuple[str, _Label]]:
    num_bytes = 0
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file, refusing(path, FeatureFileError):
        for number, line in enumerate(iter(lambda: file.readline(MAX_TEXT_BYTES), b""), start=1):
            where = f"{path}: line {number}"
            num_bytes += len(line)
            if num_bytes > MAX_TEXT_BYTES:
                raise FeatureFileError(f"{path}: has over {MAX_TEXT_BYTES:,} bytes of labels")
            text = text_of_line(where, number, line, FeatureFileError).strip()
            if text:
                with refusing(where, FeatureFileError, "expected an object of JSON"):
                    document = msgspec.json.decode(text, type=dict[str, Any])
                yield where, _label(document, where)


def _label(document: Mapping[str, Any], where: str) -> _Label:
    if "index" in document and "description" in document:
        layer, model = document.get("layer"), document.get("modelId")
        if not isinstance(layer, str | int) or not isinstance(model, str | None):
            raise FeatureFileError(f"{where}: layer: expected a text, got {shown(layer)}")
        return _Label(document["index"], document["description"], str(layer), model)
    if "id" in document and "text" in document:
        return _Label(document["id"], document["text"])
    raise FeatureFileError(f"{where}: expected index and description, or id and text; got {shown(sorted(document))}")


def _of_csv(path: Path) -> Iterator[tuple[str, _Label]]:
    text = read_text(path, FeatureFileError)
    with refusing(path, FeatureFileError, "not CSV"):
        rows = csv.reader(text.splitlines(keepends=True), strict=True)
        columns = (0, 1)
        for number, row in enumerate(rows):
            where = f"{path}: line {rows.line_num}"
            if number == 0 and row and not row[0].strip().isdecimal():
                columns = _columns(row, where)
            elif row:
                if len(row) <= max(columns):
                    raise FeatureFileError(f"{where}: expected an id and a text, got {shown(row)}")
                yield where, _Label(row[columns[0]], row[columns[1]])


def _columns(header: list[str], where: str) -> tuple[int, int]:
    names = [name.strip().casefold() for name in header]
    found = [next((names.index(one) for one in known if one in names), None) for known in (_ID_COLUMNS, _TEXT_COLUMNS)]
    if found[0] is None or found[1] is None:
        raise FeatureFileError(
            f"{where}: expected columns named {'/'.join(_ID_COLUMNS)} and {'/'.join(_TEXT_COLUMNS)}, got "
            f"{shown(header)}"
        )
    return found[0], found[1]


def _id(given: object, num_features: int | None, where: str) -> int:
    one = int(given) if isinstance(given, str) and given.strip().isdecimal() else given
    if not isinstance(one, int) or isinstance(one, bool) or one < 0:
        raise FeatureFileError(f"{where}: expected the id of a feature, got {shown(given)}")
    if num_features is not None and one >= num_features:
        raise FeatureFileError(f"{where}: feature {one}; the SAE has the features 0 to {num_features - 1}")
    return one


def _text(given: object, where: str) -> str:
    if not isinstance(given, str | None) or len(given or "") > MAX_LABEL:
        raise FeatureFileError(f"{where}: expected a text of at most {MAX_LABEL} characters, got {shown(given)}")
    return " ".join((given or "").split())
