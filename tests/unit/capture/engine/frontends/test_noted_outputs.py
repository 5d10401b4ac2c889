"""Notes in a front end: taken out of the engine core's outputs, carried by vLLM's, made into values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

from headgate.capture.engine.contracts.request_part import PartRequest
from headgate.capture.engine.frontends import output_processor
from headgate.capture.engine.frontends.async_llm import _with_results
from headgate.capture.engine.frontends.output_processor import (
    add_request,
    add_values,
    expect_notes,
    outdated_of,
    process_outputs,
    put_values,
    take_notes,
)
from headgate.capture.engine.requests import sampling_params
from headgate.capture.engine.requests.call_context import Slot
from headgate.capture.engine.requests.request_reader import OpenPart, RequestReader
from headgate.capture.engine.requests.sampling_params import HeadgateRequest, fold


class Reader:
    """Makes the notes, and the end, the value."""

    def read_notes(self, wanted: PartRequest, notes: Sequence[Any], end: int | None) -> Mapping[str, object]:
        return {"told": (list(notes), end)}


PART: Any = SimpleNamespace()
READER = RequestReader(None, {"reading": OpenPart("reading", PART, Reader())})  # type: ignore[arg-type]
ASKS = HeadgateRequest(parts={"reading": PartRequest(wire={}, field="f", names={}, wants_notes=True)})


class State:
    """vLLM's ``RequestState``, as far as it makes outputs of samples."""

    def __init__(self, kind: str, index: int, queue: RequestOutputCollector | None) -> None:
        self.prompt_len, self.index, self.queue = 10, index, queue
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: 3)
        self.output_kind = SimpleNamespace(name=kind)

    def _new_completion_output(self, token_ids: Any, finish_reason: Any, stop_reason: Any) -> CompletionOutput:
        return completion(self.index, finish_reason)


def queue_of(kind: str) -> RequestOutputCollector:
    return RequestOutputCollector(RequestOutputKind[kind], "r")


def processor(*req_ids: str, kind: str = "DELTA") -> Any:
    """An output processor with running requests of which notes are wanted: samples of one prompt, in one queue."""
    queue = queue_of(kind)
    made = SimpleNamespace(request_states={req_id: State(kind, i, queue) for i, req_id in enumerate(req_ids)})
    for req_id in req_ids:
        expect_notes(made, core_request({"v": 1, "notes": True}, req_id))
    return made


def core_request(wire: Any, req_id: str = "a") -> Any:
    params = SimpleNamespace(extra_args={"headgate": wire} if wire else None)
    return SimpleNamespace(request_id=req_id, sampling_params=params)


def noted(req_id: str, *notes: object, **others: Any) -> EngineCoreOutput:
    params = {**others, "headgate_notes": {"reading": list(notes)}} if notes else None
    return EngineCoreOutput(req_id, [1], kv_transfer_params=params)


def completion(index: int = 0, reason: str | None = None) -> CompletionOutput:
    return CompletionOutput(index, "", [1], None, None, finish_reason=reason)


def output_of(request_state: Any, reason: str | None = None) -> CompletionOutput:
    made: CompletionOutput = request_state._new_completion_output([1], reason, None)
    return made


def request_output(*samples: CompletionOutput) -> RequestOutput:
    return RequestOutput("r", None, [1], None, list(samples), False)


def told(output: RequestOutput) -> list[Any]:
    put_values(output, READER, ASKS)
    return [sample.told for sample in output.outputs]


def test_vllm_does_not_see_the_notes() -> None:
    outputs = [noted("a", 1), noted("b", 2, theirs=3), noted("unknown", 4), noted("c")]

    take_notes(processor("a", "b", "c"), outputs)

    assert [output.kv_transfer_params for output in outputs] == [None, {"theirs": 3}, None, None]


def test_a_processor_none_of_whose_requests_asked_does_not_look() -> None:
    idle: Any = SimpleNamespace(request_states={})
    for wire in (None, {"v": 1}):
        expect_notes(idle, core_request(wire))

    take_notes(idle, [object()])  # type: ignore[list-item]  # nothing of it is read


def test_deltas_have_the_notes_since_the_last() -> None:
    front = processor("a")
    take_notes(front, [noted("a", 1)])
    take_notes(front, [noted("a", 2)])
    first = output_of(front.request_states["a"])
    quiet = output_of(front.request_states["a"])
    take_notes(front, [noted("a", 3)])
    last = output_of(front.request_states["a"], reason="length")

    assert told(request_output(first)) == [([1, 2], None)]
    assert told(request_output(quiet)) == [([], None)]
    assert told(request_output(last)) == [([3], 13)]


