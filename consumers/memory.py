"""The consumer that keeps rows in RAM, for notebooks and tests."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.delivery.request_assembler import Assembler
from headgate.capture.schema.config import GIB
from headgate.capture.schema.consumer import (
    BatchedConsumer,
    CapturedRequest,
    ConsumerContext,
    FinishedRequest,
    RequestInfo,
    RowBlock,
    RowSpan,
    StreamingConsumer,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.capture.schema.sites import Site


class MemoryParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the memory consumer.

    Attributes:
        max_bytes: RAM that rows may take: those of running requests and those of results that are still in use.
    """

    max_bytes: int = 4 * GIB


class CapturedRows:
    """The payload of the memory consumer: one request's rows.

    ``rows["12.post_mlp"]`` is a tensor ``[num_rows, hidden]`` in the model's dtype; aliases and `Site` work too.

    Attributes:
        request_id: The id of the request in its API.
        sample_index: Which of its ``n`` samples.
        sites: In the order of the forward pass.
        rows: The tensors by site.
        positions: int64 ``[num_rows]``, ascending.
        token_ids: int64 ``[num_rows]``: the token whose forward gave the row.
        is_prefill: bool ``[num_rows]``: True where that token was part of the prompt.
        num_prompt_tokens: Length of the prompt.
        status: How the request ended: ``stop``, ``length``, ``abort`` ...
        dropped_rows: Rows that overload kept from it.
    """

    def __init__(self, captured: CapturedRequest) -> None:
        self.request_id = captured.request.client_request_id
        self.sample_index = captured.request.sample_index
        self.sites = captured.sites
        self.rows = captured.rows
        self.positions = captured.positions
        self.token_ids = captured.token_ids
        self.is_prefill = captured.is_prefill
        self.num_prompt_tokens = captured.final.num_prompt_tokens
        self.status = captured.final.status
        self.dropped_rows = captured.dropped_rows

    def __repr__(self) -> str:
        return f"<CapturedRows of {self.request_id}: {len(self)} rows of {', '.join(s.name for s in self.sites)}>"

    def __len__(self) -> int:
        """Rows per site."""
        return len(self.positions)

    def __getitem__(self, site: Site | str) -> Tensor:
        """``[num_rows, hidden]`` of one site.

        Raises:
            KeyError: If it was not captured; the message lists those that were.
        """
        try:
            return self.rows[site if isinstance(site, Site) else Site.parse(site)]
        except (KeyError, ValueError):
            raise KeyError(f"{site}: not captured; there are {', '.join(s.name for s in self.sites)}") from None

    def numpy(self, site: Site | str) -> npt.NDArray[Any]:
        """The same as numpy; bfloat16 becomes float32, which holds it exactly."""
        rows = self[site]
        array: npt.NDArray[Any] = (rows.float() if rows.dtype is torch.bfloat16 else rows).numpy()
        return array

    def summary(self) -> dict[str, Any]:
        """The payload in JSON values: everything but the rows."""
        return {
            "num_rows": len(self),
            "shapes": {site.name: list(self.rows[site].shape) for site in self.sites},
            "num_prefill_rows": int(self.is_prefill.sum()),
            "num_prompt_tokens": self.num_prompt_tokens,
            "status": self.status,
            "dropped_rows": self.dropped_rows,
        }


class MemoryConsumer(StreamingConsumer):
    """Keeps the rows of every request in RAM; the payload is a `CapturedRows`, which over HTTP is its summary.

    `MemoryParams` lists the parameters. A request that would pass `max_bytes` ends with an error and gives its memory
    back at once; the memory of a payload comes free when nobody holds it any more.
    """

    location = "driver"

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._max_bytes = _parse(params).max_bytes
        self._used = _Usage()
        self._taken: dict[str, int] = {}  # bytes of each running request
        self._too_large: set[str] = set()
        self._rows = Assembler(_Wrap({}, context))

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        _parse(params)

    def begin(self, request: RequestInfo) -> None:
        self._taken[request.request_id] = 0
        self._rows.begin(request)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        for block in blocks:
            spans = tuple(span for span in block.spans if self._reserve(span, block))
            self._rows.write([replace(block, spans=spans)])

    def finish(self, finished: FinishedRequest) -> CapturedRows:
        request = finished.request
        if request.request_id in self._too_large:
            self._too_large.discard(request.request_id)
            raise ConsumerError(
                f"the rows of request {request.client_request_id} do not fit: max_bytes is {self._max_bytes}, other "
                f"requests and results that are still in use hold {self._used.num_bytes}; capture less, let go of "
                "earlier results, or raise max_bytes"
            )
        num_bytes = self._taken.pop(request.request_id)
        try:
            payload: CapturedRows = self._rows.finish(finished)
        except BaseException:
            self._used.add(-num_bytes)
            raise
        weakref.finalize(payload, self._used.add, -num_bytes)
        return payload

    def abandon(self, request: RequestInfo) -> None:
        self._too_large.discard(request.request_id)
        self._release(request)

    def close(self, timeout_s: float) -> None:
        self._taken.clear()
        self._rows.close(timeout_s)

    def _reserve(self, span: RowSpan, block: RowBlock) -> bool:
        """Take memory for the rows of `span`; if that is too much, release all that the request has."""
        request_id = span.request.request_id
        if request_id in self._too_large:
            return False
        model = self.context.model
        row_bytes = model.hidden_size * getattr(torch, model.dtype).itemsize
        num_bytes = (span.stop - span.start) * len(block.sites) * row_bytes
        if self._used.num_bytes + num_bytes > self._max_bytes:
            self._too_large.add(request_id)
            self._release(span.request)
            return False
        self._used.add(num_bytes)
        self._taken[request_id] += num_bytes
        return True

    def _release(self, request: RequestInfo) -> None:
        self._used.add(-self._taken.pop(request.request_id, 0))
        self._rows.abandon(request)


class _Wrap(BatchedConsumer):
    """Receives whole requests from the assembler and wraps them."""

    def on_capture(self, captured: CapturedRequest) -> CapturedRows:
        return CapturedRows(captured)


class _Usage:
    """Bytes in use. Payloads give theirs back on whatever thread drops them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lock = threading.RLock()  # reentrant: a garbage collection inside `add` may drop a payload

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes


def _parse(params: Mapping[str, Any]) -> MemoryParams:
    try:
        parsed = msgspec.convert(dict(params), MemoryParams)
    except msgspec.ValidationError as error:
        raise ConfigError(f"memory: {error}") from error
    if parsed.max_bytes < 1:
        raise ConfigError(f"memory: max_bytes must be at least 1, got {parsed.max_bytes}")
    return parsed
