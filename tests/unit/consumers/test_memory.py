"""The memory consumer: rows by name, and a bound that holds."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from headgate.capture.handles import CaptureCall, CaptureHandle
from headgate.capture.schema.consumer import ConsumerContext, SpecContext
from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.capture.schema.results import CaptureResult, SupportsSummary
from headgate.capture.schema.sites import Site
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest, Feed
from headgate.consumers.memory import CapturedRows, MemoryConsumer

CONTEXT = ConsumerContext(instance_name="memory", model=EXAMPLE_MODEL)
ROW_BYTES = 2 * 16 * 2  # two sites, hidden size 16, bfloat16


def request(request_id: str = "r1", *, num_rows: int = 8) -> ExampleRequest:
    context = SpecContext(instance_name="memory", model=EXAMPLE_MODEL, params={}, client_request_id=request_id)
    spec = MemoryConsumer.validate_client_spec({"hooks": {"post_mlp": [1], "final_norm": "all"}}, context)
    return ExampleRequest(spec, request_id, prompt=num_rows - 2, output=3)


def feed(**params: int) -> Feed:
    return Feed(MemoryConsumer(params, CONTEXT))


def test_rows_are_found_by_site_name_and_alias() -> None:
    asked = request()

    rows = feed().whole(asked)

    expected = asked.expected()
    assert isinstance(rows, CapturedRows)
    assert tuple(rows) == rows.sites  # they can be gone through as they can be indexed
    for name in ("1.post_mlp", "1.resid_post", Site.parse("1.post_mlp")):
        assert torch.equal(rows[name], expected.rows[Site.parse("1.post_mlp")])
    assert torch.equal(rows["last_hidden_state"], expected.rows[Site.parse("final_norm")])
    assert rows.rows.keys() == expected.rows.keys()
    assert rows.numpy("final_norm").dtype == np.float32
    assert np.array_equal(rows.numpy("final_norm"), expected.rows[Site.parse("final_norm")].float().numpy())
    assert (len(rows), rows.num_prompt_tokens, rows.status) == (8, 6, "stop")
    for missing in ("2.post_mlp", "nonsense"):
        with pytest.raises(KeyError, match=r"not captured.*1\.post_mlp"):
            rows[missing]


def test_where_only_json_can_go_the_payload_says_what_it_is() -> None:
    rows = feed().whole(request())

    assert isinstance(rows, SupportsSummary)
    assert rows.summary() == {
        "num_rows": 8,
        "num_prefill_rows": 6,
        "shapes": {"1.post_mlp": [8, 16], "final_norm": [8, 16]},
        "num_prompt_tokens": 6,
        "status": "stop",
        "dropped_rows": 0,
    }


def test_a_notebook_shows_norms_by_site_and_position() -> None:
    asked = request("<i>x</i>")
    rows = feed().whole(asked)

    shown = rows._repr_html_()

    lengths = asked.expected().rows[Site.parse("final_norm")].double().norm(dim=1)
    assert f"final_norm</td><td>{lengths.min():.5g}</td><td>{lengths.mean():.5g}</td>" in shown
    assert shown.count("<td style=background") == 2 * 8
    assert "8 of 2 sites in bfloat16; 0 dropped" in shown
    assert "<i>x</i>" not in shown


def test_a_request_that_does_not_fit_ends_with_an_error_and_gives_its_memory_back() -> None:
    small, large, later = request("small", num_rows=4), request("large", num_rows=20), request("later", num_rows=4)
    memory = feed(max_bytes=10 * ROW_BYTES)
    memory.begin(small, large)
    memory.step({small: (0, 4), large: (0, 10)})
    memory.step({large: (10, 20)})

    with pytest.raises(ConsumerError, match=f"max_bytes is {10 * ROW_BYTES}"):
        memory.finish(large)

    assert torch.equal(memory.finish(small)["final_norm"], small.expected().rows[Site.parse("final_norm")])
    assert torch.equal(memory.whole(later)["final_norm"], later.expected().rows[Site.parse("final_norm")])


def test_results_count_until_nobody_holds_them() -> None:
    memory = feed(max_bytes=10 * ROW_BYTES)
    held = memory.whole(request("held"))
    with pytest.raises(ConsumerError, match=f"hold {8 * ROW_BYTES}"):
        memory.whole(request("too-much"))

    del held
    gc.collect()

    assert len(memory.whole(request("fits-now"))) == 8


def test_a_handle_holds_the_rows_until_it_is_dropped_and_tells_what_did_not_fit() -> None:
    memory = feed(max_bytes=10 * ROW_BYTES)
    handle = handle_of(CaptureResult(status="ok", payload=memory.whole(request("held"))))
    with pytest.raises(ConsumerError) as caught:
        memory.whole(request("too-much"))
    failed = handle_of(CaptureResult(status="error", error=str(caught.value)))

    assert len(handle.fetch().positions) == 8
    with pytest.raises(ConsumerError, match=rf"rows of request r: error, .*hold {8 * ROW_BYTES}; .*or raise max_bytes"):
        failed.fetch()
    handle.discard()
    gc.collect()

    assert len(memory.whole(request("fits-now"))) == 8


def handle_of(result: CaptureResult) -> CaptureHandle:
    call = CaptureCall("memory", MemoryConsumer.fetch_rows)
    return CaptureHandle(result, call, request_id="r", sample_index=0, num_prompt_tokens=6)


def test_an_abandoned_request_gives_its_memory_back() -> None:
    memory = feed(max_bytes=10 * ROW_BYTES)
    for name in ("one", "two"):
        abandoned = request(name, num_rows=20)
        memory.begin(abandoned)
        memory.step({abandoned: (0, 9)})
        memory.step({abandoned: (9, 20)} if name == "two" else {})
        memory.abandon(abandoned)

    assert len(memory.whole(request("after"))) == 8


@pytest.mark.parametrize("params", [{"max_bytes": 0}, {"max_bytes": "1 GB"}, {"max_byte": 1}])
def test_wrong_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="max_byte"):
        MemoryConsumer.check_params(params)
