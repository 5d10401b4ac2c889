"""What each row of a running engine was computed under, by its scheduler's word alone.

A test that changes what acts on requests while they run notes here under which state each position was launched, and
which launch each token that a client got came from. A captured row has to be of that very launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any

Runs = tuple[tuple[int, Hashable], ...]
"""First positions, ascending, each with the state of the rows from there on."""


class Launches:
    """Follows an engine core in this process.

    Args:
        core: vLLM's ``EngineCore``.
        state: Returns the state that acts on rows that are launched now.

    Attributes:
        kept: By request and index of a generated token: the rows of the launch that it was sampled in.
        begun_again: Requests of which a prompt that was computed in part was begun again.
        restarted: Those among them of which a row was computed in another state before.
        num_preempted: Requests that were preempted, each time.
    """

    def __init__(self, core: Any, state: Callable[[], Hashable]) -> None:
        self.kept: dict[str, dict[int, Runs]] = {}
        self.begun_again: set[str] = set()
        self.restarted: set[str] = set()
        self.num_preempted = 0
        self._state = state
        self._rows: dict[str, Runs] = {}
        self._launched: dict[int, tuple[Any, dict[str, Runs]]] = {}
        """By the id of the scheduler's output, which is kept so that no other one gets it."""
        self._scheduler = core.scheduler
        for name, wrapped in (("schedule", self._schedule), ("update_from_output", self._update)):
            setattr(core.scheduler, name, self._around(getattr(core.scheduler, name), wrapped))

    def _around(self, original: Any, wrapped: Any) -> Any:
        @wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            return wrapped(original, *args, **kwargs)

        return called

    def _schedule(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        self.num_preempted += len(made.preempted_req_ids or ())
        begun = {data.req_id for data in made.scheduled_new_reqs} | set(made.scheduled_cached_reqs.resumed_req_ids)
        for req_id, count in made.num_scheduled_tokens.items():
            request = self._scheduler.requests[req_id]
            first, state = request.num_computed_tokens - count, self._state()
            before = self._rows.get(req_id, ())
            if req_id in begun:
                if before and request.num_tokens == request.num_prompt_tokens:
                    self.begun_again.add(req_id)
                    if any(known != state for _, known in before):
                        self.restarted.add(req_id)
                # Rows that were found in the cache are as if they were computed now.
                before, first = (), 0
            kept = tuple(run for run in before if run[0] < first)
            self._rows[req_id] = kept if kept and kept[-1][1] == state else (*kept, (first, state))
        self._launched[id(made)] = made, {req_id: self._rows[req_id] for req_id in made.num_scheduled_tokens}
        return made

    def _update(self, original: Any, scheduled: Any, output: Any) -> Any:
        # What was launched before this followed the engine is of requests that nobody asks for.
        _, launched = self._launched.pop(id(scheduled), (None, {}))
        running = {req_id: one for req_id in launched if (one := self._scheduler.requests.get(req_id)) is not None}
        before = {req_id: request.num_tokens for req_id, request in running.items()}
        made = original(scheduled, output)
        for req_id, request in running.items():
            for index in range(before[req_id], request.num_tokens):
                self.kept.setdefault(req_id, {})[index] = launched[req_id]
        return made


def state_at(runs: Runs, position: int) -> Hashable:
    """The state under which the row at a position was computed."""
    return next(state for first, state in reversed(runs) if first <= position)
