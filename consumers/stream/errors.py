"""Errors between a stream and its reader."""

from __future__ import annotations

from headgate.capture.schema.errors import HeadgateError


class StreamError(HeadgateError, RuntimeError):
    """The rows of a stream cannot be read on; the message says why, and what to do."""


class StreamRefusedError(StreamError):
    """The other side does not let this reader in, or is no stream: a wrong token, another reader, another version."""


class StreamGapError(StreamError):
    """Batches that come next for this reader are gone: the server was started anew, or gave them up."""
