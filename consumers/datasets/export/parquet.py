"""Rows as Arrow tables and Parquet files, which Hugging Face, Ray Data, Polars and DuckDB read by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headgate.consumers.datasets.batches import RowBatch, check_positive, plain_batches
from headgate.consumers.datasets.view import RowView

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS = 4096
FILE_ROWS = 262_144


def arrow_batches(view: RowView, batch_rows: int = _BATCH_ROWS) -> Iterator[pa.RecordBatch]:
    """All rows in order as record batches. Needs the package ``pyarrow``.

    Columns: ``request_id`` and ``tag`` (text), ``position`` and ``token_id`` (int64), and one for each site by its
    name, a list of `hidden_size` values: float16 if the model is, else float32.
    """
    import pyarrow as pa

    schema = _schema(view)
    for batch in plain_batches(view, batch_rows):
        columns = [
            pa.array(batch.request_ids, pa.string()),
            pa.array(batch.tags, pa.string()),
            pa.array(batch.positions),
            pa.array(batch.token_ids),
            *(_rows(batch, site) for site in view.sites),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def export_parquet(view: RowView, folder: Path, *, file_rows: int = FILE_ROWS) -> dict[str, Any]:
    """Write ``part-00000.parquet`` and so on, with the columns of `arrow_batches`.

    Args:
        view: The rows.
        folder: Where.
        file_rows: Rows in a file; all but the last have so many, rounded up to a batch.
    """
    import pyarrow.parquet as pq

    check_positive(file_rows, "file_rows")
    number = written = 0
    writer: Any = None
    try:
        for batch in arrow_batches(view):
            if writer is None:
                writer = pq.ParquetWriter(folder / f"part-{number:05d}.parquet", batch.schema, compression="zstd")
            writer.write_batch(batch)
            written += batch.num_rows
            if written >= file_rows:
                writer.close()
                writer, number, written = None, number + 1, 0
    finally:
        if writer is not None:
            writer.close()
    return {"format": "parquet", "rows": len(view), "left_out_rows": 0}


def _schema(view: RowView) -> pa.Schema:
    import pyarrow as pa

    kind = pa.float16() if view.dtype == "float16" else pa.float32()
    facts = [("request_id", pa.string()), ("tag", pa.string()), ("position", pa.int64()), ("token_id", pa.int64())]
    return pa.schema([*facts, *((site, pa.list_(kind, view.hidden_size)) for site in view.sites)])


def _rows(batch: RowBatch, site: str) -> pa.Array:
    import pyarrow as pa

    values = np.ascontiguousarray(batch.numpy(site)).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(values), batch.view.hidden_size)
