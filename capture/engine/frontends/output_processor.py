"""Reports to the engine core how many tokens the front end kept of requests that it ended itself, and passes on notes.

Notes of steps come with the engine core's outputs, and become values that a user finds on vLLM's outputs. An `AsyncLLM`
makes outputs faster than they are read, at times, and merges them. So an output carries notes until it is handed out,
and values are made of them then.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import cache, wraps
from typing import NamedTuple, TypeVar, cast

from headgate.capture.engine.contracts.wire_format import NOTES_KEY, OUTDATED_KEY, wants_notes, wire_of
from headgate.capture.engine.core.request_ends import KeptTokens, mark_kept
from headgate.capture.engine.requests.call_context import Notes, Slot, UnsentNotes
from headgate.capture.engine.requests.request_reader import RequestReader, read_notes
from headgate.capture.engine.requests.sampling_params import HeadgateRequest, answer_fields
from headgate.capture.engine.vllm_types import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    Function,
    OutputProcessor,
    OutputQueue,
    ProcessedOutputs,
    RequestOutput,
    RequestState,
)

_IS_NOTED = "_headgate_is_noted"
"""Attribute of `OutputProcessor`: true once a request has come whose notes are wanted."""
_NOTES = "_headgate_notes"
"""Attribute of a `RequestState`: its `Notes` that no output has yet or, unless outputs are deltas, all. Also of a
`CompletionOutput` until it is handed out: its own."""
_IS_OURS = "_headgate_is_noting"
"""Attribute of the subclasses that are made here."""


def add_values(completion: type) -> None:
    """Give every ``CompletionOutput`` of vLLM's the values that requests may ask for, None unless one did."""
    for name in answer_fields().values():
        if getattr(completion, name, None) is not None:
            raise TypeError(f"vLLM's CompletionOutput has an attribute {name!r} of its own")
        setattr(completion, name, None)


def expect_notes(processor: OutputProcessor, request: EngineCoreRequest) -> None:
    """Follow a request that was added to an `OutputProcessor`, if its notes are wanted."""
    if wants_notes(request.sampling_params):
        setattr(processor, _IS_NOTED, True)
        _follow(processor.request_states[request.request_id])


def take_notes(processor: OutputProcessor, outputs: Iterable[EngineCoreOutput]) -> None:
    """Take the notes out of the engine core's outputs before vLLM looks at these; keep those of running requests."""
    if not getattr(processor, _IS_NOTED, False):  # `vars` would make its attributes slower to find
        return
    for output in outputs:
        if (found := _taken(output, NOTES_KEY)) is None:
            continue
        if (state := processor.request_states.get(output.request_id)) is not None:
            vars(state).setdefault(_NOTES, Notes()).add(cast("dict[str, list[object]]", found))


def _taken(output: EngineCoreOutput, key: str) -> object:
    """Take what an output of the engine core carries under a key of ours out of it; None if there is nothing."""
    carrier = output.kv_transfer_params
    if carrier is None or key not in carrier:
        return None
    output.kv_transfer_params = {name: value for name, value in carrier.items() if name != key} or None
    return carrier[key]


def _follow(state: RequestState) -> None:
    """Let a running request, and the queue of its outputs, carry notes from now on; those of others stay vLLM's own."""
    # A subclass, and no method of the object: that would lead back to it, and hold its tokens in a circle.
    state.__class__ = _noting(state.__class__)
    if state.queue is not None:
        state.queue.__class__ = _merging(state.queue.__class__)


@cache
def _noting(kind: type[RequestState]) -> type[RequestState]:
    """Make the subclass of ``RequestState`` for requests whose notes are wanted; one of those is its own."""
    if getattr(kind, _IS_OURS, False):
        return kind

    class Noting(kind):  # type: ignore[misc, valid-type]
        """A request whose outputs have the notes since the last one, or all of them."""

        def _new_completion_output(
            self, token_ids: object, finish_reason: object, *args: object, **kwargs: object
        ) -> CompletionOutput:
            output: CompletionOutput = super()._new_completion_output(token_ids, finish_reason, *args, **kwargs)
            return _with_notes(self, output, has_ended=finish_reason is not None)

    return _named_like(kind, Noting)


@cache
def _merging(kind: type[OutputQueue]) -> type[OutputQueue]:
    """Make the subclass of ``RequestOutputCollector`` for the same requests."""
    if getattr(kind, _IS_OURS, False):
        return kind

    class Merging(kind):  # type: ignore[misc, valid-type]
        """A queue that appends notes, too, where it appends new tokens to those of an unread output."""

        def put(self, output: object) -> None:
            earlier = self.output if self.aggregate else None
            super().put(output)
            if hasattr(earlier, "outputs") and hasattr(output, "outputs"):  # neither is an error
                _merge(cast("RequestOutput", earlier), cast("RequestOutput", output))

    return _named_like(kind, Merging)


_Kind = TypeVar("_Kind", bound=type)


def _named_like(kind: type, made: _Kind) -> _Kind:
    made.__name__, made.__qualname__ = kind.__name__, kind.__qualname__
    setattr(made, _IS_OURS, True)
    return made


def check_methods(state: type, collector: type) -> None:
    """Refuse a ``RequestState`` and a ``RequestOutputCollector`` of vLLM's for which `expect_notes` is not enough.

    Raises:
        TypeError: Naming the method.
    """
    needed = (
        (state, "_new_completion_output", ("self", "token_ids", "finish_reason", "stop_reason")),
        (collector, "put", ("self", "output")),
    )
    for owner, name, expected in needed:
        found = tuple(inspect.signature(getattr(owner, name)).parameters)
        if found[: len(expected)] != expected:
            raise TypeError(
                f"{owner.__name__}.{name} takes ({', '.join(found)}), expected ({', '.join(expected)}, ...)"
            )


