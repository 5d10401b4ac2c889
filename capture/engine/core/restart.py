"""Restarting the requests of a scheduler, as stock ``reset_prefix_cache(reset_running_requests=True)`` does.

Unlike there, the cache is not emptied: the keys of blocks say what their KV depends on, so blocks that
still hold are used again.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from operator import attrgetter

from headgate.capture.engine.contracts.vllm_engine import EngineCore, Request, Scheduler
from headgate.capture.engine.setup.versions import WORKS_WITH
from headgate.capture.schema.errors import RequestError, UnsupportedError


def check_support(scheduler: Scheduler) -> None:
    """Refuse a scheduler whose requests cannot be held back or restarted.

    Raises:
        UnsupportedError: Naming what differs.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    name = type(scheduler).__name__
    if not isinstance(scheduler, Scheduler):
        raise UnsupportedError(f"the scheduler {name} does not inherit from vLLM's own; start without --scheduler-cls")
    parameters = tuple(inspect.signature(scheduler._preempt_request).parameters)
    request = Request("headgate-probe", [0], SamplingParams(max_tokens=1), None)
    knows_stale = _drops_stale_output(scheduler) or hasattr(request, "async_tokens_to_discard")
    if parameters[:2] != ("request", "timestamp") or not knows_stale:
        raise UnsupportedError(f"{name}._preempt_request takes ({', '.join(parameters)}). {WORKS_WITH}")
    for attribute in ("running", "requests", "prev_step_scheduled_req_ids", "finished_req_ids_dict"):
        if not hasattr(scheduler, attribute):
            raise UnsupportedError(f"{name} has no attribute {attribute!r}. {WORKS_WITH}")


def check_restart(core: EngineCore, field: str) -> None:
    """Refuse if `restart_running` cannot be called now.

    Args:
        core: vLLM's ``EngineCore``.
        field: The field that the client is told.

    Raises:
        RequestError: If a request is there that cannot be restarted.
    """
    check_sessions(core, field)
    if core.batch_queue and not core.async_scheduling and not _drops_stale_output(core.scheduler):
        raise RequestError(
            field,
            "vLLM before 0.32 cannot restart requests while steps are in the pipeline, unless it schedules "
            "asynchronously; try again when no request runs, or start with --async-scheduling",
        )


def check_sessions(core: EngineCore, field: str) -> None:
    """Refuse a change of what acts on requests while a session is open.

    Raises:
        RequestError: Naming `field` and the session.
    """
    for request in core.scheduler.requests.values():
        if request.resumable:
            raise RequestError(
                field,
                f"the streaming-input session {request.request_id} is open, and cannot be computed anew under other "
                "global vectors, nor go on under other rules; try again when it has ended",
            )


def restart_running(scheduler: Scheduler) -> None:
    """Preempt whatever runs; what its steps in flight still bring is dropped."""
    timestamp, drops_stale_output = time.monotonic(), _drops_stale_output(scheduler)
    while scheduler.running:
        # From the last to the first: each goes to the front of the queue.
        request = scheduler.running.pop()
        if drops_stale_output:
            scheduler._preempt_request(request, timestamp, drop_stale_output=True)
        else:
            # Stock assigns the number of outputs in flight. With a pipeline, some of an earlier restart may be out too.
            num_in_flight = request.async_tokens_to_discard + request.num_output_placeholders
            scheduler._preempt_request(request, timestamp)
            request.async_tokens_to_discard, request.num_output_placeholders = num_in_flight, 0
    # Resumed in the very next step: the model runner is to take them for requests that were not in the last one.
    scheduler.prev_step_scheduled_req_ids.clear()


def awaits_stale_output(request: Request) -> bool:
    """Whether the scheduler drops what the next step in flight brings for a request that was restarted."""
    if hasattr(request, "num_stale_output_tokens"):
        return request.drop_stale_output and request.num_stale_output_tokens > 0
    return request.async_tokens_to_discard > 0


def none_awaits_stale_output(requests: Sequence[Request]) -> bool:
    """Whether `awaits_stale_output` holds for none of some requests; may be False though none does."""
    if not requests:
        return True
    is_new = hasattr(requests[0], "num_stale_output_tokens")
    return not any(map(_stale_tokens if is_new else _discarded_tokens, requests))


def are_unfinished(requests: Sequence[Request]) -> bool:
    """Whether requests that all have one status, as those of a step nearly always do, are not finished.

    Args:
        requests: vLLM's. If they differ in their status the answer is False, whatever they are.
    """
    if not requests:
        return True
    statuses = list(map(_status, requests))
    return statuses.count(statuses[0]) == len(statuses) and not requests[0].is_finished()


_status = attrgetter("status")
_stale_tokens, _discarded_tokens = attrgetter("num_stale_output_tokens"), attrgetter("async_tokens_to_discard")


def _drops_stale_output(scheduler: Scheduler) -> bool:
    """Whether the scheduler itself knows of outputs in flight to drop: vLLM 0.32 and later."""
    return "drop_stale_output" in inspect.signature(scheduler._preempt_request).parameters
