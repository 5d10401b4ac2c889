"""Rows that came back inline, read out of their payload."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.schema.consumer import ConsumerContext
from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.sites import Site
from headgate.consumers.feed import EXAMPLE_MODEL, TIMEOUT_S, ExampleRequest, Feed
from headgate.consumers.inline import InlineConsumer, fetch_rows
from tests.fakes.capturing import HOOKS, spec_context


@pytest.fixture
def captured() -> ExampleRequest:
    return ExampleRequest(InlineConsumer.validate_client_spec({"hooks": HOOKS}, spec_context({})), "r")


@pytest.fixture
def payload(captured: ExampleRequest) -> Any:
    context = ConsumerContext(instance_name="inline", model=EXAMPLE_MODEL, pp_rank=0, pp_size=1, versions={})
    consumer = InlineConsumer({}, context)
    found = Feed(consumer).whole(captured)
    consumer.close(TIMEOUT_S)
    return found


def test_rows_come_with_their_sites_positions_and_tokens(captured: ExampleRequest, payload: Any) -> None:
    expected = captured.expected()

    rows = fetch_rows(payload)

    assert tuple(rows) == rows.sites == expected.sites
    assert len(rows) == len(expected.positions) > 0
    np.testing.assert_array_equal(rows.positions, expected.positions)
    np.testing.assert_array_equal(rows.token_ids, expected.token_ids)
    for site in expected.sites:
        assert torch.equal(rows[site], expected.rows[site])
    site = Site.parse("1.post_mlp")
    assert torch.equal(rows["1.post_mlp"], expected.rows[site])


@pytest.mark.parametrize("name", ["2.post_mlp", "nothing"])
def test_a_site_that_was_not_captured_is_named(payload: Any, name: str) -> None:
    with pytest.raises(KeyError, match=f"{name}: not captured; there are 1.post_mlp"):
        fetch_rows(payload)[name]


@pytest.mark.parametrize(
    "changed",
    [None, {}, {"data": "%"}, {"data": ""}, {"data": 3}, {"data": base64.b64encode(b"x" * 40).decode()}],
)
def test_what_is_no_payload_is_refused(changed: Any) -> None:
    with pytest.raises(CaptureFileError, match="expected a payload of the consumer 'inline'"):
        fetch_rows(changed)


def test_a_payload_that_was_cut_is_refused(payload: Any) -> None:
    data = base64.b64decode(payload["data"])

    with pytest.raises(CaptureFileError, match="expected a payload"):
        fetch_rows({**payload, "data": base64.b64encode(data[:-1]).decode()})
