"""The way back from a captured request to the client that sent it.

The front end puts its address and the request's key on the wire; results carry them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headgate.capture.schema.consumer import RequestInfo
from headgate.capture.schema.results import CaptureResult

if TYPE_CHECKING:
    from headgate.capture.transport.result_sender import ResultSender


class ResultWatcher(Protocol):
    """Follows the results that are sent. Any thread."""

    def due(self) -> None:
        """Follow a result that is counted and about to be sent."""
        ...

    def done(self, instance: str, req_id: str, key: str) -> None:
        """Follow a result that was sent: of that consumer, for the request of that internal id and key."""
        ...


class ResultReporter:
    """Sends each consumer's results to the front end that its request came from. Any thread.

    Args:
        sender: Takes the messages.
        stage: Pipeline stage of this worker.
        num_stages: Number of stages.
        watcher: Is notified of each result; None for no notifications.
    """

    def __init__(
        self,
        sender: ResultSender,
        stage: int,
        num_stages: int,
        watcher: ResultWatcher | None = None,
    ) -> None:
        self._sender = sender
        self._stage = stage
        self._num_stages = num_stages
        self._watcher = watcher

    def report(self, instance: str, request: RequestInfo, result: CaptureResult | None) -> None:
        """Send the result of `request` for the consumer that requests call `instance`; None comes from elsewhere."""
        origin = request.origin
        if origin is None:
            raise RuntimeError(f"request {request.request_id} has no origin")
        try:
            if self._watcher is not None:
                self._watcher.due()
            if result is not None:
                self._sender.send_result(
                    reply=origin.reply,
                    key=origin.key,
                    req_id=request.request_id,
                    sample_index=request.sample_index,
                    instance=instance,
                    result=result,
                    stage=self._stage,
                    num_stages=self._num_stages,
                )
        finally:
            if self._watcher is not None:
                self._watcher.done(instance, request.request_id, origin.key)
