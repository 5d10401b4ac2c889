"""Layout ``raw``: ``{root}/{tag}/{request_id}/{layer}_{hook}.bin``, rows as they are, with a ``.json`` beside each.

The ``.json`` holds the fields of `Sidecar` and ``site``, ``shape``, ``positions`` and ``token_ids``. A folder is whole
if every site that its sidecars list is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from headgate.capture.files.reading import refusing
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import Site
from headgate.consumers.filesystem.formats.layout import (
    FORMAT,
    POSITIONS,
    TOKEN_IDS,
    Finished,
    Sidecar,
    StoredStage,
    TensorRef,
    payload_of,
    read_sidecar,
)
from headgate.consumers.filesystem.storage.source import Source
from headgate.consumers.filesystem.storage.store import Published, Store, Target, site_file

DATA_SUFFIX = ".bin"
SIDECAR_SUFFIX = ".json"


class RawLayout:
    """Writes one folder per request; see `Layout`."""

    def __init__(self, store: Store, *, durable: bool | None) -> None:
        self._store = store
        self._durable = durable

    def check_free(self, target: Target) -> None:
        self._store.check_free(target, "")

    def store(self, finished: Finished) -> tuple[dict[str, Any], Published]:
        sites = [Site.parse(name) for name in finished.sidecar.sites]
        files: dict[str, Iterable[memoryview]] = {
            f"{site_file(site)}{DATA_SUFFIX}": finished.pieces[site] for site in sites
        }
        # Sidecars last: where a folder cannot appear at once, a `.bin` without its `.json` is not there yet.
        files |= {f"{site_file(site)}{SIDECAR_SUFFIX}": _sidecar_file(finished, site) for site in sites}
        published = self._store.publish_folder(finished.target, files)
        return payload_of("raw", finished, published, durable=self._durable), published

    def close(self) -> None:
        """Nothing stays open."""


def _sidecar_file(finished: Finished, site: Site) -> Iterator[memoryview]:
    document = finished.sidecar.document() | {
        "site": site.name,
        "shape": [finished.num_rows, finished.sidecar.shape(site.name).width],
        POSITIONS: finished.positions.tolist(),
        TOKEN_IDS: finished.token_ids.tolist(),
    }
    yield memoryview(msgspec.json.encode(document))


def read_raw_folder(source: Source, folder: str) -> StoredStage | None:
    """Read a folder of this layout; None if another program wrote it.

    Raises:
        CaptureFileError: If it is partial or damaged.
    """
    names = [name for name, is_folder in source.names(folder) if not is_folder]
    documents = {}
    for name in names:
        document = _read_document(source, f"{folder}/{name}") if name.endswith(SIDECAR_SUFFIX) else None
        if document is not None and document.get("format") == FORMAT:
            documents[str(document.get("site"))] = document
    if not documents:
        return None
    first = next(iter(documents.values()))
    sidecar = read_sidecar(first, folder)
    if sorted(documents) != sorted(sidecar.sites):
        raise CaptureFileError(f"{folder}: partial: sites {sorted(documents)} of {sorted(sidecar.sites)}")
    if any(document.get(key) != first.get(key) for document in documents.values() for key in _SHARED):
        raise CaptureFileError(f"{folder}: damaged: the sidecars of its sites contradict each other")
    columns = {key: _column(first, key, sidecar.num_rows, folder) for key in (POSITIONS, TOKEN_IDS)}
    tensors = {name: _tensor_ref(source, folder, sidecar, name) for name in sidecar.sites}
    return StoredStage(
        layout="raw",
        sidecar=sidecar,
        paths=tuple(ref.path for ref in tensors.values()),
        tensors=tensors,
        positions=columns[POSITIONS],
        token_ids=columns[TOKEN_IDS],
    )


_SHARED = ("engine_request_id", "num_rows", "hidden_size", "dtype", "shapes", POSITIONS, TOKEN_IDS)
"""Fields on which all sidecars of a folder must agree."""


def _read_document(source: Source, path: str) -> dict[str, Any]:
    text = source.read(path, 0, source.size(path))
    with refusing(path, CaptureFileError, "partial or damaged"):
        document: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    return document


def _column(document: Mapping[str, Any], key: str, num_rows: int, folder: str) -> Int64Array:
    with refusing(folder, CaptureFileError, f"damaged: {key}"):
        values = np.array(msgspec.convert(document.get(key), list[int]), dtype=np.int64)
    if len(values) != num_rows:
        raise CaptureFileError(f"{folder}: damaged: {len(values)} {key} for {num_rows} rows")
    return values


def _tensor_ref(source: Source, folder: str, sidecar: Sidecar, name: str) -> TensorRef:
    path = f"{folder}/{site_file(Site.parse(name))}{DATA_SUFFIX}"
    shape = sidecar.shape(name)
    ref = TensorRef(path, 0, shape.dtype, (sidecar.num_rows, shape.width))
    if source.size(path) != ref.num_bytes:
        raise CaptureFileError(f"{path}: partial: {source.size(path)} bytes of {ref.num_bytes}")
    return ref
