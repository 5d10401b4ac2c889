"""Whether a step is the next one of the same requests: then most of what the last one needed holds. Numpy only."""

from __future__ import annotations

import numpy as np

from headgate.capture.schema.batch import BatchView


class StepSequence:
    """Compares each step with the one before. Step thread only."""

    def __init__(self) -> None:
        self._last: tuple[tuple[str, ...], bytes, bytes] | None = None
        self._next: bytes = b""
        """Positions of the rows of a step that goes on."""

    def goes_on(self, view: BatchView | None) -> bool:
        """Return whether a step has the same requests in the same batch rows, one each, at the positions that follow.

        To be asked once for each step, in their order.

        Args:
            view: The step; None for dummy and idle ones, which interrupt.
        """
        if view is None:
            self._last = None
            return False
        last, computed = self._last, view.num_computed
        found = self._last = view.req_ids, view.starts.tobytes(), view.num_scheduled.tobytes()
        has_one_each = computed.nbytes and found[2] == _ONES[: computed.nbytes]
        goes_on = bool(has_one_each and found == last and computed.tobytes() == self._next)
        self._next = (computed + 1).tobytes() if has_one_each else b""
        return goes_on


_ONES = np.ones(1 << 16, np.int64).tobytes()
"""More of them than there are requests in a step."""
