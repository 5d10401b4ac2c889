"""Whether a step is the next one of the same requests: then most of what the last one needed holds. Numpy only."""

from __future__ import annotations

from headgate.capture.schema.batch import BatchView


class StepSequence:
    """Compares each step with the one before. Step thread only."""

    def __init__(self) -> None:
        self._last: BatchView | None = None
        self._has_one_each = False
        """Whether each request had one row there."""
        self._next: bytes = b""
        """Positions of the rows of a step that goes on."""

    def goes_on(self, view: BatchView | None) -> bool:
        """Return whether a step has the same requests in the same batch rows, one each, at the positions that follow.

        To be asked once for each step, in their order.

        Args:
            view: The step; None for dummy and idle ones, which interrupt.
        """
        last, self._last = self._last, view
        if view is None:
            return False
        is_alike = last is not None and _are_alike(last, view)
        if not is_alike:
            self._has_one_each = len(view.req_ids) > 0 and bool((view.num_scheduled == 1).all())
        if not self._has_one_each:
            return False
        goes_on = is_alike and view.num_computed.tobytes() == self._next
        self._next = (view.num_computed + 1).tobytes()
        return goes_on


def _are_alike(one: BatchView, other: BatchView) -> bool:
    """Whether two steps have the same requests in the same batch rows; mostly they have the very arrays."""
    if one.req_ids is other.req_ids and one.starts is other.starts and one.num_scheduled is other.num_scheduled:
        return True
    # Bytes are compared several times as fast as arrays of this size.
    are_counts_alike = one.num_scheduled.tobytes() == other.num_scheduled.tobytes()
    return one.req_ids == other.req_ids and are_counts_alike and one.starts.tobytes() == other.starts.tobytes()
