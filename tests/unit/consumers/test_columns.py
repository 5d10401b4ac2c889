"""Requests that want some columns of rows get these, from every consumer that takes them; others refuse by name."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import ConsumerContext, SpecContext, parse_client_spec
from headgate.capture.schema.errors import CaptureFileError, RequestError
from headgate.capture.schema.sites import HookPoint, Site, SiteShape
from headgate.consumers import dump
from headgate.consumers.datasets import open_dataset
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest, Feed
from headgate.consumers.inline import InlineConsumer, fetch_rows
from headgate.consumers.reader import open_captures
from tests.fakes.captured_roots import LAYOUTS
from tests.fakes.capturing import capturing
from tests.fakes.streams import streaming

HEADS, STREAM = Site(3, HookPoint.HOOK_Z), Site(3, HookPoint.POST_MLP)
MODEL = replace(EXAMPLE_MODEL, sites=(HEADS, STREAM), shapes={HEADS: SiteShape(12, "bfloat16", head_size=4)})
CONTEXT = SpecContext(instance_name="inline", model=MODEL, params={}, client_request_id="client", takes_columns=True)
FIRST, LAST = {"post_mlp": {"layers": [3], "columns": [2, 5]}}, {"post_mlp": {"layers": [3], "columns": [7, 10]}}


@pytest.mark.parametrize(
    "hooks",
    [
        {"hook_z": {"layers": [3], "heads": [0, 2]}, "post_mlp": "all"},
        {"hook_z": {"heads": [0, 2]}, "post_mlp": [3]},
        [{"hook": "hook_z", "layers": [3], "heads": [0, 2]}, {"hook": "post_mlp", "layers": "all"}],
        [{"hook": "attn.hook_z", "layers": "all", "heads": [0, 2]}, {"hook": "post_mlp", "layers": [3]}],
    ],
    ids=["layers", "heads", "list", "alias"],
)
def test_columns_are_selected_by_hook_point_or_in_a_list(hooks: Any) -> None:
    spec = parse_client_spec({"hooks": hooks}, CONTEXT, options=())

    assert spec.sites == (HEADS, STREAM)
    assert spec.columns == {HEADS: ((0, 4), (8, 12))}
    assert MODEL.position_bytes(spec.sites, None, spec.columns) == 2 * (8 + 16)


@pytest.mark.parametrize(
    ("hooks", "why"),
    [
        (
            {"post_mlp": {"layers": [3], "heads": [0]}},
            "capture.inline.hooks.post_mlp.heads: rows of 3.post_mlp are not",
        ),
        ({"hook_z": {"layers": [3], "heads": [3]}}, "capture.inline.hooks.hook_z.heads: expected ascending"),
        ({"hook_z": {"layers": [1], "heads": [0]}}, "capture.inline.hooks.hook_z: site 1.hook_z cannot be captured"),
        ([{"hook": "hook_z", "layers": [3], "head": 1}], "capture.inline.hooks[0].head: unknown key"),
        ([{"layers": [3]}], 'capture.inline.hooks[0]: expected {"hook", "layers", "heads"}'),
        ([], "capture.inline.hooks: expected 1 to"),
        (
            [{"hook": "hook_z", "layers": [3], "heads": [0]}, {"hook": "hook_z", "layers": [3], "heads": [1]}],
            "capture.inline.hooks[1]: 3.hook_z is selected twice",
        ),
    ],
    ids=str,
)
def test_a_selection_that_cannot_be_is_refused(hooks: Any, why: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_client_spec({"hooks": hooks}, CONTEXT, options=())
    assert str(caught.value).startswith(why)


def test_answers_have_the_columns_alone() -> None:
    spec = InlineConsumer.validate_client_spec({"hooks": {"hook_z": {"heads": [0, 2]}, "post_mlp": "all"}}, CONTEXT)
    request = ExampleRequest(spec, model=MODEL)

    payload = Feed(InlineConsumer({}, ConsumerContext(instance_name="inline", model=MODEL))).whole(request)

    found, expected = fetch_rows(payload), request.expected().rows
    assert {site: found[site].shape[1] for site in found} == {HEADS: 8, STREAM: 16}
    assert all(torch.equal(found[site], expected[site]) for site in found)
    assert b'"columns":"{\\"3.hook_z\\":[[0,4],[8,12]]}"' in base64.b64decode(payload["data"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_and_data_sets_have_the_columns_alone_and_say_which(tmp_path: Path, layout: str) -> None:
    with capturing(tmp_path) as files:
        requests = [
            files.request({"hooks": hooks, "layout": layout}, client_id=f"r{number}")
            for number, hooks in enumerate((FIRST, FIRST, LAST))
        ]
        for request in requests:
            files.feed.whole(request)

    captures = {each.metadata["client_request_id"]: each for each in open_captures(tmp_path)}
    for number, request in enumerate(requests):
        capture = captures[f"r{number}"]
        assert capture.metadata["format_version"] == 3
        assert capture.metadata["columns"] == {"3.post_mlp": ((2, 5) if number < 2 else (7, 10),)}
        assert torch.equal(capture.tensor("3.post_mlp"), request.expected().rows[STREAM])
    assert "3.post_mlp[7:10]" in CliRunner().invoke(dump.app, ["show", str(tmp_path), "r2"]).stdout
    with pytest.raises(CaptureFileError, match="rows of different kinds: ") as refused:
        next(open_dataset(tmp_path, sites="3.post_mlp").batches("3.post_mlp", batch_size=4))
    assert all(f"width 3, columns {columns}" in str(refused.value) for columns in ("[[2, 5]]", "[[7, 10]]"))


def test_batches_of_a_stream_have_the_columns_alone() -> None:
    with streaming() as stream:
        request = stream.send("a", raw={"hooks": FIRST})

        assert {rows.shape[1] for rows in request.expected().rows.values()} == {3}
        assert stream.payload["num_rows"] == len(request.expected().positions)


def test_consumers_of_whole_rows_refuse_columns_by_name(tmp_path: Path) -> None:
    from headgate.capture.engine.requests.capture_request import CaptureRequestReader
    from headgate.consumers.moments import MomentsConsumer

    config = CaptureConsumersConfig(consumers=(CaptureConsumerSpec(name="moments", params={"root": str(tmp_path)}),))
    reader = CaptureRequestReader(config, EXAMPLE_MODEL, {"moments": MomentsConsumer})

    with pytest.raises(RequestError, match=r"capture.moments.hooks: the consumer 'moments' reads whole rows"):
        reader._client_specs({"moments": {"hooks": FIRST}}, "request")
