"""Tells the engine core how many tokens the front end kept of requests with stop strings; see `scheduler`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from headgate.capture.engine.params import WIRE_KEY
from headgate.capture.engine.scheduler import mark_kept

_WATCHED = "_headgate_watched"


def add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``OutputProcessor.add_request``: remember capturing requests whose end only the front end can see."""

    @wraps(original)
    def wrapped(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        params = request.sampling_params
        if params is not None and params.stop and WIRE_KEY in (params.extra_args or {}):
            vars(self).setdefault(_WATCHED, {})[request.request_id] = self.request_states[request.request_id]
        return result

    return wrapped


def process_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``OutputProcessor.process_outputs``: say how many tokens were kept, in the list of requests to abort."""

    @wraps(original)
    def wrapped(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        processed = original(self, engine_core_outputs, *args, **kwargs)
        if watched := vars(self).get(_WATCHED):
            for output in engine_core_outputs:
                req_id = output.request_id
                if req_id in watched and req_id not in self.request_states:
                    state = watched.pop(req_id)
                    kept = state.prompt_len + state.detokenizer.num_output_tokens()
                    processed.reqs_to_abort.append(mark_kept(req_id, kept))
        return processed

    return wrapped


def forget_aborted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``OutputProcessor.abort_requests``: an aborted request keeps what the engine counted."""

    @wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if watched := vars(self).get(_WATCHED):
            for req_id in [req_id for req_id in watched if req_id not in self.request_states]:
                del watched[req_id]
        return result

    return wrapped