def _with_notes(state: RequestState, output: CompletionOutput, *, has_ended: bool) -> CompletionOutput:
    held: Notes | None = vars(state).get(_NOTES)
    if held is None:
        return output
    if is_delta(state.output_kind):
        del vars(state)[_NOTES]
    else:
        held = Notes({part: list(notes) for part, notes in held.by_part.items()})
    if has_ended:
        held.end = state.prompt_len + state.detokenizer.num_output_tokens()
    setattr(output, _NOTES, held)
    return output


def _merge(earlier: RequestOutput, later: RequestOutput) -> None:
    """Append the notes of an output that was merged with one before it."""
    samples = {sample.index: sample for sample in earlier.outputs}
    for sample in later.outputs:
        held: Notes | None = vars(sample).get(_NOTES)
        if held is not None and samples[sample.index] is not sample:
            merged: Notes = vars(samples[sample.index]).setdefault(_NOTES, Notes())
            merged.add(held.by_part)
            merged.end = held.end


def is_delta(kind: object) -> bool:
    """Whether outputs of this kind hold new tokens alone."""
    return getattr(kind, "name", None) == "DELTA"


def put_values(output: RequestOutput, reader: RequestReader, headgate_request: HeadgateRequest) -> None:
    """Put the values that a request asked for on an output that is handed out."""
    for completion in output.outputs:
        held: Notes | None = vars(completion).pop(_NOTES, None)
        for name, value in read_notes(reader, headgate_request, held or Notes()).items():
            setattr(completion, name, value)


async def with_values(
    outputs: AsyncGenerator[RequestOutput, None],
    reader: RequestReader,
    headgate_request: HeadgateRequest,
    kind: object,
    slot: Slot | None,
) -> AsyncGenerator[RequestOutput, None]:
    """Put the values on each output of an `AsyncLLM`.

    Args:
        outputs: Of one request.
        reader: Of the engine.
        headgate_request: The request.
        kind: Of its outputs.
        slot: Its place in an HTTP call, which gets the notes instead; its answer makes values of them.
    """
    if slot is not None:
        slot.notes = UnsentNotes(lambda notes: read_notes(reader, headgate_request, notes))
    try:
        async for output in outputs:
            if slot is None or slot.notes is None:
                put_values(output, reader, headgate_request)
            else:
                for completion in output.outputs:
                    if (held := vars(completion).pop(_NOTES, None)) is not None:
                        slot.notes.put(completion.index, held, is_piece=is_delta(kind))
            yield output
    finally:
        await outputs.aclose()


_WATCHED = "_headgate_watched"
"""Attribute of `OutputProcessor`: the `RequestState` of each capturing request that runs, whether it has stop strings,
and the key of its results."""
_OUTDATED = "_headgate_outdated"
"""Attribute of `OutputProcessor`; see `outdated_of`."""


def outdated_of(processor: OutputProcessor) -> set[str]:
    """Return keys of results that rows of before a change are in: chunks of a stream must have no part of them.

    Who streams a result takes its key out in the end.
    """
    found: set[str] = vars(processor).setdefault(_OUTDATED, set())
    return found


def _take_marks(processor: OutputProcessor, outputs: Iterable[EngineCoreOutput]) -> None:
    """Take the marks of outdated prompts out of the engine core's outputs."""
    for output in outputs:
        if _taken(output, OUTDATED_KEY):
            watched: _Watched | None = vars(processor)[_WATCHED].get(output.request_id)
            keys: set[str] | None = vars(processor).get(_OUTDATED)
            if watched is not None and keys is not None:  # else it is that of an `LLM`, which streams nothing
                keys.add(watched.key)


class _Watched(NamedTuple):
    state: RequestState
    has_stop_strings: bool
    key: str


def add_request(original: Function) -> Function:
    """Wrap ``OutputProcessor.add_request``: remember requests that capture, and those whose notes are wanted."""

    @wraps(original)
    def wrapped(self: OutputProcessor, request: EngineCoreRequest, *args: object, **kwargs: object) -> object:
        result = original(self, request, *args, **kwargs)
        params = request.sampling_params
        expect_notes(self, request)
        wire = wire_of(params)
        if params is not None and wire is not None and "capture" in wire:
            found = _Watched(self.request_states[request.request_id], bool(params.stop), wire["capture"]["key"])
            vars(self).setdefault(_WATCHED, {})[request.request_id] = found
        return result

    return wrapped


def process_outputs(original: Callable[..., ProcessedOutputs]) -> Function:
    """Wrap ``OutputProcessor.process_outputs``: say what was kept of requests whose stop string was looked for."""

    @wraps(original)
    def wrapped(
        self: OutputProcessor, engine_core_outputs: Sequence[EngineCoreOutput], *args: object, **kwargs: object
    ) -> ProcessedOutputs:
        take_notes(self, engine_core_outputs)
        watched: dict[str, _Watched] = getattr(self, _WATCHED, None) or {}
        if watched:
            _take_marks(self, engine_core_outputs)
        processed = original(self, engine_core_outputs, *args, **kwargs)
        if watched:
            for output in engine_core_outputs:
                req_id = output.request_id
                if req_id in watched and req_id not in self.request_states:
                    state, has_stop_strings, _ = watched.pop(req_id)
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
        return [*to_abort, *(mark_kept(req_id, _kept(watched.pop(req_id).state, "abort")) for req_id in ended)]

    return wrapped


def _kept(state: RequestState, status: str) -> KeptTokens:
    return KeptTokens(state.prompt_len + state.detokenizer.num_output_tokens(), status)
