"""Values of parts in answers: of notes that outputs have brought, each told once, to the choice that it is about."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.requests.call_context import HttpCall, Notes, UnsentNotes
from headgate.capture.engine.server import openai_routes
from headgate.capture.engine.server.openai_routes import answer_choices, answer_response
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.results import CaptureResults


def call_of(num_prompts: int, num_samples: int = 1) -> HttpCall:
    call = HttpCall(num_samples=num_samples)
    for _ in range(num_prompts):
        call.expect().notes = UnsentNotes(lambda notes: {"told": notes.by_part.get("reading", []), "end": notes.end})
    return call


def put(call: HttpCall, prompt: int, index: int, *notes: object, end: int | None = None, is_piece: bool = True) -> None:
    untold = call.slots[prompt].notes
    assert untold is not None
    untold.put(index, Notes({"reading": list(notes)} if notes else {}, end), is_piece=is_piece)


def chunk(*indices: int, **more: Any) -> str:
    choices = [{"index": index, "text": "ä", "finish_reason": None} for index in indices]
    return f"data: {json.dumps({'id': 'x', 'object': 'text_completion', 'choices': choices, **more})}\n\n"


def streamed(call: HttpCall, *steps: str | Callable[[], None]) -> list[Any]:
    """The choices of each chunk of a stream that does what `steps` say, or yields them."""

    async def stream() -> AsyncGenerator[str, None]:
        for step in steps:
            if isinstance(step, str):
                yield step
            else:
                step()
        yield "data: [DONE]\n\n"

    async def read() -> list[str]:
        return [text async for text in answer_choices(stream(), call)]  # type: ignore[attr-defined]

    events = "".join(asyncio.run(read())).removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")).get("choices") for event in events[:-1]]


def test_what_vllm_wrote_stays_as_it_is() -> None:
    """A part is put into the text of a chunk: its other fields are not written again, nor what follows the event."""
    call = HttpCall()
    call.expect().take_new = lambda index, num_rows: {"lens": {"payload": [0.1]}}
    written = (
        'data: {"created":1.50,"choices":[{"text":"\\u00e4","index":0,"top":1e2}],"usage":null}\n\ndata: {"x":1}\n\n'
    )

    async def stream() -> AsyncGenerator[str, None]:
        yield written

    async def read() -> list[str]:
        return [text async for text in answer_choices(stream(), call)]  # type: ignore[attr-defined]

    part = ',"capture_results":{"lens":{"payload":[0.1]}}'
    assert asyncio.run(read()) == [written.replace('"top":1e2', f'"top":1e2{part}')]


def test_parts_of_results_come_with_the_chunks_of_their_tokens() -> None:
    """Of two samples, one has a part in the first chunk, and the other in the second; whole results end the parts."""
    call = HttpCall(num_samples=2)
    slot = call.expect()
    asked: list[tuple[int, int]] = []

    def take_new(index: int, num_rows: int) -> Any:
        asked.append((index, num_rows))
        return {"lens": {"payload": {"positions": [num_rows - 1], "value": math.nan}}} if num_rows == 5 + index else {}

    def has(rows: dict[int, int]) -> Callable[[], None]:
        return lambda: slot.num_rows.update(rows)

    def end() -> None:
        slot.results = CaptureResults(merged={}, per_sample=({}, {}))

    slot.take_new = take_new
    choices = streamed(call, has({0: 5, 1: 5}), chunk(0, 1), has({0: 6, 1: 6}), chunk(1), chunk(0), end, chunk(0))

    part = {"lens": {"payload": {"positions": [4], "value": None}}}
    assert [[choice.get("capture_results") for choice in found] for found in choices] == [
        [part, None],
        [{"lens": {"payload": {"positions": [5], "value": None}}}],
        [None],
        [None],
    ]
    assert asked == [(0, 5), (1, 5), (1, 6), (0, 6)]


def test_each_choice_of_an_answer_has_its_own() -> None:
    call = call_of(2, num_samples=2)
    for prompt in range(2):
        for index in range(2):
            put(call, prompt, index, f"{prompt}.{index}", end=4, is_piece=False)
    answer = SimpleNamespace(choices=[SimpleNamespace(index=index) for index in range(4)])

    answer_choices(answer, call)

    assert [choice.told for choice in answer.choices] == [["0.0"], ["0.1"], ["1.0"], ["1.1"]]
    assert [choice.end for choice in answer.choices] == [4] * 4


def test_an_answer_says_so_if_there_is_nothing_to_tell() -> None:
    answer = SimpleNamespace(choices=[SimpleNamespace(index=0)])

    answer_choices(answer, call_of(1))

    assert answer.choices[0].told == []


def test_numbers_that_json_does_not_have_are_null() -> None:
    call = call_of(1)
    put(call, 0, 0, math.nan, 1.5, math.inf)
    answer = SimpleNamespace(choices=[SimpleNamespace(index=0)])

    answer_choices(answer, call)

    assert answer.choices[0].told == [None, 1.5, None]


def test_chunks_have_what_came_since_the_last_of_their_choice() -> None:
    call = call_of(1, num_samples=2)
    told = streamed(
        call,
        lambda: put(call, 0, 0, 1),
        chunk(0),
        lambda: put(call, 0, 1, 2),
        chunk(0),
        lambda: put(call, 0, 1, 3, end=9),
        chunk(1),
        chunk(1),
    )

    assert [[choice.get("told") for choice in choices] for choices in told] == [[[1]], [None], [[2, 3]], [None]]
    assert told[2][0]["end"] == 9
    assert told[0][0]["text"] == "ä"


@pytest.mark.parametrize("kind", ["text_completion", "chat.completion.chunk"])
def test_what_is_left_comes_before_the_end(kind: str) -> None:
    call = call_of(2, num_samples=2)

    told = streamed(call, chunk(0, object=kind), lambda: put(call, 1, 1, 7), lambda: put(call, 0, 1, 6))

    assert [(choice["index"], choice["told"]) for choice in told[-1]] == [(1, [6]), (3, [7])]
    assert all(("delta" in choice) == (kind != "text_completion") for choice in told[-1])


def test_chunks_without_news_and_errors_pass_as_they_are() -> None:
    call = call_of(1)
    put(call, 0, 0)
    error = 'data: {"error":{"message":"no"}}\n\n'

    assert streamed(call, chunk(0), error) == [[{"index": 0, "text": "ä", "finish_reason": None}], None]


def test_whole_notes_take_the_place_of_earlier_ones() -> None:
    call = call_of(1)
    put(call, 0, 0, 1, is_piece=False)
    put(call, 0, 0, 1, 2, is_piece=False)
    answer = SimpleNamespace(choices=[SimpleNamespace(index=0)])

    answer_choices(answer, call)

    assert answer.choices[0].told == [1, 2]


@pytest.mark.parametrize(("num_turns", "expected"), [(1, [0]), (2, [[0], [1]])])
def test_a_response_has_those_of_each_of_its_turns(num_turns: int, expected: Any) -> None:
    call = call_of(num_turns)
    for turn in range(num_turns):
        put(call, turn, 0, turn)
    response = SimpleNamespace(output=[])

    answer_response(response, call)

    assert response.told == expected  # type: ignore[attr-defined]


def test_other_routes_refuse_what_their_answers_have_no_place_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_routes, "answer_fields", lambda: {"return_told": "told"})

    with pytest.raises(RequestError, match="return_told: use /v1/completions"):
        openai_routes._refuse_unanswered({"steering_name": "x", "return_told": True})
    openai_routes._refuse_unanswered({"steering_name": "x"})
