"""What the step thread hands over is the same behind the socket, to the last field."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from headgate.capture.delivery.handoff import MemoryWanted, RequestBegins, RequestEnds
from headgate.capture.engine.core.frames import frame_of
from headgate.capture.process.messages import (
    Begin,
    End,
    Wanted,
    decode_to_process,
    encode,
    message_of,
    new_request,
    request_ends,
)
from headgate.capture.schema.batch import FinalState, NewRequest
from tests.fakes.capture_world import want


def sent(item):
    return decode_to_process(encode(message_of(item)))


def test_a_request_keeps_its_prompt_and_its_section() -> None:
    long = frame_of(b"x" * 100_000)  # as long bytes of a wire come from the front end
    spec = {**want().to_wire(), "options": {"tag": "t", "blob": long}}
    capture = {"id": "client", "n": 2, "key": "k", "reply": "ipc://hub", "wait": True, "specs": {"c0": spec}}
    wire = {"v": 1, "capture": capture, "parts": {"steering": {"secret": 1}}}
    new = NewRequest(req_id="a", prompt_token_ids=[5, 6, 7], wire=wire)  # type: ignore[arg-type]

    message = sent(RequestBegins(new, {0: want()}, is_same_client=True))

    assert isinstance(message, Begin)
    assert message.is_same_client
    received = new_request(message)
    assert (received.req_id, received.prompt_token_ids.tolist()) == ("a", [5, 6, 7])
    spec = {**spec, "options": {"tag": "t", "blob": bytes(long)}}
    assert received.wire == {"v": 1, "capture": {**capture, "specs": {"c0": spec}}}


def test_a_request_that_captures_nothing_any_more_has_no_section() -> None:
    message = sent(RequestBegins(NewRequest(req_id="a", prompt_token_ids=[1]), {}))

    assert isinstance(message, Begin)
    assert new_request(message).wire is None


def test_every_field_of_an_end_arrives() -> None:
    final = FinalState(
        num_prompt_tokens=2,
        token_ids=np.array([3, 1, 4], dtype=np.int64),
        status="stop",
        notes={"steering": {"positions": [0, 1], "score": [0.5, None]}},
    )

    message = sent(RequestEnds("a", final))

    assert isinstance(message, End)
    received = request_ends(message).final
    assert received is not None
    for field in fields(FinalState):
        got, expected = getattr(received, field.name), getattr(final, field.name)
        assert np.array_equal(got, expected) if isinstance(expected, np.ndarray) else got == expected, field.name


def test_an_end_that_nobody_knows_stays_unknown() -> None:
    message = sent(RequestEnds("a", None))

    assert isinstance(message, End)
    assert request_ends(message) == RequestEnds("a", None)


def test_memory_is_asked_for() -> None:
    assert isinstance(sent(MemoryWanted()), Wanted)
