"""The services of an engine core to its part: calls to the workers, and block keys of requests that run.

A request that is sent away unserved, since too many wait or since it has waited too long, ends with the finish reason
"error" and, as its stop reason, the cause, which its front end recognises
(`headgate.capture.engine.requests.request_reader.overload_of`).

Running requests are restarted as stock ``reset_prefix_cache(reset_running_requests=True)`` does, but the cache is not
emptied: the keys of blocks say what their KV depends on, so blocks that still hold are used again.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np

from headgate.capture.engine import vllm_names
from headgate.capture.engine.contracts.core_part import Actions, BlockKeys, CorePart, CoreServices, RequestProgress
from headgate.capture.engine.contracts.wire_format import OVERLOADED
from headgate.capture.engine.core import block_keys
from headgate.capture.engine.core.block_keys import SaltedKeys
from headgate.capture.engine.core.steps_in_flight import StepsInFlight, end_engine, steps_of
from headgate.capture.engine.vllm_names import WORKS_WITH
from headgate.capture.engine.vllm_types import EngineCore, EngineCoreProc, Function, Request, Scheduler
from headgate.capture.schema.batch import Document, Int64Array
from headgate.capture.schema.errors import UnsupportedError

SentAway = tuple[Request, str]
"""A request, and why it was not served."""


def after_step(original: Function, end_overdue: Callable[[], Iterable[SentAway]]) -> Function:
    """Wrap ``EngineCore.step_fn``: the outputs of a step also end requests that waited too long.

    Args:
        original: Returns a step's outputs by client, or None, and whether the model ran.
        end_overdue: Ends those requests, and returns them.
    """

    @wraps(original)
    def step() -> tuple[Any, bool]:
        outputs, is_executed = original()
        for request, why in end_overdue():
            outputs = outputs or {}
            output = _outputs(request, why)
            if (known := outputs.get(request.client_index)) is None:
                outputs[request.client_index] = output
            else:
                known.outputs.extend(output.outputs)
                known.finished_requests = {*(known.finished_requests or ()), request.request_id}
        return outputs, is_executed

    return step


def send_away(core: EngineCoreProc, request: Request, why: str) -> None:
    """Report to the client of `request` that it was not taken."""
    core.output_queue.put_nowait((request.client_index, _outputs(request, why)))


def _outputs(request: Request, why: str) -> Any:
    EngineCoreOutput = vllm_names.ENGINE_CORE_OUTPUT.get()
    EngineCoreOutputs = vllm_names.ENGINE_CORE_OUTPUTS.get()
    FinishReason = vllm_names.FINISH_REASON.get()

    output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=OVERLOADED + why)
    return EngineCoreOutputs(outputs=[output], finished_requests={request.request_id})


SESSION_ENDED = (
    "this streaming-input session was ended: global vectors or rules that were set meanwhile act on it, and what it "
    "has computed cannot be computed anew; send the whole prompt at once"
)


def check_support(scheduler: Scheduler) -> None:
    """Refuse a scheduler whose requests cannot be held back or restarted.

    Raises:
        UnsupportedError: Naming what differs.
    """
    Scheduler = vllm_names.SCHEDULER.get()

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
        acts: Returns whether anything acts on a request.
    """
    RequestStatus = vllm_names.REQUEST_STATUS.get()

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


SERVICES = "_headgate_services"
"""Attribute of a scheduler; absent where no part is open."""


class _Salts(dict[str, str]):
    """Unique texts by request."""

    def __init__(self) -> None:
        self._num_made = 0

    def renew(self, req_id: str) -> None:
        """Give a request a new one."""
        self._num_made += 1
        self[req_id] = f"{self._num_made} {req_id}"


class _GoingOn(NamedTuple):
    """Requests whose next row is one that was never computed: as long as none is preempted, that stays so.

    Attributes:
        req_ids: The very object that the caller asked with.
        requests: vLLM's.
        num_prompt: int64 ``[n]``.
    """

    req_ids: tuple[str, ...]
    requests: list[Request]
    num_prompt: Int64Array


_num_computed = attrgetter("num_computed_tokens")


def _find_going_on(known: Mapping[str, Request], req_ids: tuple[str, ...]) -> _GoingOn | None:
    """Return requests that are all in the scheduler, and compute nothing again; None if they are not such."""
    found = [one for req_id in req_ids if (one := known.get(req_id)) is not None]
    if len(found) < len(req_ids) or not are_unfinished(found):
        return None
    if any(_position(request) > max(request.num_computed_tokens, request.num_prompt_tokens) for request in found):
        return None
    return _GoingOn(req_ids, found, np.array([request.num_prompt_tokens for request in found], np.int64))


