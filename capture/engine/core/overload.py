"""Requests that an engine core sends away unserved, since too many wait or since they have waited too long.

Each ends with the finish reason "error" and, as its stop reason, the cause, which its front end recognises
(`headgate.capture.engine.requests.request_reader.overload_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from headgate.capture.engine.contracts.end_messages import OVERLOADED
from headgate.capture.engine.contracts.vllm_engine import EngineCoreProc, Function, Request

SentAway = tuple[Request, str]
"""A request, and why it was not served."""


def after_step(original: Function, end_overdue: Callable[[], Iterable[SentAway]]) -> Function:
    """Wrap ``EngineCore.step_fn``: the outputs of a step tell those who have waited too long, too.

    Args:
        original: Returns a step's outputs by client, or None, and whether the model ran.
        end_overdue: Ends those requests, and returns them.
    """

    @wraps(original)
    def step() -> tuple[Any, bool]:
        outputs, is_executed = original()
        for request, why in end_overdue():
            outputs = outputs or {}
            told = _outputs(request, why)
            if (known := outputs.get(request.client_index)) is None:
                outputs[request.client_index] = told
            else:
                known.outputs.extend(told.outputs)
                known.finished_requests = {*(known.finished_requests or ()), request.request_id}
        return outputs, is_executed

    return step


def send_away(core: EngineCoreProc, request: Request, why: str) -> None:
    """Tell the client of `request` that it was not taken."""
    core.output_queue.put_nowait((request.client_index, _outputs(request, why)))


def _outputs(request: Request, why: str) -> Any:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    told = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=OVERLOADED + why)
    return EngineCoreOutputs(outputs=[told], finished_requests={request.request_id})
