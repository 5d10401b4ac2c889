"""Rows that came back inline, read out of their payload."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from headgate.capture.schema.consumer import ConsumerContext, ModelInfo, SpecContext
from headgate.capture.schema.errors import CaptureFileError, RequestError
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import Site, SiteShape
from headgate.consumers.feed import EXAMPLE_MODEL, TIMEOUT_S, ExampleRequest, Feed
from headgate.consumers.inline import InlineConsumer, fetch_rows
from headgate.steering.client import inline_rows
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


EXPERTS = ModelInfo(
    name="m",
    num_layers=4,
    hidden_size=4,
    dtype="bfloat16",
    sites=tuple(Site.parse(name) for name in ("1.experts", "3.experts", "3.post_mlp")),
    shapes={Site.parse(name): SiteShape(2, "int16") for name in ("1.experts", "3.experts")},
)


@pytest.mark.parametrize(
    ("hooks", "layout", "why"),
    [
        ({"experts": "all"}, "raw", "expected 'routed_experts', or no layout, got 'raw'"),
        ({"experts": "all", "post_mlp": [3]}, "routed_experts", "has the hook point experts alone, not '3.post_mlp'"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(hooks: Any, layout: str, why: str) -> None:
    context = SpecContext(instance_name="inline", model=EXPERTS, params={}, client_request_id="r")
    with pytest.raises(RequestError, match=f"capture.inline.layout: .*{why}"):
        InlineConsumer.validate_client_spec({"hooks": hooks, "layout": layout}, context)
    spec = InlineConsumer.validate_client_spec({"hooks": {"experts": "all"}, "layout": "routed_experts"}, context)
    assert [site.name for site in spec.sites] == ["1.experts", "3.experts"]


def test_the_python_client_reads_numbers_of_experts() -> None:
    data = base64.b64encode(save({"routed_experts": torch.arange(12, dtype=torch.int16).view(2, 3, 2)})).decode()
    payload = {"format": "safetensors", "data": data}
    result = CaptureResult(status="ok", num_rows=2, num_bytes=24, dropped_rows=0, error=None, payload=payload)

    assert inline_rows(result)["routed_experts"].tolist() == torch.arange(12).view(2, 3, 2).tolist()
