"""A headgate consumer that steers: it ends answers that go round in circles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headgate.capture import (
    CaptureSpec,
    ConfigError,
    ConsumerContext,
    FinishedRequest,
    RequestInfo,
    RowBlock,
    Site,
    SpecContext,
    StreamingConsumer,
    parse_client_spec,
    site_map,
)
from headgate.steering.controllers import Stop

__all__ = ["LoopGuard"]


class LoopGuard(StreamingConsumer):
    """Ends a request when so many of its generated rows in a row are nearly equal to earlier ones.

    A controller reads scores; this needs the rows themselves. Parameters: ``site``; ``similarity``, the cosine from
    which a row counts as repeated (0.99); ``patience``, rows in a row (12). A request asks with ``{}``, and its payload
    says whether it was ended.
    """

    location = "worker"  # rows never leave the machine's memory
    linger_s = 0.0  # a late decision is of no use

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._similarity, self._patience = float(params.get("similarity", 0.99)), int(params.get("patience", 12))
        self._rows: dict[str, torch.Tensor] = {}
        self._in_a_row: dict[str, int] = {}
        self._ended: set[str] = set()

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        if unknown := sorted(set(params) - {"site", "similarity", "patience"}):
            raise ConfigError(f"loop_guard: unknown parameter {unknown[0]!r}; known: site, similarity, patience")
        if "site" not in params:
            raise ConfigError("loop_guard: needs site, such as 12.post_mlp")

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        hooks = site_map([Site.parse(context.params["site"])])
        return parse_client_spec({"hooks": hooks, "positions": "all_generated"}, context, options=())

    def begin(self, request: RequestInfo) -> None:
        self._rows[request.request_id], self._in_a_row[request.request_id] = torch.empty(0), 0

    def write(self, blocks: Sequence[RowBlock]) -> None:
        for block in blocks:
            for span in block.spans:
                for row in block.rows[0, span.start : span.stop].float():
                    self._look_at(span.request.request_id, torch.nn.functional.normalize(row, dim=0))

    def _look_at(self, request_id: str, row: torch.Tensor) -> None:
        known = self._rows[request_id]
        is_known = len(known) > 0 and float((known @ row).max()) >= self._similarity
        self._rows[request_id] = torch.cat([known.reshape(-1, len(row)), row[None]])
        self._in_a_row[request_id] = self._in_a_row[request_id] + 1 if is_known else 0
        is_due = self._in_a_row[request_id] >= self._patience and request_id not in self._ended
        # It is not taken if the engine has no room for it now: then the next row asks again.
        if is_due and self.context.steering.submit(Stop(request_id, "goes round in circles")):
            self._ended.add(request_id)

    def finish(self, finished: FinishedRequest) -> Any:
        request_id = finished.request.request_id
        was_ended = request_id in self._ended
        self.abandon(finished.request)
        return {"ended": was_ended}

    def abandon(self, request: RequestInfo) -> None:
        self._rows.pop(request.request_id, None)
        self._in_a_row.pop(request.request_id, None)
        self._ended.discard(request.request_id)
