"""What a request is told about its capture."""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

Status = Literal["ok", "partial_error", "error", "pending"]


class CaptureResult(msgspec.Struct, kw_only=True, omit_defaults=False):
    """The outcome of one request for one consumer.

    Attributes:
        status: ``ok``: every wanted row was delivered. ``partial_error``: some were, `error` says what is missing.
            ``error``: nothing usable. ``pending``: not done when the answer was sent; it goes on by itself.
        error: Text for people; None when `status` is ``ok``.
        payload: What the consumer reports: a file list, a score, ... From driver consumers of `LLM` and
            `AsyncLLM` any object; over HTTP and from workers JSON values only.
        num_rows: Positions captured.
        num_bytes: Bytes of rows delivered, over all sites.
        dropped_rows: Positions lost to overload.
    """

    status: Status
    error: str | None = None
    payload: Any = None
    num_rows: int = 0
    num_bytes: int = 0
    dropped_rows: int = 0


@runtime_checkable
class SupportsSummary(Protocol):
    """A payload that is a live object: what it looks like where only JSON can go, over HTTP for instance."""

    def summary(self) -> dict[str, Any]:
        """JSON values that describe the payload; never its rows."""
        ...
