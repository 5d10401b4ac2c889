"""Layout ``request``: ``{root}/{tag}/{request_id}.safetensors``, one file per request.

Tensors: ``positions`` and ``token_ids``, int64 ``[rows]``, and one per site, ``12.post_mlp`` or ``final_norm``,
``[rows, hidden]`` in the model's dtype. Metadata: the fields of `Sidecar`.
"""

from __future__ import annotations

from collections.abc import Iterator

from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import Site
from headgate.consumers.filesystem.formats.layout import Finished, Stored, StoredPart, payload_of
from headgate.consumers.filesystem.formats.sidecar import FORMAT, POSITIONS, TOKEN_IDS, sidecar_from_strings
from headgate.consumers.filesystem.formats.tensor_file import header, read_header
from headgate.consumers.filesystem.storage.names import Target
from headgate.consumers.filesystem.storage.source import Source
from headgate.consumers.filesystem.storage.store import Store
from headgate.consumers.filesystem.writing.spool import bytes_of

SUFFIX = ".safetensors"


class RequestLayout:
    """Writes one safetensors file per request; see `Layout`."""

    def __init__(self, store: Store, *, durable: bool | None) -> None:
        self._store = store
        self._durable = durable

    def check_free(self, target: Target) -> None:
        self._store.check_free(target, SUFFIX)

    def store(self, finished: Finished) -> Stored:
        published = self._store.publish_file(finished.target, SUFFIX, _buffers(finished))
        return Stored(payload_of("request", finished, published, durable=self._durable), published.settling)

    def close(self) -> None:
        """Nothing stays open."""


def _buffers(finished: Finished) -> Iterator[memoryview]:
    sidecar, num_rows = finished.sidecar, finished.rows.num_rows
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        POSITIONS: ("int64", (num_rows,)),
        TOKEN_IDS: ("int64", (num_rows,)),
        **dict.fromkeys(sidecar.sites, (sidecar.dtype, (num_rows, sidecar.hidden_size))),
    }
    yield memoryview(header(tensors, sidecar.to_strings()))
    yield bytes_of(finished.rows.positions)
    yield bytes_of(finished.token_ids)
    for site in sidecar.sites:
        yield from finished.rows.buffers(Site.parse(site))


def read_request_file(source: Source, path: str) -> StoredPart | None:
    """Read a file of this layout; None if it is a whole safetensors file of somebody else.

    Raises:
        CaptureFileError: If it is partial or damaged.
    """
    tensors, metadata = read_header(source, path)
    if metadata.get("format") != FORMAT:
        return None
    sidecar = sidecar_from_strings(metadata, path)
    expected: dict[str, tuple[int, ...]]
    expected = dict.fromkeys(sidecar.sites, (sidecar.num_rows, sidecar.hidden_size))
    expected |= {POSITIONS: (sidecar.num_rows,), TOKEN_IDS: (sidecar.num_rows,)}
    found = {name: ref.shape for name, ref in tensors.items()}
    if found != expected:
        raise CaptureFileError(f"{path}: damaged: tensors {found}, metadata says {expected}")
    positions, token_ids = tensors.pop(POSITIONS), tensors.pop(TOKEN_IDS)
    return StoredPart(
        layout="request", sidecar=sidecar, paths=(path,), tensors=tensors, positions=positions, token_ids=token_ids
    )
