"""Outputs with the notes of their steps: from the engine core's outputs to the values that a user finds on them.

An `AsyncLLM` makes outputs faster than they are read, at times, and merges them. So an output carries notes until it
is handed out, and values are made of them then.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from functools import wraps
from types import ModuleType
from typing import cast

from headgate.capture.engine.contracts.vllm_engine import EngineCoreRequest, Function
from headgate.capture.engine.contracts.vllm_frontend import (
    CompletionOutput,
    EngineCoreOutput,
    OutputProcessor,
    RequestOutput,
    RequestState,
)
from headgate.capture.engine.contracts.wire_format import NOTES_KEY, wants_notes
from headgate.capture.engine.requests.call_context import Slot
from headgate.capture.engine.requests.notes import Notes, UntoldNotes
from headgate.capture.engine.requests.request_reader import RequestReader, read_notes
from headgate.capture.engine.requests.sampling_params import HeadgateRequest, answer_fields

_IS_NOTED = "_headgate_is_noted"
"""Attribute of `OutputProcessor`: true once a request has come whose notes are wanted."""
_NOTES = "_headgate_notes"
"""Attribute of a `RequestState`: its `Notes` that no output has yet or, unless outputs are deltas, all. Also of a
`CompletionOutput` until it is handed out: its own."""


def add_values(module: ModuleType) -> None:
    """Give every output of ``vllm.outputs`` the values that requests may ask for, None unless one did."""
    for name in answer_fields().values():
        if getattr(module.CompletionOutput, name, None) is not None:
            raise TypeError(f"vLLM's CompletionOutput has an attribute {name!r} of its own")
        setattr(module.CompletionOutput, name, None)


def expect_notes(processor: OutputProcessor, request: EngineCoreRequest) -> None:
    """A request was added to an `OutputProcessor`."""
    if wants_notes(request.sampling_params):
        vars(processor)[_IS_NOTED] = True


def take_notes(processor: OutputProcessor, outputs: Iterable[EngineCoreOutput]) -> None:
    """Take the notes out of the engine core's outputs before vLLM looks at these; keep those of running requests."""
    if _IS_NOTED not in vars(processor):
        return
    for output in outputs:
        carrier = output.kv_transfer_params
        if carrier is None or NOTES_KEY not in carrier:
            continue
        found = cast("dict[str, list[object]]", carrier[NOTES_KEY])
        output.kv_transfer_params = {key: value for key, value in carrier.items() if key != NOTES_KEY} or None
        if (state := processor.request_states.get(output.request_id)) is not None:
            vars(state).setdefault(_NOTES, Notes()).add(found)


def new_completion_output(original: Callable[..., CompletionOutput]) -> Function:
    """Wrap ``RequestState._new_completion_output``: an output has the notes since the last one, or all of them."""

    @wraps(original)
    def wrapped(
        self: RequestState, token_ids: object, finish_reason: object, *args: object, **kwargs: object
    ) -> CompletionOutput:
        output = original(self, token_ids, finish_reason, *args, **kwargs)
        held: Notes | None = vars(self).get(_NOTES)
        if held is not None:
            if is_delta(self.output_kind):
                del vars(self)[_NOTES]
            else:
                held = Notes({part: list(notes) for part, notes in held.by_part.items()})
            if finish_reason is not None:
                held.end = self.prompt_len + self.detokenizer.num_output_tokens()
            setattr(output, _NOTES, held)
        return output

    return wrapped


def add_output(original: Function) -> Function:
    """Wrap ``RequestOutput.add``: where new tokens are appended to those of an earlier output, so are notes."""

    @wraps(original)
    def wrapped(self: RequestOutput, next_output: RequestOutput, aggregate: bool) -> object:
        earlier = {completion.index: completion for completion in self.outputs} if aggregate else {}
        result = original(self, next_output, aggregate)
        for later in next_output.outputs:
            held: Notes | None = vars(later).get(_NOTES)
            if held is not None and later.index in earlier:
                merged: Notes = vars(earlier[later.index]).setdefault(_NOTES, Notes())
                merged.add(held.by_part)
                merged.end = held.end
        return result

    return wrapped


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
        slot.notes = UntoldNotes(lambda notes: read_notes(reader, headgate_request, notes))
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
