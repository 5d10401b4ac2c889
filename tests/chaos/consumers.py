"""Consumers that fail when a request says so: its ``mood`` tells whether they raise, hang or are slow."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

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
    parse_client_spec,
)
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from tests.chaos.notes import noted

MAX_STALL_S = 2.0
HANG_S = 3.5
SLOW_S = 0.2
MOODS = ("fine", "raise", "hang", "slow")
BROKEN = "broken on purpose"

ENTRY_POINTS = """
[vllm.capture_consumers]
moody = tests.chaos.consumers:Moody
trickle = tests.chaos.consumers:Trickle
"""


def act(request: RequestInfo) -> None:
    """Do what the request's mood says."""
    mood = request.spec.options.get("mood", "fine")
    if mood == "raise":
        raise RuntimeError(BROKEN)
    if mood in ("hang", "slow"):
        threading.Event().wait(HANG_S if mood == "hang" else SLOW_S)


def check_spec(raw: object, context: SpecContext) -> CaptureSpec:
    """A spec with the option ``mood``."""
    spec = parse_client_spec(raw, context, options=("mood",))
    if spec.options.get("mood", "fine") not in MOODS:
        raise RequestError(f"{context.field}.mood", f"expected one of {MOODS}")
    return spec


def plain(positions: Any, rows: Mapping[Site, torch.Tensor], width: int) -> dict[str, Any]:
    """Rows of `width` values as JSON values; `rows_of` reads them."""
    data = {site.name: base64.b64encode(tensor.float().numpy().tobytes()).decode() for site, tensor in rows.items()}
    return {"positions": [int(position) for position in positions], "rows": data, "width": width}


def rows_of(payload: Mapping[str, Any]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Positions, and ``[rows, hidden]`` for each site's name."""
    positions, width = payload["positions"], payload["width"]
    rows = {
        name: torch.from_numpy(np.frombuffer(base64.b64decode(data), np.float32).reshape(len(positions), width).copy())
        for name, data in payload["rows"].items()
    }
    return positions, rows


class Moody(BatchedConsumer):
    """Gives a request's rows back, or fails."""

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return check_spec(raw, context)

    def on_capture(self, captured: CapturedRequest) -> Any:
        with noted(self.context.instance_name):
            act(captured.request)
        return plain(captured.positions, captured.rows, self.context.model.hidden_size)


class Trickle(StreamingConsumer):
    """The same, by and by; it fails while rows are written, and so for every request of that call.

    A call hangs once for each of its spans whose request says so.
    """

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._open: dict[str, dict[Site, list[tuple[Any, torch.Tensor]]]] = {}

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return check_spec(raw, context)

    def begin(self, request: RequestInfo) -> None:
        self._open[request.request_id] = {site: [] for site in request.spec.sites}

    def write(self, blocks: Sequence[RowBlock]) -> None:
        with noted(self.context.instance_name):
            for block in blocks:
                for span in block.spans:
                    act(span.request)
                    self._take(block, span)

    def _take(self, block: RowBlock, span: RowSpan) -> None:
        parts = self._open[span.request.request_id]
        for index, site in enumerate(block.sites):
            if site in parts:
                rows = block.rows[index, span.start : span.stop].clone()
                parts[site].append((block.positions[span.start : span.stop].copy(), rows))

    def finish(self, finished: FinishedRequest) -> Any:
        parts = self._open.pop(finished.request.request_id)
        positions: Any = np.zeros(0, np.int64)
        rows, width = {}, self.context.model.hidden_size
        for site, found in parts.items():
            positions = np.concatenate([np.zeros(0, np.int64), *(one for one, _ in found)])
            is_wanted = positions < finished.final.num_rows
            rows[site] = torch.cat([torch.zeros(0, width), *(one.float() for _, one in found)])[
                torch.from_numpy(is_wanted)
            ]
            positions = positions[is_wanted]
        return plain(positions, rows, width)

    def abandon(self, request: RequestInfo) -> None:
        self._open.pop(request.request_id, None)
