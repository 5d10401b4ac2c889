"""The steering worker without a model, which forgets what it notes for tests: it may run for long."""

from __future__ import annotations

from typing import Any

from tests.fakes.steering_worker import SteeringWorker


class ForgetfulWorker(SteeringWorker):
    """Keeps nothing of requests that have ended."""

    def _follow_ends(self, scheduler_output: Any) -> None:
        super()._follow_ends(scheduler_output)
        for req_id in scheduler_output.finished_req_ids:
            self.computed.pop(req_id, None)
            self.acted.pop(req_id, None)
        self.calls.clear()
