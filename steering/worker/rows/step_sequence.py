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
        is_alike = last is not None and view.is_laid_out_as(last)
        if not is_alike:
            self._has_one_each = len(view.req_ids) > 0 and bool((view.num_scheduled == 1).all())
        if not self._has_one_each:
            return False
        goes_on = is_alike and view.num_computed.tobytes() == self._next
        self._next = (view.num_computed + 1).tobytes()
        return goes_on
