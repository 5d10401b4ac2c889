"""The consumer that sends small captures back with the answer."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from headgate.capture.delivery.request_assembler import Assembler
from headgate.capture.schema.config import MIB
from headgate.capture.schema.consumer import (
    BatchedConsumer,
    CapturedRequest,
    ConsumerContext,
    FinishedRequest,
    RequestInfo,
    RowBlock,
    RowSpan,
    SpecContext,
    StreamingConsumer,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.capture.schema.spec import CaptureSpec
from headgate.capture.transport.messages import DTYPES, array_bytes, tensor_bytes
from headgate.consumers.filesystem.formats.sidecar import POSITIONS, TOKEN_IDS, sidecar_of
from headgate.consumers.filesystem.formats.tensor_file import header

TAG = "inline"


class InlineParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the inline consumer.

    Attributes:
        max_bytes: Rows of one sample, over all sites; a request that captures more gets an error in place of them.
            In the answer they take a third more.
    """

    max_bytes: int = MIB


class InlineConsumer(StreamingConsumer):
    """Returns each sample's rows in the answer: ``{"format": "safetensors", "num_bytes", "data": base64}``.

    Decoded, `data` is the file that the filesystem consumer writes in its layout ``request``: a tensor a site,
    ``[rows, hidden]`` in the model's dtype, ``positions`` and ``token_ids``. `InlineParams` lists the parameters.
    """

    location = "driver"
    is_awaited = True

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._max_bytes = _parse(params).max_bytes
        self._row_bytes = context.model.hidden_size * DTYPES[context.model.dtype].itemsize
        self._taken: dict[str, int] = {}  # bytes of each running request, also of those that are too many
        self._rows = Assembler(_Encode({}, context))

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        _parse(params)

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        spec = super().validate_client_spec(raw, context)
        return replace(spec, options={"tag": TAG, "request_id": context.client_request_id})

    def begin(self, request: RequestInfo) -> None:
        self._taken[request.request_id] = 0
        self._rows.begin(request)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        for block in blocks:
            spans = tuple(span for span in block.spans if self._has_room(span, block))
            self._rows.write([replace(block, spans=spans)])

    def finish(self, finished: FinishedRequest) -> Any:
        num_bytes = self._taken.pop(finished.request.request_id)
        if num_bytes > self._max_bytes:
            raise ConsumerError(
                f"{num_bytes} bytes of rows are more than an answer may hold here, {self._max_bytes} (parameter "
                "max_bytes); ask for fewer sites or positions, or capture to files"
            )
        return self._rows.finish(finished)

    def abandon(self, request: RequestInfo) -> None:
        self._taken.pop(request.request_id, None)
        self._rows.abandon(request)

    def close(self, timeout_s: float) -> None:
        self._taken.clear()
        self._rows.close(timeout_s)

    def _has_room(self, span: RowSpan, block: RowBlock) -> bool:
        """Count the rows of `span`; once they are too many, let go of all that the request has."""
        request = span.request
        before = self._taken[request.request_id]
        now = before + (span.stop - span.start) * len(block.sites) * self._row_bytes
        self._taken[request.request_id] = now
        if now > self._max_bytes >= before:
            self._rows.abandon(request)
        return now <= self._max_bytes


class _Encode(BatchedConsumer):
    """What the assembler hands whole requests to."""

    def on_capture(self, captured: CapturedRequest) -> dict[str, Any]:
        data = encode(captured, self.context)
        return {"format": "safetensors", "num_bytes": len(data), "data": base64.b64encode(data).decode("ascii")}


def encode(captured: CapturedRequest, context: ConsumerContext) -> bytes:
    """One sample's rows as the bytes of a safetensors file."""
    model, num_rows = context.model, len(captured.positions)
    finished = FinishedRequest(request=captured.request, final=captured.final, dropped_rows=captured.dropped_rows)
    sidecar = sidecar_of(
        finished,
        context,
        num_rows=num_rows,
        num_prefill_rows=int(np.count_nonzero(captured.is_prefill)),
        name=captured.request.client_request_id,
    )
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        POSITIONS: ("int64", (num_rows,)),
        TOKEN_IDS: ("int64", (num_rows,)),
        **dict.fromkeys(sidecar.sites, (model.dtype, (num_rows, model.hidden_size))),
    }
    rows = [tensor_bytes(captured.rows[site]) for site in captured.sites] if num_rows else []
    ids = [array_bytes(captured.positions), array_bytes(captured.token_ids)]
    return b"".join([header(tensors, sidecar.to_strings()), *ids, *rows])


def _parse(params: Mapping[str, Any]) -> InlineParams:
    try:
        parsed = msgspec.convert(dict(params), InlineParams)
    except msgspec.ValidationError as error:
        raise ConfigError(f"inline: {error}") from error
    if parsed.max_bytes < 1:
        raise ConfigError(f"inline: max_bytes must be at least 1, got {parsed.max_bytes}")
    return parsed
