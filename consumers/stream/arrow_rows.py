"""Rows as Arrow: each batch is a whole stream in Arrow's IPC format, with its schema, that any Arrow library reads.

Columns: ``request_id`` and ``tag`` (text), ``sample`` (int32), ``position`` and ``token_id`` (int64), ``is_prompt``
(bool), and one for each site, lists of ``hidden_size`` values. Arrow has no bfloat16: its bits are uint16, as the
field's metadata ``dtype`` says. All rows of a batch are of one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.consumer import CapturedRequest
from headgate.consumers.stream.wire import StreamError

Bytes = npt.NDArray[np.uint8]
_FACTS = ("request_id", "tag", "sample", "position", "token_id", "is_prompt")
_NUMPY = {"bfloat16": "uint16", "float16": "float16", "float32": "float32"}
"""The type that the values of each dtype have in Arrow and numpy."""


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The part that all rows of a request share.

    Attributes:
        request_id: The client's, or the front end's.
        tag: Its tag.
        sample: Which of its samples.
    """

    request_id: str
    tag: str
    sample: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRows:
    """Rows of one request.

    Attributes:
        number: Of their batch.
        facts: Of the request.
        positions: int64 ``[rows]``.
        token_ids: int64 ``[rows]``.
        is_prefill: bool ``[rows]``.
        data: uint8 ``[rows, row_bytes]`` by site.
    """

    number: int
    facts: RequestFacts
    positions: Int64Array
    token_ids: Int64Array
    is_prefill: BoolArray
    data: Mapping[str, Bytes]

    def __len__(self) -> int:
        return len(self.positions)

    def part(self, start: int, stop: int) -> RequestRows:
        """Rows ``start : stop``; nothing is copied."""
        rows = slice(start, stop)
        return replace(
            self,
            positions=self.positions[rows],
            token_ids=self.token_ids[rows],
            is_prefill=self.is_prefill[rows],
            data={site: values[rows] for site, values in self.data.items()},
        )


def encode(captured: CapturedRequest, dtype: str, start: int, stop: int) -> memoryview:
    """Rows ``start : stop`` of a request as the bytes of a batch."""
    import pyarrow as pa
    import torch

    rows, count = slice(start, stop), stop - start
    request = captured.request
    name = request.client_request_id.encode("utf-8", "replace").decode()
    texts = {"request_id": name, "tag": str(request.spec.options["tag"])}
    zeros = pa.array(np.zeros(count, np.int32))
    columns: dict[str, Any] = {
        key: pa.DictionaryArray.from_arrays(zeros, pa.array([text])) for key, text in texts.items()
    }
    columns["sample"] = pa.array(np.full(count, request.sample_index, np.int32))
    columns["position"] = pa.array(captured.positions[rows])
    columns["token_id"] = pa.array(captured.token_ids[rows])
    columns["is_prompt"] = pa.array(captured.is_prefill[rows])
    fields = [pa.field(key, column.type) for key, column in columns.items()]
    for site in captured.sites:
        bits = captured.rows[site][rows].contiguous().view(torch.uint8).numpy()
        values = bits.reshape(-1).view(_NUMPY[dtype])
        columns[site.name] = pa.FixedSizeListArray.from_arrays(pa.array(values), len(values) // count)
        fields.append(pa.field(site.name, columns[site.name].type, metadata={"dtype": dtype}))
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return memoryview(sink.getvalue())


def decode(content: memoryview, number: int, dtype: str) -> RequestRows:
    """Read the bytes of a batch; rows are views of them.

    Raises:
        StreamError: If they are no batch of a stream with rows of that dtype.
    """
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(pa.py_buffer(content)) as stream:
            batch = stream.read_next_batch()
        batch.validate()
        columns = {name: batch.column(name) for name in _FACTS}
        names = [field.name for field in batch.schema if field.name not in _FACTS]
        facts = {name: columns[name][0].as_py() for name in ("request_id", "tag", "sample")}
        return RequestRows(
            number=number,
            facts=msgspec.convert(facts, RequestFacts),
            positions=columns["position"].to_numpy(),
            token_ids=columns["token_id"].to_numpy(),
            is_prefill=columns["is_prompt"].to_numpy(zero_copy_only=False),
            data={name: _bits(batch.column(name), dtype) for name in names},
        )
    except (pa.ArrowException, msgspec.ValidationError, LookupError, ValueError) as error:
        raise StreamError(f"batch {number}: no rows of {dtype}: {error}") from error


def _bits(column: Any, dtype: str) -> Bytes:
    values = column.flatten().to_numpy()
    if values.dtype != _NUMPY[dtype]:
        raise ValueError(f"values of {values.dtype}")
    bits: Bytes = values.view(np.uint8).reshape(len(column), -1)
    return bits
