"""The way back from a captured request to the client that sent it.

The front end puts its address and the request's key on the wire; results carry them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from headgate.capture.delivery.completeness import ConsumerRequest
from headgate.capture.schema.batch import NewRequest
from headgate.capture.schema.consumer import Origin, RequestInfo
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.spec import CaptureSpec

if TYPE_CHECKING:
    from headgate.capture.transport.result_sender import ResultSender


def consumer_requests(new: NewRequest, specs: Mapping[int, CaptureSpec]) -> Mapping[int, ConsumerRequest]:
    """The request as each consumer knows it, by the consumer's bit."""
    capture = None if new.wire is None else new.wire.get("capture")
    if capture is None:
        return {}
    prompt_token_ids = np.asarray(new.prompt_token_ids, dtype=np.int64)
    made = {}
    for bit, spec in specs.items():
        num_samples = capture["n"]
        info = RequestInfo(
            request_id=new.req_id,
            client_request_id=capture["id"],
            # With n > 1 vLLM calls the samples "0_ID", "1_ID", ...
            sample_index=int(new.req_id.split("_", 1)[0]) if num_samples > 1 else 0,
            num_samples=num_samples,
            prompt_token_ids=prompt_token_ids,
            spec=spec,
            origin=Origin(reply=capture["reply"], key=capture["key"]),
        )
        made[bit] = ConsumerRequest(info)
    return made


class ResultReporter:
    """Sends each consumer's results to the front end that its request came from. Any thread.

    Args:
        sender: Takes the messages.
        stage: Pipeline stage of this worker.
        num_stages: Number of stages.
    """

    def __init__(self, sender: ResultSender, stage: int, num_stages: int) -> None:
        self._sender = sender
        self._stage = stage
        self._num_stages = num_stages

    def report(self, instance: str, request: RequestInfo, result: CaptureResult) -> None:
        """Send the result of `request` for the consumer that requests call `instance`."""
        origin = request.origin
        if origin is None:
            raise RuntimeError(f"request {request.request_id} has no origin")
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