@pytest.mark.parametrize("kind", ["CUMULATIVE", "FINAL_ONLY"])
def test_other_outputs_have_all_and_keep_them(kind: str) -> None:
    front = processor("a", kind=kind)
    take_notes(front, [noted("a", 1)])
    first = output_of(front.request_states["a"])
    take_notes(front, [noted("a", 2)])
    second = output_of(front.request_states["a"], reason="stop")

    assert told(request_output(first)) == [([1], None)]
    assert told(request_output(second)) == [([1, 2], 13)]


def test_merged_deltas_have_the_notes_of_both() -> None:
    front = processor("a", "b")
    states = front.request_states
    put = states["a"].queue.put
    take_notes(front, [noted("a", 1)])
    put(request_output(output_of(states["a"])))
    take_notes(front, [noted("a", 2), noted("b", 3)])
    put(request_output(output_of(states["a"])))
    put(request_output(output_of(states["b"])))
    put(request_output(output_of(states["a"])))
    take_notes(front, [noted("b", 4)])
    put(request_output(output_of(states["b"], reason="stop")))

    waiting = states["b"].queue.get_nowait()
    assert waiting.outputs[0].token_ids == [1, 1, 1]
    assert told(waiting) == [([1, 2], None), ([3, 4], 13)]


def test_a_delta_without_notes_takes_those_of_the_next_in() -> None:
    front = processor("a")
    state = front.request_states["a"]
    state.queue.put(request_output(output_of(state)))
    take_notes(front, [noted("a", 1)])
    state.queue.put(request_output(output_of(state)))

    assert told(state.queue.get_nowait()) == [([1], None)]


def test_a_cumulative_output_takes_the_place_of_the_one_before() -> None:
    front = processor("a", kind="CUMULATIVE")
    state = front.request_states["a"]
    take_notes(front, [noted("a", 1)])
    state.queue.put(request_output(output_of(state)))
    take_notes(front, [noted("a", 2)])
    state.queue.put(request_output(output_of(state)))

    assert told(state.queue.get_nowait()) == [([1, 2], None)]


def test_an_error_takes_the_place_of_outputs_with_notes() -> None:
    front = processor("a")
    state = front.request_states["a"]
    take_notes(front, [noted("a", 1)])
    state.queue.put(request_output(output_of(state)))
    state.queue.put(ValueError("the engine is gone"))
    take_notes(front, [noted("a", 2)])
    state.queue.put(request_output(output_of(state)))

    with pytest.raises(ValueError, match="is gone"):
        state.queue.get_nowait()


def test_requests_that_do_not_ask_are_left_as_they_are() -> None:
    queue = queue_of("DELTA")
    idle: Any = SimpleNamespace(request_states={"a": State("DELTA", 0, queue)})

    expect_notes(idle, core_request({"v": 1}))

    assert type(idle.request_states["a"]) is State
    assert type(queue) is RequestOutputCollector


def test_a_request_that_asks_again_is_followed_once() -> None:
    front = processor("a")
    before = type(front.request_states["a"])

    expect_notes(front, core_request({"v": 1, "notes": True}))

    assert type(front.request_states["a"]) is before
    assert isinstance(front.request_states["a"], State)
    assert isinstance(front.request_states["a"].queue, RequestOutputCollector)


def test_an_output_processor_that_makes_outputs_otherwise_is_refused() -> None:
    class Other:
        """vLLM's class of a release to come."""

        def _new_completion_output(self, tokens: Any) -> None: ...

    output_processor.check_methods(RequestState, RequestOutputCollector)

    with pytest.raises(TypeError, match=r"Other\._new_completion_output takes \(self, tokens\), expected"):
        output_processor.check_methods(Other, RequestOutputCollector)


def test_outputs_have_none_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Output:
        """vLLM's class."""

    monkeypatch.setattr(output_processor, "answer_fields", lambda: {"return_told": "told"})

    add_values(Output)
    add_values(Output)

    assert Output.told is None  # type: ignore[attr-defined]
    Output.told = "vLLM's"  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="'told' of its own"):
        add_values(Output)


@pytest.mark.parametrize("wants_notes", [False, True])
@pytest.mark.parametrize("reads_every_row", [False, True])
def test_a_request_says_on_its_way_that_notes_are_wanted_and_rows_are_read(
    wants_notes: bool, reads_every_row: bool
) -> None:
    wanted = PartRequest(wire={}, field="f", names={}, wants_notes=wants_notes, reads_every_row=reads_every_row)
    params = SimpleNamespace(extra_args={}, n=1, skip_reading_prefix_cache=None)
    request: Any = SimpleNamespace(sampling_params=params, prompt_token_ids=[1, 2], prompt_embeds=None, resumable=False)

    fold(request, HeadgateRequest(parts={"reading": wanted}), "r")

    assert params.extra_args["headgate"].get("notes", False) is wants_notes
    assert params.skip_reading_prefix_cache is (True if reads_every_row else None)


