"""What the step thread hands over is the same in a capture process, to the last field."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.engine.contracts.core_calls import frame_of
from headgate.capture.links.messages import Message, Staged, decode, encode, pack_group, staged
from headgate.capture.planning.step_plan import PackGroup, SiteSet
from headgate.capture.schema.batch import Begin, End, MemoryWanted
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.staging.host_rows import Lease, StagedRows
from tests.fakes.capture_world import want

SITES = SiteSet((Site(0, HookPoint.POST_MLP), Site(3, HookPoint.POST_MLP)), np.arange(2))
lengths = st.lists(st.integers(1, 4), min_size=1, max_size=6)


@given(lengths, st.booleans(), st.booleans(), st.data())
def test_rows_are_the_same_whatever_they_count_by(counts, is_shuffled, are_masks_alike, data) -> None:
    total, stops = sum(counts), np.cumsum(counts).tolist()
    req_ids = [f"request-{index}" for index in range(len(counts))]
    group = PackGroup(
        site_set=SITES,
        rows=np.array(data.draw(st.permutations(range(total)))) if is_shuffled else np.arange(total) + 5,
        positions=np.concatenate([np.arange(count) + data.draw(st.integers(0, 9)) for count in counts]),
        masks=np.full(total, 3) if are_masks_alike else np.arange(total) % 3,
        spans=tuple(zip(req_ids, [0, *stops[:-1]], stops, strict=True)),
    )
    item = StagedRows((group,), 0, total, 2 * total).placed(Lease(0, 16, 7), Mock(), torch.zeros(8, 4), Mock())

    message = decode(encode(staged(item)))

    assert isinstance(message, Staged)
    received = pack_group(message.groups[0], SITES)
    for name in ("rows", "positions", "masks"):
        assert getattr(received, name).tolist() == getattr(group, name).tolist()
        assert getattr(received, name).dtype == np.int64
    assert received.spans == group.spans


def test_a_request_keeps_its_prompt_and_its_section() -> None:
    long = frame_of(b"x" * 100_000)  # as long bytes of a wire come from the front end
    spec = {**want().to_wire(), "options": {"tag": "t", "blob": long}}
    capture = {"id": "client", "n": 2, "key": "k", "reply": "ipc://hub", "wait": True, "specs": {"c0": spec}}

    received = decode(encode(Begin("a", np.array([5, 6, 7]), capture, is_same_client=True)))  # type: ignore[arg-type]

    assert isinstance(received, Begin)
    assert received.is_same_client
    assert (received.req_id, received.prompt_token_ids.tolist()) == ("a", [5, 6, 7])
    spec = {**spec, "options": {"tag": "t", "blob": bytes(long)}}
    assert received.capture == {**capture, "specs": {"c0": spec}}


@pytest.mark.parametrize("message", [End("a", None), MemoryWanted()])
def test_other_messages_stay_what_they_are(message: Message) -> None:
    assert decode(encode(message)) == message
