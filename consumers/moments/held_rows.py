"""Generated rows of a request that are held back until it is known that they lie before its end."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import RequestInfo
from headgate.capture.schema.sites import Site

if TYPE_CHECKING:
    from torch import Tensor

Sites = tuple[Site, ...]
Float32Array = npt.NDArray[np.float32]

HOLD_ROWS = 16
"""Generated rows of each request and site that are held back at least: the engine runs ahead of a request's end."""

TAG = "tag"
"""Option of a request's spec: the tag that its rows count under."""


@dataclass(slots=True)
class _Held:
    """Rows at the same sites: pieces of ascending positions and ``[sites, rows, width]``."""

    pieces: deque[tuple[Int64Array, Tensor]] = field(default_factory=deque)
    num_rows: int = 0
    counted: list[Int64Array] = field(default_factory=list)  # positions of rows that are not held any more


class RunningRequest:
    """A request that has not ended: what was counted of it, and generated rows that are held back.

    Attributes:
        tag: Of the request.
        num_prompt: Length of its prompt.
        num_rows: Rows that were counted, over all sites.
        num_skipped: Rows left out at its beginning, over all sites.
        num_past_end: Of `num_rows`, those that turned out to lie past its end.
    """

    def __init__(self, request: RequestInfo) -> None:
        self.tag: str = request.spec.options[TAG]
        self.num_prompt = request.num_prompt_tokens
        self.num_rows = 0
        self.num_skipped = 0
        self.num_past_end = 0
        self._held: dict[Sites, _Held] = defaultdict(_Held)

    def hold(self, sites: Sites, positions: Int64Array, rows: Tensor) -> None:
        """Keep a copy of rows, ``[sites, N, width]``: the block that they are part of belongs to many requests."""
        held = self._held[sites]
        held.pieces.append((positions.copy(), rows.clone()))
        held.num_rows += len(positions)

    def release(self, keep: int) -> list[tuple[Sites, Float32Array]]:
        """Return the oldest rows, which count from now on, ``[sites, N, width]``; at least `keep` of each site stay.

        Nothing is returned before there are as many again, so that rows come in pieces that are worth while.
        """
        released = []
        for sites, held in self._held.items():
            if held.num_rows <= 2 * keep:
                continue
            taken = []
            while held.pieces and held.num_rows - len(held.pieces[0][0]) >= keep:
                positions, rows = held.pieces.popleft()
                held.num_rows -= len(positions)
                held.counted.append(positions)
                taken.append(float32_of(rows))
            if taken:
                released.append((sites, np.concatenate(taken, axis=1)))
                self.num_rows += released[-1][1].shape[1] * len(sites)
        return released

    def cut(self, num_rows: int) -> None:
        """Forget rows at positions from `num_rows` on, and count those of them that were released already."""
        for sites, held in self._held.items():
            self.num_past_end += sum(int((positions >= num_rows).sum()) for positions in held.counted) * len(sites)
            ends = [int(np.searchsorted(positions, num_rows)) for positions, _ in held.pieces]
            held.pieces = deque(
                (positions[:end], rows[:, :end]) for (positions, rows), end in zip(held.pieces, ends, strict=True)
            )
            held.num_rows = sum(ends)


def float32_of(rows: Tensor) -> Float32Array:
    """Rows of any of the model dtypes as float32, which holds them exactly."""
    array: Float32Array = rows.float().numpy()
    return array
