"""The model-free worker with readings in its steps: the rows of each request, put on outputs as real workers do."""

from __future__ import annotations

from typing import Any

from headgate.capture.engine.worker.runner import with_readings
from tests.fakes.reading_part import PART
from tests.fakes.worker import FakeWorker


class _Rows:
    """Implements `StepReadings`, of ``(start, end)`` by request."""

    def __init__(self, rows: dict[str, tuple[int, int]]) -> None:
        self._rows: dict[str, tuple[int, int]] | None = rows

    def collect(self) -> dict[str, Any]:
        rows, self._rows = self._rows, None
        assert rows is not None, "collected twice"
        return {"rows": rows}


class ReadingWorker(FakeWorker):
    """Reads every step that has a request of the part's."""

    def execute_model(self, scheduler_output: Any) -> Any:
        self._num_scheduled = scheduler_output.num_scheduled_tokens
        resumed = scheduler_output.scheduled_cached_reqs
        for index, req_id in enumerate(resumed.req_ids):
            if req_id in resumed.resumed_req_ids:
                # Tokens whose output was dropped do not count.
                request = self._requests[req_id]
                request.num_known = len(request.prompt) + resumed.num_output_tokens[index]
        return super().execute_model(scheduler_output)

    def _deliver(self, output: Any) -> Any:
        rows = {
            req_id: (request.num_computed - self._num_scheduled[req_id], request.num_computed)
            for req_id in output.req_ids
            if PART in ((request := self._requests[req_id]).wire or {}).get("parts", {})
        }
        delivered = super()._deliver(output)
        if not rows:
            return delivered
        readings = {PART: _Rows(rows)}
        if delivered is not None:
            return with_readings(delivered, readings)
        self._pending = with_readings(self._pending, readings)
        return None
