"""Restarting the requests of a scheduler, as stock ``reset_prefix_cache(reset_running_requests=True)`` does.

Unlike there, the cache is not emptied: the keys of blocks say what their KV depends on, so blocks that
still hold are used again.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import cast

from headgate.capture.engine.contracts.vllm_engine import EngineCore, EngineCoreProc, Request, Scheduler
from headgate.capture.engine.core.overload import send_away
from headgate.capture.engine.setup.versions import WORKS_WITH
from headgate.capture.schema.errors import UnsupportedError

SESSION_ENDED = (
    "this streaming-input session was ended: global vectors or rules that were set meanwhile act on it, and what it "
    "has computed cannot be computed anew; send the whole prompt at once"
)


def check_support(scheduler: Scheduler) -> None:
    """Refuse a scheduler whose requests cannot be held back or restarted.

    Raises:
        UnsupportedError: Naming what differs.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    name = type(scheduler).__name__
    if not isinstance(scheduler, Scheduler):
        raise UnsupportedError(f"the scheduler {name} does not inherit from vLLM's own; start without --scheduler-cls")
    parameters = tuple(inspect.signature(scheduler._preempt_request).parameters)
    if parameters[:2] != ("request", "timestamp"):
        raise UnsupportedError(f"{name}._preempt_request takes ({', '.join(parameters)}). {WORKS_WITH}")
    for attribute in ("running", "requests", "prev_step_scheduled_req_ids", "finished_req_ids_dict"):
        if not hasattr(scheduler, attribute):
            raise UnsupportedError(f"{name} has no attribute {attribute!r}. {WORKS_WITH}")


def end_sessions(core: EngineCore, acts: Callable[[str], bool]) -> None:
    """End the streaming-input sessions that something acts on now: their rows cannot be computed anew under it.

    Args:
        core: vLLM's ``EngineCore``.
        acts: Tells whether anything acts on a request.
    """
    from vllm.v1.request import RequestStatus

    open_now = [one for one in core.scheduler.requests.values() if one.resumable and not one.is_finished()]
    for request in open_now:
        if acts(request.request_id):
            core.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            if hasattr(core, "output_queue"):
                send_away(cast("EngineCoreProc", core), request, SESSION_ENDED)


def restart_running(scheduler: Scheduler) -> None:
    """Preempt whatever runs; no step is in flight."""
    timestamp = time.monotonic()
    while scheduler.running:
        # From the last to the first: each goes to the front of the queue.
        scheduler._preempt_request(scheduler.running.pop(), timestamp)
    # Resumed in the very next step: the model runner is to take them for requests that were not in the last one.
    scheduler.prev_step_scheduled_req_ids.clear()


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