class PartServices(CoreServices):
    """`CoreServices` over vLLM's engine core. Engine thread only, but for `keys`.

    Args:
        core: vLLM's ``EngineCore``.
        name: The part's.
        steps: Of the engine core, in flight.
        waiting: Requests that wait outside of the scheduler.
        actions: Of capture consumers, if the part takes them.
    """

    def __init__(
        self,
        core: EngineCore,
        name: str,
        steps: StepsInFlight,
        waiting: Mapping[str, Request],
        actions: Actions | None = None,
    ) -> None:
        self.actions = actions
        self._core = core
        self._scheduler = core.scheduler
        self._name = name
        self._steps = steps
        self._waiting = waiting
        self._part: CorePart | None = None
        self._salts = _Salts()
        """Salts of requests whose rows were computed under block keys that have changed since."""
        self._going_on: _GoingOn | None = None
        """The requests whose positions were asked for last, until one of them is freed or preempted."""

    def open(self, part: CorePart) -> None:
        """Serve `part`, which was made with these services."""
        self._part = part

    def call_workers(self, method: str, args: Document) -> list[object]:
        answers = self._core.model_executor.collective_rpc("headgate_call", args=(self._name, method, args))
        return list(answers)

    def prepare_change(self, field: str) -> None:
        self._steps.take()

    def restart_running(self) -> None:
        self._end_sessions()
        for req_id, request in _live(self._scheduler.requests):
            if not self._has_same_prompt(request, req_id):
                self._steps.outdate(request)
        restart_running(self._scheduler)
        for req_id, request in _live(self._scheduler.requests, self._waiting):
            block_keys.rehash(request, self.keys(req_id))

    def rekey_running(self) -> dict[str, int]:
        self._end_sessions()
        firsts = {}
        for req_id, request in _live(self._scheduler.requests, self._waiting):
            computed = request.num_computed_tokens
            firsts[req_id] = first = _first_new(request)
            if block_keys.unsalted(request) == self._present(req_id):
                continue
            if first:
                self._salts.renew(req_id)
            elif not self._has_same_prompt(request, req_id):
                self._steps.outdate(request)
            if computed:
                block_keys.rehash_from(request, self.keys(req_id), computed, self._scheduler.hash_block_size)
            else:
                block_keys.rehash(request, self.keys(req_id))
        return firsts

    def rekey(self, req_id: str, first: int) -> None:
        request = _find(req_id, self._scheduler.requests, self._waiting)
        if request is None:
            raise AssertionError(f"request {req_id} is not here, so it has no block keys")
        block_keys.rehash_from(request, self.keys(req_id), first, self._scheduler.hash_block_size)

    def progress(self, req_id: str) -> RequestProgress | None:
        request = _find(req_id, self._scheduler.requests, self._waiting)
        if request is None:
            return None
        return RequestProgress(_position(request), request.all_token_ids)

    def positions(self, req_ids: tuple[str, ...]) -> Int64Array:
        going_on = self._going_on
        if going_on is None or going_on.req_ids is not req_ids:
            going_on = self._going_on = _find_going_on(self._scheduler.requests, req_ids)
        if going_on is not None:
            # `_position` of each.
            computed = np.fromiter(map(_num_computed, going_on.requests), np.int64, len(going_on.requests))
            return np.maximum(computed, going_on.num_prompt, out=computed)
        found = [_find(req_id, self._scheduler.requests, self._waiting) for req_id in req_ids]
        return np.array([-1 if request is None else _position(request) for request in found], np.int64)

    def fail(self, reason: str) -> None:
        end_engine(self._core, reason)

    def keys(self, req_id: str) -> BlockKeys | None:
        """Return the block keys of a request, as of now."""
        present, salt = self._present(req_id), self._salts.get(req_id)
        return present if salt is None else SaltedKeys(present, salt)

    def preempted(self, request: Request) -> None:
        """Follow a preemption: rows that are computed again are computed under the present keys, whatever was before.

        How they acted on rows before they were there is unknown, so no other request may find these blocks.
        """
        req_id = request.request_id
        self._going_on = None
        if req_id in self._salts:
            self._steps.outdate(request)
            self._salts.renew(req_id)
            block_keys.rehash(request, self.keys(req_id))

    def release(self, req_id: str) -> None:
        """Forget a request that was freed."""
        self._going_on = None
        self._salts.pop(req_id, None)

    def _has_same_prompt(self, request: Request, req_id: str) -> bool:
        """Whether the rows of a request's prompt do not depend on what has changed."""
        before, now, num_prompt = block_keys.unsalted(request), self._present(req_id), request.num_prompt_tokens
        keys = [None if each is None else each.of_block(0, num_prompt, num_prompt) for each in (before, now)]
        return (keys[0] or ()) == (keys[1] or ())

    def _end_sessions(self) -> None:
        if self._part is not None:
            end_sessions(self._core, self._part.acts_on)

    def _present(self, req_id: str) -> BlockKeys | None:
        return None if self._part is None else self._part.block_keys(req_id)


def _find(req_id: str, *held: Mapping[str, Request]) -> Request | None:
    request = next((each[req_id] for each in held if req_id in each), None)
    return None if request is None or request.is_finished() else request


def _first_new(request: Request) -> int:
    """Return the first position of a request whose row is computed under what acts now, and counts."""
    # A preempted request: the row of its last token at the earliest: tokens were sampled after the rows before it.
    known = request.num_tokens - 1 if request.num_tokens > request.num_prompt_tokens else 0
    return max(request.num_computed_tokens, known)


def _position(request: Request) -> int:
    """Return the first position of a request, after its prompt, whose row no launched step computes anew."""
    return max(_first_new(request), request.num_prompt_tokens)


def _live(*held: Mapping[str, Request]) -> Iterator[tuple[str, Request]]:
    for req_id, request in chain.from_iterable([*each.items()] for each in held):
        if not request.is_finished():
            yield req_id, request


def preempt_request(original: Function) -> Function:
    """Wrap ``Scheduler._preempt_request``: the block keys of a request may have changed while it ran."""

    @wraps(original)
    def wrapped(self: Scheduler, request: Request, timestamp: float, *args: object, **kwargs: object) -> object:
        if (steps := steps_of(self)) is not None:
            steps.preempted(request)
        result = original(self, request, timestamp, *args, **kwargs)
        services: PartServices | None = vars(self).get(SERVICES)
        if services is not None:
            services.preempted(request)
        return result

    return wrapped
