"""Export to ``.npy``: one array for each site, and what belongs to its rows in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headgate.capture.schema.sites import Site
from headgate.consumers.datasets.batches import plain_batches
from headgate.consumers.datasets.view import RowView
from headgate.consumers.filesystem.storage.store import site_file

_BATCH_ROWS = 4096


def export_npy(view: RowView, folder: Path) -> dict[str, Any]:
    """Write ``{site}.npy`` ``[rows, hidden]``, ``positions.npy``, ``token_ids.npy`` and ``requests.jsonl``.

    Rows are float16 if the model is, else float32; row i of every array is one token. A line of ``requests.jsonl`` has
    a request's ``request_id``, ``tag`` and ``rows``, their first and end.

    Raises:
        ValueError: If there are no rows.
    """
    if not len(view):
        raise ValueError("no rows are selected: there is nothing to export")
    kind = np.float16 if view.dtype == "float16" else np.float32
    arrays = {
        site: _new_array(folder / f"{site_file(Site.parse(site))}.npy", kind, len(view), view.hidden_size)
        for site in view.sites
    }
    columns = {name: _new_array(folder / f"{name}.npy", np.int64, len(view)) for name in ("positions", "token_ids")}
    for batch in plain_batches(view, _BATCH_ROWS):
        where = slice(int(batch.numbers[0]), int(batch.numbers[-1]) + 1)
        for site, array in arrays.items():
            array[where] = batch.numpy(site)
        columns["positions"][where] = batch.positions
        columns["token_ids"][where] = batch.token_ids
    for array in (*arrays.values(), *columns.values()):
        array.flush()
    with (folder / "requests.jsonl").open("wb") as file:
        for request, first, end in view.request_ranges():
            line = {"request_id": view.request_id(request), "tag": view.tag(request), "rows": [first, end]}
            file.write(msgspec.json.encode(line) + b"\n")
    return {"format": "npy", "rows": len(view), "left_out_rows": 0}


def _new_array(path: Path, kind: Any, *shape: int) -> np.memmap[Any, Any]:
    """A file of zeros, mapped for writing."""
    made: np.memmap[Any, Any] = np.lib.format.open_memmap(path, "w+", kind, shape)  # type: ignore[no-untyped-call]
    return made
