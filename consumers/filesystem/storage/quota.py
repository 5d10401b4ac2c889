"""The limit of bytes under one tag (parameter `max_tag_bytes`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.consumer import RowBlock

MEASURE_AGAIN_S = 10.0
"""A tag that is full is measured again after this long: somebody may have removed files."""


@dataclass(slots=True)
class _Tag:
    num_bytes: int
    measured_at: float


class TagQuota:
    """Counts the bytes under each tag: those on the disk when it is first used, and those that requests add since.

    Rows count as soon as they arrive, so that requests which run together cannot pass the limit together. Not locked:
    all calls come from one thread, the consumer's. Other processes that write to the same root are seen when a tag is
    measured, and not between.

    Args:
        max_bytes: Of one tag; None for no limit.
        measure: The bytes under a tag now.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, max_bytes: int | None, measure: Callable[[str], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._measure = measure
        self._clock = clock
        self._tags: dict[str, _Tag] = {}
        self._requests: dict[str, tuple[str, int]] = {}
        self._refused: set[str] = set()

    def within(self, block: RowBlock, data: npt.NDArray[np.uint8]) -> RowBlock:
        """Count a block's rows; return it without the spans for which their tags have no room.

        Args:
            block: Rows of several requests, whose specs have the option ``tag``.
            data: Its rows as uint8 ``[S, N, row_bytes]``.
        """
        if self._max_bytes is None:
            return block
        num_sites, _, row_bytes = data.shape
        spans = tuple(
            span
            for span in block.spans
            if self.add(
                span.request.request_id,
                str(span.request.spec.options["tag"]),
                (span.stop - span.start) * num_sites * row_bytes,
            )
        )
        return block if len(spans) == len(block.spans) else replace(block, spans=spans)

    def add(self, request_id: str, tag: str, num_bytes: int) -> bool:
        """Count rows of a request; False once its tag has no room for all of them."""
        if self._max_bytes is None:
            return True
        if request_id in self._refused:
            return False
        if self._used(tag, num_bytes) + num_bytes > self._max_bytes:
            self.release(request_id)
            self._refused.add(request_id)
            return False
        self._tags[tag].num_bytes += num_bytes
        self._requests[request_id] = tag, self._requests.get(request_id, (tag, 0))[1] + num_bytes
        return True

    def confirm(self, request_id: str) -> bool:
        """Keep the rows of an ended request counted; False if some of them did not fit."""
        self._requests.pop(request_id, None)
        fits = request_id not in self._refused
        self._refused.discard(request_id)
        return fits

    def release(self, request_id: str) -> None:
        """Stop counting the rows of a request that failed: none will be stored. May be called again."""
        self._refused.discard(request_id)
        tag, num_bytes = self._requests.pop(request_id, ("", 0))
        if num_bytes:
            self._tags[tag].num_bytes -= num_bytes

    def _used(self, tag: str, more: int) -> int:
        assert self._max_bytes is not None  # noqa: S101
        known, now = self._tags.get(tag), self._clock()
        is_full = known is not None and known.num_bytes + more > self._max_bytes
        if known is None or (is_full and now - known.measured_at >= MEASURE_AGAIN_S):
            running = sum(taken for of, taken in self._requests.values() if of == tag)
            known = self._tags[tag] = _Tag(self._measure(tag) + running, now)
        return known.num_bytes


def bytes_below(folder: Path) -> int:
    """The bytes of all files in a local folder and the folders in it; 0 if there is none."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue  # moved meanwhile
    return total
