"""How requests ended: noted in the engine core, told to the worker with the next step.

The worker sees ids only. Three parties know more: the scheduler (the tokens, and why it stopped), and for stop
strings the front end alone, since it has the text. While it looks, the engine runs ahead and may even end the request
for a reason of its own; so the final state of a request with stop strings is held back until the front end has said
how many tokens it kept.

The same goes for requests that the front end aborts: the user has fewer tokens than the engine.

What the front end says travels in its list of requests to abort, which keeps the order with everything else it sends
and takes no round trip. Finals travel as the attribute `FINAL_ATTRIBUTE` of a `SchedulerOutput`: for each request
``(num_prompt_tokens, all_token_ids, status)``, or None when the request ended and its final state follows later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

from headgate.capture.engine.core import engine_core
from headgate.capture.engine.requests.sampling_params import is_captured

FINAL_ATTRIBUTE = "headgate_final"
Final = tuple[int, list[int], str]
_MARK = "\0headgate\0"
_ENDS = "_headgate_ends"


class KeptTokens(NamedTuple):
    """What the front end kept of a request that it ended.

    Attributes:
        num_tokens: Prompt and output.
        status: Why: ``stop`` for a stop string, ``abort``.
    """

    num_tokens: int
    status: str


def mark_kept(req_id: str, kept: KeptTokens) -> str:
    """An entry for the list of requests to abort that says what the front end kept of `req_id`.

    Stock vLLM takes it for the id of an unknown request, which it ignores.
    """
    return f"{_MARK}{kept.num_tokens}\0{kept.status}\0{req_id}"


def split_marks(request_ids: Sequence[str]) -> tuple[list[str], dict[str, KeptTokens]]:
    """Part a list of requests to abort into the ids and what `mark_kept` said."""
    ids = [entry for entry in request_ids if not entry.startswith(_MARK)]
    kept = {}
    for entry in request_ids:
        if entry.startswith(_MARK):
            num_tokens, status, req_id = entry.removeprefix(_MARK).split("\0", 2)
            kept[req_id] = KeptTokens(int(num_tokens), status)
    return ids, kept


class RequestEnds:
    """How requests of one scheduler ended. Used on the engine core's thread only.

    Attributes:
        finals: To be told with the next step.
    """

    def __init__(self) -> None:
        self.finals: dict[str, Final | None] = {}
        self._kept: dict[str, KeptTokens] = {}
        self._held: dict[str, Final] = {}

    def end(self, req_id: str, final: Final, *, is_decided: bool) -> None:
        """A request was freed; if not `is_decided`, the front end's count is waited for."""
        kept = self._kept.pop(req_id, None)
        if kept is not None or is_decided:
            self.finals[req_id] = _trim(final, kept)
        else:
            self._held[req_id] = final
            self.finals[req_id] = None

    def front_end_kept(self, req_id: str, kept: KeptTokens, *, is_running: bool) -> None:
        """The front end ended `req_id`. Said twice (vLLM delivers aborts twice): ignored."""
        if req_id in self._held:
            self.finals[req_id] = _trim(self._held.pop(req_id), kept)
        elif is_running:
            self._kept[req_id] = kept

    def front_end_left(self, req_id: str) -> None:
        """The front end gave up on `req_id` and will not say more."""
        if req_id in self._held:
            self.finals[req_id] = self._held.pop(req_id)

    def take(self) -> dict[str, Final | None]:
        """What to tell now."""
        finals, self.finals = self.finals, {}
        return finals


def _trim(final: Final, kept: KeptTokens | None) -> Final:
    """What the front end said counts, unless the engine ended the request at the very same token, and knows better."""
    num_prompt, token_ids, status = final
    if kept is None or (kept.num_tokens >= len(token_ids) and status != "abort"):
        return final
    return num_prompt, token_ids[: kept.num_tokens], kept.status


def _ends(scheduler: Any) -> RequestEnds:
    found = vars(scheduler).get(_ENDS)
    if found is None:
        found = RequestEnds()
        setattr(scheduler, _ENDS, found)
    return found  # type: ignore[no-any-return]


def free_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Scheduler._free_request``: note how a capturing request ended, and free what `core` keeps for any."""

    @wraps(original)
    def _free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        params = request.sampling_params
        if is_captured(params):
            status = str(request.get_finished_reason())
            final = (int(request.num_prompt_tokens), list(request.all_token_ids), status)
            _ends(self).end(request.request_id, final, is_decided=status == "abort" or not params.stop)
        result = original(self, request, *args, **kwargs)
        if (seam := engine_core.adapter_of(self)) is not None:
            seam.freed(request.request_id)
        return result

    return _free_request


def update_after_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Scheduler._update_after_schedule``: attach the finals to the step that carries the finished ids."""

    @wraps(original)
    def _update_after_schedule(self: Any, scheduler_output: Any) -> Any:
        if _ENDS in vars(self) and (finals := _ends(self).take()):
            setattr(scheduler_output, FINAL_ATTRIBUTE, finals)
        return original(self, scheduler_output)

    return _update_after_schedule


def has_finished_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Scheduler.has_finished_requests``: an idle engine takes one more step while a final is to be told."""

    @wraps(original)
    def wrapped(self: Any) -> bool:
        return bool(original(self)) or (_ENDS in vars(self) and bool(_ends(self).finals))

    return wrapped


def abort_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``EngineCore.abort_requests``: take out what the front end said about requests that it ended."""

    @wraps(original)
    def wrapped(self: Any, request_ids: Sequence[str]) -> Any:
        ids, kept = split_marks(request_ids)
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


def route_marks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DPLBAsyncMPClient.abort_requests_async``: it drops ids it does not know; marks go to every engine."""

    @wraps(original)
    async def wrapped(self: Any, request_ids: Sequence[str]) -> Any:
        marks = [entry for entry in request_ids if entry.startswith(_MARK)]
        if marks and not self.resources.engine_dead:
            for engine in self.core_engines:
                await self._abort_requests(marks, engine)
        return await original(self, [entry for entry in request_ids if not entry.startswith(_MARK)])

    return wrapped
