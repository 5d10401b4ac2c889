"""How requests ended: noted in the engine core, told to the worker with the next step.

The worker sees ids only. Three parties know more: the scheduler (the tokens, and why it stopped), and for stop
strings the front end alone, since it has the text. While it looks, the engine runs ahead and may even end the request
for a reason of its own; so the final state of a request with stop strings is held back until the front end has said
how many tokens it kept.

The same goes for requests that the front end aborts: the user has fewer tokens than the engine.

The messages of all three are those of `contracts.end_messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import NamedTuple

from headgate.capture.engine.contracts.end_messages import (
    FINAL_ATTRIBUTE,
    Final,
    KeptTokens,
    is_mark,
    split_marks,
)
from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.contracts.vllm_engine import (
    AsyncEngineClient,
    EngineCore,
    Function,
    Request,
    Scheduler,
    SchedulerOutput,
)
from headgate.capture.engine.contracts.wire_format import is_captured
from headgate.capture.engine.core import engine_core, steps_in_flight
from headgate.capture.engine.core.step_notes import nothing_noted

_ENDS = "_headgate_ends"


class Ended(NamedTuple):
    """A request as the scheduler freed it.

    Attributes:
        num_prompt: Tokens of its prompt.
        token_ids: All of its tokens.
        status: The finish reason.
        describe: Returns the notes on the rows of its first tokens, given how many of these were kept.
        num_outdated: As of `FinalState`.
    """

    num_prompt: int
    token_ids: list[int]
    status: str
    describe: Callable[[int], Document]
    num_outdated: int

    def final(self, kept: KeptTokens | None) -> Final:
        """Cut it to what the front end kept, unless the engine ended the request at the very same token."""
        token_ids, status = self.token_ids, self.status
        if kept is not None and (kept.num_tokens < len(token_ids) or status == "abort"):
            token_ids, status = token_ids[: kept.num_tokens], kept.status
        return self.num_prompt, token_ids, status, self.describe(len(token_ids)), self.num_outdated


class RequestEnds:
    """The ends of one scheduler's requests. Used on the engine core's thread only.

    Attributes:
        finals: Final states to be told with the next step, by request id.
    """

    def __init__(self) -> None:
        self.finals: dict[str, Final | None] = {}
        self._kept: dict[str, KeptTokens] = {}
        self._held: dict[str, Ended] = {}

    def end(self, req_id: str, ended: Ended, *, is_decided: bool) -> None:
        """Note the end of a request that was freed; if not `is_decided`, the front end's count is waited for."""
        kept = self._kept.pop(req_id, None)
        if kept is not None or is_decided:
            self.finals[req_id] = ended.final(kept)
        else:
            self._held[req_id] = ended
            self.finals[req_id] = None

    def front_end_kept(self, req_id: str, kept: KeptTokens, *, is_running: bool) -> None:
        """Note how much the front end kept of `req_id`. A second time is ignored: vLLM delivers aborts twice."""
        if req_id in self._held:
            self.finals[req_id] = self._held.pop(req_id).final(kept)
        elif is_running:
            self._kept[req_id] = kept

    def front_end_left(self, req_id: str) -> None:
        """Note that the front end gave up on `req_id` and sends nothing more about it."""
        if req_id in self._held:
            self.finals[req_id] = self._held.pop(req_id).final(None)

    def pop_finals(self) -> dict[str, Final | None]:
        """Return what is to be told now, once."""
        finals, self.finals = self.finals, {}
        return finals


def _ends(scheduler: Scheduler) -> RequestEnds:
    found: RequestEnds | None = vars(scheduler).get(_ENDS)
    if found is None:
        found = RequestEnds()
        setattr(scheduler, _ENDS, found)
    return found


def free_request(original: Function) -> Function:
    """Wrap ``Scheduler._free_request``: note how a capturing request ended, and free what `core` keeps for any."""

    @wraps(original)
    def _free_request(self: Scheduler, request: Request, *args: object, **kwargs: object) -> object:
        params = request.sampling_params
        adapter, steps = engine_core.adapter_of(self), steps_in_flight.steps_of(self)
        num_outdated = 0 if steps is None else steps.release(request.request_id)
        if is_captured(params):
            status = str(request.get_finished_reason())
            describe = nothing_noted if adapter is None else adapter.notes.description(request.request_id)
            tokens = int(request.num_prompt_tokens), list(request.all_token_ids)
            ended = Ended(*tokens, status, describe, num_outdated)
            _ends(self).end(request.request_id, ended, is_decided=status == "abort" or not params.stop)
        result = original(self, request, *args, **kwargs)
        if adapter is not None:
            adapter.release(request.request_id)
        return result

    return _free_request


def update_after_schedule(original: Function) -> Function:
    """Wrap ``Scheduler._update_after_schedule``: attach the finals to the step that carries the finished ids, and what
    the part decided to the step whose requests follow it.
    """

    @wraps(original)
    def _update_after_schedule(self: Scheduler, scheduler_output: SchedulerOutput) -> object:
        if _ENDS in vars(self) and (finals := _ends(self).pop_finals()):
            setattr(scheduler_output, FINAL_ATTRIBUTE, finals)
        if (adapter := engine_core.adapter_of(self)) is not None:
            adapter.attach_orders(scheduler_output)
        return original(self, scheduler_output)

    return _update_after_schedule


def has_finished_requests(original: Function) -> Function:
    """Wrap ``Scheduler.has_finished_requests``: an idle engine takes one more step while a final is to be told."""

    @wraps(original)
    def wrapped(self: Scheduler) -> bool:
        return bool(original(self)) or (_ENDS in vars(self) and bool(_ends(self).finals))

    return wrapped


def abort_requests(original: Function) -> Function:
    """Wrap ``EngineCore.abort_requests``: take out what the front end said about requests that it ended."""

    @wraps(original)
    def wrapped(self: EngineCore, request_ids: Sequence[str]) -> object:
        ids, kept, sent = split_marks(request_ids)
        if sent and (adapter := engine_core.adapter_of(self)) is not None:
            for key in sent:
                adapter.shared_wires.forget(key)
        if kept or _ENDS in vars(self.scheduler):
            ends = _ends(self.scheduler)
            for req_id, said in kept.items():
                request = self.scheduler.requests.get(req_id)
                is_running = request is not None and not request.is_finished()
                ends.front_end_kept(req_id, said, is_running=is_running)
            for req_id in ids:
                ends.front_end_left(req_id)
        return original(self, ids)

    return wrapped


def route_marks(original: Function) -> Function:
    """Wrap ``DPLBAsyncMPClient.abort_requests_async``: it drops ids it does not know; marks go to every engine."""

    @wraps(original)
    async def wrapped(self: AsyncEngineClient, request_ids: Sequence[str]) -> object:
        marks = [entry for entry in request_ids if is_mark(entry)]
        if marks and not self.resources.engine_dead:
            for engine in self.core_engines:
                await self._abort_requests(marks, engine)
        return await original(self, [entry for entry in request_ids if not is_mark(entry)])

    return wrapped
