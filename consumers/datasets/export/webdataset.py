"""Export to WebDataset: tar files with one sample for each request."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.sites import Site
from headgate.consumers.datasets.view import RowView, typed
from headgate.consumers.filesystem.storage.store import site_file

TAR_BYTES = 1 << 30


def export_webdataset(view: RowView, folder: Path, *, tar_bytes: int = TAR_BYTES) -> dict[str, Any]:
    """Write ``000000.tar`` and so on.

    The sample of a request is ``{key}.json`` (``request_id``, ``tag``), ``{key}.positions.npy``,
    ``{key}.token_ids.npy`` (int64 ``[rows]``) and for each site ``{key}.12_post_mlp.npy`` ``[rows, hidden]``, float16
    if the model is, else float32.

    Args:
        view: The rows. One request's are in memory at a time.
        folder: Where.
        tar_bytes: Size at which a tar file is full.
    """
    number = 0
    tar: tarfile.TarFile | None = None
    try:
        for index, (request, first, end) in enumerate(view.request_ranges()):
            if tar is None:
                tar = tarfile.open(folder / f"{number:06d}.tar", "w")  # noqa: SIM115  (open over several samples)
            for name, data in _sample(view, request, first, end):
                member = tarfile.TarInfo(f"{index:09d}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
            if tar.offset >= tar_bytes:
                tar.close()
                tar, number = None, number + 1
    finally:
        if tar is not None:
            tar.close()
    return {"format": "webdataset", "rows": len(view), "left_out_rows": 0}


def _sample(view: RowView, request: int, first: int, end: int) -> Iterator[tuple[str, bytes]]:
    numbers = np.arange(first, end, dtype=np.int64)
    yield "json", msgspec.json.encode({"request_id": view.request_id(request), "tag": view.tag(request)})
    yield "positions.npy", _npy(view.positions(numbers))
    yield "token_ids.npy", _npy(view.token_ids(numbers))
    for site, rows in view.read(first, end).items():
        yield f"{site_file(Site.parse(site))}.npy", _npy(typed(rows, view.dtype))


def _npy(array: npt.NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
