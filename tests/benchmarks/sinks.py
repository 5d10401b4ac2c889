"""Consumers that leave work undone: what is left tells what each part of a capture costs; see `servers.SINKS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from headgate.capture.delivery.row_packets import RowPool
from headgate.capture.schema.config import MIB
from headgate.capture.schema.consumer import (
    FinishedRequest,
    RequestInfo,
    RowBlock,
    SpecContext,
    StreamingConsumer,
    parse_client_spec,
)
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem import FilesystemConsumer
from headgate.consumers.filesystem.request_writer import RequestSlice, RequestWriter, chunks_of


class ForgettingConsumer(StreamingConsumer):
    """Takes what the filesystem consumer takes, as seldom, and forgets it."""

    linger_s = FilesystemConsumer.linger_s

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        """Any will do."""

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_client_spec(raw, context, options=("layout", "tag"))

    def write(self, blocks: Sequence[RowBlock]) -> None:
        """Forget them."""

    def finish(self, finished: FinishedRequest) -> dict[str, Any]:
        return {}


class CuttingConsumer(FilesystemConsumer):
    """The filesystem consumer up to its writers, which cut the rows of each request out and forget them."""

    def _new_request_writer(self) -> RequestWriter:
        sizes = {"max_request_bytes": 1, "memory_bytes": 1}
        return _Forgetting(self.context, {}, self._store.temp_path, RowPool(MIB), probes={}, **sizes)


class _Forgetting(RequestWriter):
    def begin(self, request: RequestInfo) -> None:
        """Nothing is kept."""

    def append(self, rows: Mapping[str, Sequence[RequestSlice]]) -> None:
        for pieces in rows.values():
            chunks_of(pieces, self._pool)

    def finish(
        self, finished: FinishedRequest, pieces: Sequence[RequestSlice], outcome: Future[dict[str, Any]]
    ) -> None:
        outcome.set_result({})
