"""Tells the engine core how many tokens the front end kept of requests that it ended itself; see `scheduler`.

Notes that come with the engine core's outputs are taken out on the way; see `noted_outputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

from headgate.capture.engine.contracts.end_messages import KeptTokens, mark_kept
from headgate.capture.engine.contracts.vllm_engine import EngineCoreRequest, Function
from headgate.capture.engine.contracts.vllm_frontend import (
    EngineCoreOutput,
    OutputProcessor,
    ProcessedOutputs,
    RequestState,
)
from headgate.capture.engine.contracts.wire_format import is_captured
from headgate.capture.engine.frontends.noted_outputs import expect_notes, take_notes

_WATCHED = "_headgate_watched"
"""Attribute of `OutputProcessor`: the `RequestState` of each capturing request that runs, and whether it has stop
strings."""


def add_request(original: Function) -> Function:
    """Wrap ``OutputProcessor.add_request``: remember requests that capture, and those whose notes are wanted."""

    @wraps(original)
    def wrapped(self: OutputProcessor, request: EngineCoreRequest, *args: object, **kwargs: object) -> object:
        result = original(self, request, *args, **kwargs)
        params = request.sampling_params
        expect_notes(self, request)
        if params is not None and is_captured(params):
            state = self.request_states[request.request_id]
            vars(self).setdefault(_WATCHED, {})[request.request_id] = (state, bool(params.stop))
        return result

    return wrapped


def process_outputs(original: Callable[..., ProcessedOutputs]) -> Function:
    """Wrap ``OutputProcessor.process_outputs``: say what was kept of requests whose stop string was looked for."""

    @wraps(original)
    def wrapped(
        self: OutputProcessor, engine_core_outputs: Sequence[EngineCoreOutput], *args: object, **kwargs: object
    ) -> ProcessedOutputs:
        take_notes(self, engine_core_outputs)
        processed = original(self, engine_core_outputs, *args, **kwargs)
        if watched := getattr(self, _WATCHED, None):
            for output in engine_core_outputs:
                req_id = output.request_id
                if req_id in watched and req_id not in self.request_states:
                    state, has_stop_strings = watched.pop(req_id)
                    if has_stop_strings:
                        processed.reqs_to_abort.append(mark_kept(req_id, _kept(state, "stop")))
        return processed

    return wrapped


def abort_requests(original: Callable[..., list[str]]) -> Function:
    """Wrap ``OutputProcessor.abort_requests``: say what was kept of the requests that the engine is to abort."""

    @wraps(original)
    def wrapped(self: OutputProcessor, *args: object, **kwargs: object) -> list[str]:
        to_abort = original(self, *args, **kwargs)
        watched = vars(self).get(_WATCHED, {})
        ended = [req_id for req_id in to_abort if req_id in watched]
        return [*to_abort, *(mark_kept(req_id, _kept(watched.pop(req_id)[0], "abort")) for req_id in ended)]

    return wrapped


def _kept(state: RequestState, status: str) -> KeptTokens:
    return KeptTokens(state.prompt_len + state.detokenizer.num_output_tokens(), status)
