"""How long captured rows may wait on the device for those of the next steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headgate.capture.schema.config import MAX_LINGER_S


class BatchingWindow:
    """How long captured rows may wait in the ring for the next steps' rows: as long as all their consumers allow.

    Step thread only.

    Args:
        allowed_s: Seconds that each consumer allows, by its bit.
    """

    def __init__(self, allowed_s: Mapping[int, float]) -> None:
        self._allowed_s = dict(allowed_s)
        self._running: dict[str, float] = {}
        self.seconds = MAX_LINGER_S
        """Seconds that rows may wait, from the launch of the forward that computed the first of them."""

    @property
    def least(self) -> float:
        """The shortest wait that any consumer allows, in seconds."""
        return min(self._allowed_s.values(), default=0.0)

    @property
    def is_anything_running(self) -> bool:
        """Whether there are requests that may get further steps."""
        return bool(self._running)

    def begin(self, req_id: str, bits: Iterable[int]) -> None:
        """Note a request that begins, for the consumers with these bits."""
        self._running[req_id] = allowed_s = min((self._allowed_s[bit] for bit in bits), default=MAX_LINGER_S)
        self.seconds = min(self.seconds, allowed_s)

    def stop(self, req_id: str) -> None:
        """Note that a request gets no further step. Its rows may be waiting, so its limit counts until `collected`."""
        self._running.pop(req_id, None)

    def collected(self) -> None:
        """Note that no row is waiting."""
        self.seconds = min(self._running.values(), default=MAX_LINGER_S)
