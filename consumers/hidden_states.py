"""The consumer of ``return_hidden_states``: the last row of each sample, and nothing else."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Sequence
from typing import Any

from headgate.capture.links.messages import tensor_bytes
from headgate.capture.schema.consumer import FinishedRequest, RequestInfo, RowBlock, StreamingConsumer
from headgate.capture.schema.errors import ConsumerError

KEEP_ROWS = 128
"""Rows kept of a running request. Which one is the last is known late: the engine runs ahead while a stop string is
looked for elsewhere, and what it computes meanwhile is discarded."""


class HiddenStatesConsumer(StreamingConsumer):
    """Keeps the last row of the last site that it is given; the payload is ``{"dtype", "shape", "data", "position"}``.

    `data` is the row in base64, ``[hidden]`` in the model's dtype. Without parameters. Requests reach it with
    ``return_hidden_states: true`` alone. Its site, ``final_norm``, is configured along with it.
    """

    location = "worker"
    reads_client_spec = False
    is_awaited = True

    def __init__(self, params: Any, context: Any) -> None:
        super().__init__(params, context)
        self._kept: dict[str, deque[tuple[int, bytes]]] = {}

    def begin(self, request: RequestInfo) -> None:
        self._kept[request.request_id] = deque(maxlen=KEEP_ROWS)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        for block in blocks:
            positions = block.positions.tolist()
            for span in block.spans:
                kept = self._kept[span.request.request_id]
                for row in range(max(span.start, span.stop - KEEP_ROWS), span.stop):
                    kept.append((positions[row], bytes(tensor_bytes(block.rows[-1, row]))))

    def finish(self, finished: FinishedRequest) -> dict[str, Any] | None:
        kept = self._kept.pop(finished.request.request_id)
        if not finished.request.spec.sites:
            return None  # the site belongs to another pipeline stage
        last = finished.final.num_rows - 1
        for position, data in reversed(kept):
            if position == last:
                model = self.context.model
                text = base64.b64encode(data).decode("ascii")
                return {"dtype": model.dtype, "shape": [model.hidden_size], "data": text, "position": position}
        if kept and kept[0][0] > last:
            raise ConsumerError(
                f"the engine ran {kept[-1][0] - last} tokens past the end of request "
                f"{finished.request.client_request_id} before it was told; {KEEP_ROWS} are kept. Stop tokens "
                "(stop_token_ids) end a request at once, where stop strings do not"
            )
        return None  # aborted before its last row was computed

    def abandon(self, request: RequestInfo) -> None:
        self._kept.pop(request.request_id, None)

    def close(self, timeout_s: float) -> None:
        self._kept.clear()
