"""The consumer that sends small captures back with the answer."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from headgate.capture.delivery.request_assembler import RequestCollector
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import (
    CapturedRequest,
    ConsumerContext,
    FinishedRequest,
    RequestInfo,
    RowBlock,
    RowSpan,
    SpecContext,
    StreamingConsumer,
    parse_client_spec,
    read_params,
)
from headgate.capture.schema.errors import CaptureFileError, ConsumerError, RequestError, shown
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem.formats.layout import POSITIONS, TOKEN_IDS, sidecar_of
from headgate.consumers.memory import rows_at

TAG = "inline"
ROUTED_EXPERTS = "routed_experts"
"""The layout, and its one tensor: the experts of all layers as trainers replay them."""
MAX_CALLS = 4096
"""Calls that are remembered beside the calls with running requests."""


class InlineParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the inline consumer.

    Attributes:
        max_bytes: Bytes of rows in one HTTP answer, all its prompts, samples and sites together (for `LLM`, of one
            prompt). A sample whose rows do not fit gets an error instead. In base64 they take a third more.
    """

    max_bytes: int = 1 << 20


class InlineConsumer(StreamingConsumer):
    """Returns each sample's rows in the answer: ``{"format": "safetensors", "num_bytes", "data": base64}``.

    Decoded, `data` is a file as the filesystem consumer writes it in its layout ``request``: a tensor a site,
    ``[rows, width]`` in the site's dtype, ``positions`` and ``token_ids``. `InlineParams` lists the parameters. With
    ``"layout": "routed_experts"`` the sites, all of them `HookPoint.EXPERTS`, are one tensor of that name, int16
    ``[rows, layers, k]``.
    """

    location = "driver"
    takes_columns = True
    is_awaited = True

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._sizes = CallSizes(_parse(params).max_bytes)
        self._rows = RequestCollector(context.model, self._encode)

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        _parse(params)

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        spec = parse_client_spec(raw, context, options=("layout",))
        field, layout = f"{context.field}.layout", spec.options.get("layout")
        if layout not in (None, ROUTED_EXPERTS):
            raise RequestError(field, f"expected {ROUTED_EXPERTS!r}, or no layout, got {shown(layout)}")
        others = [site.name for site in spec.sites if site.hook is not HookPoint.EXPERTS]
        if layout is not None and others:
            raise RequestError(field, f"{ROUTED_EXPERTS} has the hook point experts alone, not {shown(others[0])}")
        return replace(spec, options={**spec.options, "tag": TAG, "request_id": context.client_request_id})

    def begin(self, request: RequestInfo) -> None:
        self._sizes.begin(request)
        self._rows.begin(request)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        self._rows.write(blocks, self._has_room)

    def finish(self, finished: FinishedRequest) -> Any:
        if not self._sizes.end(finished.request):
            raise ConsumerError(
                "these rows, with those of the call's other prompts and samples, are more than an answer may hold "
                f"here, {self._sizes.max_bytes} bytes (parameter max_bytes); ask for fewer sites, positions or "
                "samples, or capture to files"
            )
        return self._rows.finish(finished)

    def abandon(self, request: RequestInfo) -> None:
        self._sizes.end(request, is_sent=False)
        self._rows.abandon(request)

    def close(self, timeout_s: float) -> None:
        self._rows.close(timeout_s)

    def _encode(self, captured: CapturedRequest) -> dict[str, Any]:
        data = encode(captured, self.context)
        return {"format": "safetensors", "num_bytes": len(data), "data": base64.b64encode(data).decode("ascii")}

    def _has_room(self, span: RowSpan, block: RowBlock) -> bool:
        """Count the rows of `span`; if they are too many, discard all that the request has."""
        if not self._sizes.has_room(span.request):
            return False
        fits = self._sizes.add(span.request, (span.stop - span.start) * len(block.sites) * block.row_bytes)
        if not fits:
            self._rows.abandon(span.request)
        return fits


@dataclass(slots=True)
class _CallSize:
    num_bytes: int = 0
    num_running: int = 0


