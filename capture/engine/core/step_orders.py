"""Decisions of a part behind a step: the workers follow them with the next one, and requests end."""

from __future__ import annotations

from collections.abc import Mapping

from headgate.capture.engine.contracts.core_part import DecidingCore
from headgate.capture.engine.contracts.vllm_engine import CoreOutputs, Scheduler, SchedulerOutput
from headgate.capture.engine.contracts.wire_format import ORDERS_ATTRIBUTE


def attach_orders(name: str, part: DecidingCore, scheduler_output: SchedulerOutput) -> None:
    """Attach to a step that was just scheduled what the part of that name has decided for its requests."""
    orders = part.orders(scheduler_output.num_scheduled_tokens)
    if orders is not None:
        setattr(scheduler_output, ORDERS_ATTRIBUTE, {name: orders})


def end_requests(scheduler: Scheduler, endings: Mapping[str, str], made: dict[int, CoreOutputs]) -> None:
    """End requests behind a step, whose last token stays theirs.

    Args:
        scheduler: vLLM's.
        endings: The requests, each with its ``stop_reason``; those that have ended are passed over.
        made: The outputs of the step by front end, completed here. A request gets an output of its own that ends it,
            behind that of its last token: vLLM drops the token of an output that both has one and ends by a stop.
    """
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.request import RequestStatus

    for req_id, reason in endings.items():
        request = scheduler.requests.get(req_id)
        if request is None or request.is_finished():
            continue
        scheduler.finish_requests(req_id, RequestStatus.FINISHED_STOPPED)
        told = EngineCoreOutput(req_id, [], finish_reason=FinishReason.STOP, stop_reason=reason)
        if (outputs := made.get(request.client_index)) is None:
            outputs = made[request.client_index] = EngineCoreOutputs()
        outputs.outputs.append(told)
