"""What the step thread hands over is the same behind the socket, to the last field."""

from __future__ import annotations

from dataclasses import fields
from unittest.mock import Mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.delivery.delivery import MemoryWanted, RequestBegins, RequestEnds
from headgate.capture.engine.core.core_calls import frame_of
from headgate.capture.planning.step_plan import PackGroup, SiteSet
from headgate.capture.process.messages import (
    NOBODY,
    UNKNOWN,
    Begin,
    End,
    NumberedRequests,
    RequestNumbers,
    Staged,
    WantsMemory,
    decode_to_process,
    encode,
    message_of,
    new_request,
    pack_group,
    request_ends,
)
from headgate.capture.schema.batch import FinalState, NewRequest
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.staging.host_rows import CopyPart, Lease, StagedRows
from tests.fakes.capture_world import want


def sent(item, requests=None):
    return decode_to_process(encode(message_of(item, requests or RequestNumbers())))


SITES = SiteSet((Site(0, HookPoint.POST_MLP), Site(3, HookPoint.POST_MLP)), np.arange(2))
lengths = st.lists(st.integers(1, 4), min_size=1, max_size=6)


@given(lengths, st.booleans(), st.booleans(), st.data())
def test_rows_are_the_same_whatever_they_count_by(counts, is_shuffled, are_masks_alike, data) -> None:
    total, stops = sum(counts), np.cumsum(counts).tolist()
    req_ids = [f"request-{index}" for index in range(len(counts))]
    known = data.draw(st.sets(st.sampled_from(req_ids)))
    spans = tuple(zip(req_ids, [0, *stops[:-1]], stops, strict=True))
    group = PackGroup(
        site_set=SITES,
        rows=np.array(data.draw(st.permutations(range(total)))) if is_shuffled else np.arange(total) + 5,
        positions=np.concatenate([np.arange(count) + data.draw(st.integers(0, 9)) for count in counts]),
        masks=np.full(total, 3) if are_masks_alike else np.arange(total) % 3,
        spans=spans,
    )
    worker, process = RequestNumbers(), NumberedRequests()
    for req_id in [*req_ids, *known]:  # one that begins again has another number
        process.begin(worker.begin(req_id), req_id)
    for req_id in set(req_ids) - known:
        worker.end(req_id)
        process.end(req_id)
    staged = StagedRows(
        CopyPart((group,), 0, total, 2 * total), torch.zeros(8, 4), Mock(), Lease(0, 16, 7), Mock(), 1.5
    )

    message = sent(staged, worker)

    assert isinstance(message, Staged)
    received = pack_group(message.groups[0], SITES, process)
    for name in ("rows", "positions", "masks"):
        assert getattr(received, name).tolist() == getattr(group, name).tolist()
        assert getattr(received, name).dtype == np.int64
    assert received.spans == tuple((each if each in known else NOBODY, *bounds) for each, *bounds in spans)


def test_a_process_that_takes_anothers_place_knows_no_request_of_it() -> None:
    worker = RequestNumbers()
    first = worker.begin("a")
    worker.clear()

    assert np.frombuffer(worker.of((("a", 0, 1),)), np.int64).tolist() == [UNKNOWN]
    assert worker.begin("a") != first


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
    assert isinstance(sent(MemoryWanted()), WantsMemory)