def test_false_is_as_good_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_params, "answer_fields", lambda: {"return_told": "told"})

    assert sampling_params.none_if_default("return_told", False) is None
    assert sampling_params.none_if_default("return_told", True) is True
    assert sampling_params.none_if_default("steering_name", False) is False


@pytest.mark.parametrize("is_streamed", [True, False])
def test_vllm_does_not_see_that_a_prompt_was_computed_again(is_streamed: bool) -> None:
    """Chunks learn of it by the key of its results; an `LLM` keeps none."""
    made: Any = SimpleNamespace(request_states={req_id: State("DELTA", 0, None) for req_id in ("a", "b")})
    if is_streamed:
        assert outdated_of(made) == set()
    for req_id in made.request_states:
        request = core_request({"v": 1, "capture": {"key": f"key of {req_id}"}}, req_id)
        request.sampling_params.stop = []
        add_request(lambda *_: None)(made, request)
    carried = ({"headgate_outdated": True, "theirs": 3}, None, {"headgate_outdated": True})
    outputs = [
        EngineCoreOutput(req_id, [1], kv_transfer_params=told) for req_id, told in zip("abc", carried, strict=True)
    ]

    seen = process_outputs(lambda _, outputs: [output.kv_transfer_params for output in outputs])(made, outputs)

    assert seen == [{"theirs": 3}, None, None]
    assert outdated_of(made) == ({"key of a"} if is_streamed else set())


@pytest.mark.parametrize("is_outdated", [True, False])
def test_chunks_get_no_part_of_a_prompt_that_was_computed_again(is_outdated: bool) -> None:
    front: Any = SimpleNamespace(streamed=lambda _: lambda index, num_rows: {"lens": num_rows}, forget=lambda _: None)
    ask: Any = SimpleNamespace(key="k", is_explicit=True, wait=True)
    slot, outdated = Slot(), {"k"} if is_outdated else set()

    async def outputs() -> AsyncGenerator[RequestOutput, None]:
        yield RequestOutput("r", None, [1, 2], None, [completion()], False)

    async def taken() -> list[Any]:
        read = _with_results(outputs(), front, ask, slot, outdated, is_piece=True)
        return [slot.take_new and slot.take_new(0, slot.num_rows[0]) async for _ in read]

    assert asyncio.run(taken()) == [None if is_outdated else {"lens": 2}]
    assert outdated == set()


@pytest.mark.parametrize("is_piece", [True, False])
@pytest.mark.parametrize("begins_again", [True, False])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_samples_take_their_own_chunks_until_the_prompt_is_computed_again(
    is_piece: bool, begins_again: bool, is_streamed: bool
) -> None:
    """From then on, and where no consumer streams, each sample gets its rows with the results alone."""

    results = SimpleNamespace(merged={"lens": "both"}, per_sample=[{"lens": "first"}, {"lens": "second"}])

    async def wait(_: Any, *, is_aborted: bool) -> Any:
        return results

    taker = (lambda index, num_rows: (index, num_rows)) if is_streamed else None
    reader = SimpleNamespace(hidden_states=None)
    front: Any = SimpleNamespace(
        streamed=lambda _: taker, forget=lambda _: None, wait_async=wait, capture_reader=reader
    )
    ask: Any = SimpleNamespace(key="k", is_explicit=True, wait=True)
    slot, outdated, lengths, told = Slot(), set[str](), {0: 0, 1: 0}, list[Any]()

    def sample(index: int) -> CompletionOutput:
        lengths[index] += 1
        return replace(completion(index), token_ids=[1] * (1 if is_piece else lengths[index]))

    async def outputs() -> AsyncGenerator[RequestOutput, None]:
        for step, indices in enumerate(([0], [1, 0], [1], [0, 1])):
            outdated.update({"k"} if begins_again and step == 3 else ())
            yield RequestOutput("r", None, [1, 2], None, [sample(index) for index in indices], step == 3)

    async def taken() -> list[Any]:
        found = list[Any]()
        async for output in _with_results(outputs(), front, ask, slot, outdated, is_piece=is_piece):
            take = slot.take_new
            told.append([getattr(each, "capture_results", None) for each in output.outputs])
            found.append(take and [take(each.index, slot.num_rows[each.index]) for each in output.outputs])
        return found

    chunks = [[(0, 2)], [(1, 2), (0, 3)], [(1, 3)], None if begins_again else [(0, 4), (1, 4)]]
    assert asyncio.run(taken()) == (chunks if is_streamed else [None] * 4)
    assert told[-1] == results.per_sample
    assert slot.results is results
    assert outdated == set()