class CallSizes:
    """Counts the bytes of each HTTP call, over its prompts and samples. Used by one thread.

    How many requests a call will have is unknown here. So a call without running requests is remembered for a while, up
    to `MAX_CALLS`: its next prompts may have to wait for a place in the batch.

    Args:
        max_bytes: Of one call; a request that would pass it gets none of its rows.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._running: dict[str, _CallSize] = {}
        self._idle: OrderedDict[str, _CallSize] = OrderedDict()
        self._requests: dict[str, int | None] = {}  # bytes of each running request; None if it had no room

    def begin(self, request: RequestInfo) -> None:
        """Count a request that begins."""
        name = _call_of(request)
        if name not in self._running:
            self._running[name] = self._idle.pop(name) if name in self._idle else _CallSize()
        self._running[name].num_running += 1
        self._requests[request.request_id] = 0

    def has_room(self, request: RequestInfo) -> bool:
        """Whether all rows of a running request fitted so far."""
        return self._requests[request.request_id] is not None

    def add(self, request: RequestInfo, num_bytes: int) -> bool:
        """Count rows of a request that `has_room`; False if they do not fit: none of its rows counts any more."""
        call = self._running[_call_of(request)]
        before = self._requests[request.request_id] or 0
        fits = call.num_bytes + num_bytes <= self.max_bytes
        call.num_bytes += num_bytes if fits else -before
        self._requests[request.request_id] = before + num_bytes if fits else None
        return fits

    def end(self, request: RequestInfo, *, is_sent: bool = True) -> bool:
        """A request has ended; its rows stay counted if they are sent. Returns `has_room`. May be called again."""
        if request.request_id not in self._requests:
            return True
        num_bytes = self._requests.pop(request.request_id)
        name = _call_of(request)
        call = self._running[name]
        if not is_sent:
            call.num_bytes -= num_bytes or 0
        call.num_running -= 1
        if not call.num_running:
            self._idle[name] = self._running.pop(name)
            if len(self._idle) > MAX_CALLS:
                self._idle.popitem(last=False)
        return num_bytes is not None


def _call_of(request: RequestInfo) -> str:
    return request.client_request_id if request.origin is None else request.origin.call


def encode(captured: CapturedRequest, context: ConsumerContext) -> bytes:
    """One sample's rows as the bytes of a safetensors file."""
    model, num_rows = context.model, len(captured.positions)
    sidecar = sidecar_of(
        captured,
        context,
        positions=captured.positions,
        num_prefill_rows=int(np.count_nonzero(captured.is_prefill)),
        name=captured.request.client_request_id,
    )
    tensors = {POSITIONS: torch.from_numpy(captured.positions), TOKEN_IDS: torch.from_numpy(captured.token_ids)}
    if captured.request.spec.options.get("layout") == ROUTED_EXPERTS:
        tensors[ROUTED_EXPERTS] = torch.stack([captured.rows[site] for site in captured.sites], dim=1)
        return bytes(save(tensors, metadata=sidecar.to_strings()))
    for site in captured.sites:
        # A copy: sites may be views of one block, and the library refuses tensors that share memory.
        tensors[site.name] = captured.rows[site].reshape(num_rows, captured.request.shape(site, model).width).clone()
    data: bytes = save(tensors, metadata=sidecar.to_strings())
    return data


class InlineRows:
    """The rows of one sample, from a payload of the consumer `inline`; implements `FetchedRows`.

    ``rows["12.post_mlp"]`` is a tensor ``[num_rows, width]`` in the site's dtype; aliases and `Site` work too.

    Attributes:
        sites: In the order of the forward pass.
        positions: int64 ``[num_rows]``, ascending.
        token_ids: int64 ``[num_rows]``: the token whose forward gave the row.
    """

    def __init__(self, data: bytes) -> None:
        length = int.from_bytes(data[:8], "little")
        about = msgspec.json.decode(data[8 : 8 + length])["__metadata__"]
        tensors = load(data)
        self.sites = tuple(Site.parse(name) for name in msgspec.json.decode(about["sites"]))
        self.positions: Int64Array = tensors.pop(POSITIONS).numpy()
        self.token_ids: Int64Array = tensors.pop(TOKEN_IDS).numpy()
        if ROUTED_EXPERTS in tensors:
            tensors |= {
                site.name: rows for site, rows in zip(self.sites, tensors[ROUTED_EXPERTS].unbind(1), strict=True)
            }
        self._rows: dict[Site, torch.Tensor] = {site: tensors[site.name] for site in self.sites}

    def __len__(self) -> int:
        """Rows per site."""
        return len(self.positions)

    def __iter__(self) -> Iterator[Site]:
        """The sites, in the order of the forward pass."""
        return iter(self.sites)

    def __getitem__(self, site: Site | str) -> torch.Tensor:
        """``[num_rows, hidden]`` of one site.

        Raises:
            KeyError: If it was not captured; the message lists the captured ones.
        """
        return rows_at(self._rows, site)


def fetch_rows(payload: Mapping[str, Any]) -> InlineRows:
    """Return the rows in the payload of one sample's result, from an `LLM` or out of an answer over HTTP.

    Raises:
        CaptureFileError: If it is no payload of the consumer `inline`, or damaged.
    """
    try:
        return InlineRows(base64.b64decode(payload["data"], validate=True))
    except (TypeError, KeyError, ValueError, SafetensorError, msgspec.MsgspecError) as error:
        what = "expected a payload of the consumer 'inline'"
        raise CaptureFileError(f"{what}, got {shown(payload)}: {error!r}") from error


def _parse(params: Mapping[str, Any]) -> InlineParams:
    return read_params(InlineParams, params, "inline", max_bytes=1)
