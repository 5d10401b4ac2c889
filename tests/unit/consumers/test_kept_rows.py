"""Rows that the memory consumer keeps for later requests: found by their owner alone, within limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headgate.capture.schema.consumer import ConsumerContext, SpecContext
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError
from headgate.capture.schema.results import Origin, RowKeeper, join_key
from headgate.capture.schema.sites import Site
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest, Feed
from headgate.consumers.memory import KeepLimits, KeptName, KeptRequests, MemoryConsumer

ROW_BYTES = 2 * 16 * 2  # two sites, hidden size 16, bfloat16
SITE = Site.parse("1.post_mlp")
FIELD = "steering_ops[0].source"


def context(owner: str | None = None, **changes: Any) -> SpecContext:
    return SpecContext(
        instance_name="memory", model=EXAMPLE_MODEL, params={}, client_request_id="r", owner=owner, **changes
    )


def request(
    keep: str = "clean",
    request_id: str = "r1",
    *,
    owner: str | None = None,
    call: str = "",
    sample: int = 0,
    rows: int = 8,
) -> ExampleRequest:
    wanted = {"hooks": {"post_mlp": [1], "final_norm": "all"}, "positions": {"start": 2}, "keep": keep}
    asked = ExampleRequest(
        MemoryConsumer.validate_client_spec(wanted, context(owner)), request_id, prompt=rows, output=3
    )
    origin = Origin(None, join_key(call or request_id, "key"))
    asked.info = replace(asked.info, origin=origin, sample_index=sample)
    return asked


def memory(**params: float) -> Feed:
    return Feed(MemoryConsumer(params, ConsumerContext(instance_name="memory", model=EXAMPLE_MODEL)))


def find(feed: Feed, name: str = "clean", owner: str | None = None, sample: int = 0) -> Any:
    assert isinstance(feed.consumer, MemoryConsumer)
    assert isinstance(feed.consumer, RowKeeper)
    return feed.consumer.find_kept(owner, name, sample, FIELD)


def test_a_kept_row_is_found_by_name_site_and_position() -> None:
    feed, asked = memory(), request()
    rows = feed.whole(asked)

    kept = find(feed)

    assert rows.summary()["kept_as"] == "clean"
    assert kept.prompt_token_ids.tolist() == asked.info.prompt_token_ids.tolist()
    for position, absolute in ((2, 2), (9, 9), (-1, 7), (-6, 2)):
        expected = asked.expected().rows[SITE][absolute - 2]
        assert torch.equal(kept.row(SITE, position, FIELD), expected)


@pytest.mark.parametrize(
    ("site", "position", "field", "told"),
    [
        ("2.post_mlp", 3, "site", r"2\.post_mlp was not captured of 'clean', but 1\.post_mlp, final_norm"),
        ("1.post_mlp", 1, "position", "no row of position 1; it has 8 rows, of positions 2 to 9, and 8 prompt tokens"),
        ("1.post_mlp", 10, "position", "no row of position 10"),
        ("1.post_mlp", -7, "position", "no row of position -7"),
        ("1.post_mlp", -9, "position", "no row of position -9"),
    ],
)
def test_a_row_that_was_not_captured_is_refused(site: str, position: int, field: str, told: str) -> None:
    feed = memory()
    feed.whole(request())

    with pytest.raises(RequestError, match=told) as refusal:
        find(feed).row(Site.parse(site), position, FIELD)

    assert refusal.value.field == f"{FIELD}.{field}"


def test_rows_belong_to_their_client_alone() -> None:
    feed = memory()
    feed.whole(request(owner="alice"))

    assert len(find(feed, owner="alice")) == 8
    for owner in ("bob", None):
        with pytest.raises(RequestError, match="nothing is kept as 'clean' for this client") as refusal:
            find(feed, owner=owner)
        assert refusal.value.field == f"{FIELD}.request"


def test_a_request_that_keeps_nothing_leaves_nothing() -> None:
    feed = memory()
    spec = MemoryConsumer.validate_client_spec({"hooks": {"post_mlp": [1]}}, context())
    rows = feed.whole(ExampleRequest(spec, "clean"))

    assert "kept_as" not in rows.summary()
    assert not MemoryConsumer.awaits(spec)
    assert MemoryConsumer.awaits(request().info.spec)
    with pytest.raises(RequestError, match="nothing is kept"):
        find(feed)


def test_a_later_call_takes_the_place_of_an_earlier_one() -> None:
    feed, later = memory(), request(request_id="r2")
    feed.whole(request(request_id="r1"))
    feed.whole(later)

    assert torch.equal(find(feed).row(SITE, 2, FIELD), later.expected().rows[SITE][0])


def test_samples_of_one_call_are_kept_beside_each_other() -> None:
    feed = memory()
    samples = [request(request_id=f"{index}_r", call="c", sample=index) for index in range(2)]
    for sample in samples:
        feed.whole(sample)

    for index, sample in enumerate(samples):
        assert torch.equal(find(feed, sample=index).row(SITE, 2, FIELD), sample.expected().rows[SITE][0])
    with pytest.raises(RequestError, match=r"has the samples \[0, 1\], not 2") as refusal:
        find(feed, sample=2)
    assert refusal.value.field == f"{FIELD}.sample"


def test_two_prompts_of_a_call_cannot_have_one_name() -> None:
    feed = memory()
    feed.whole(request(request_id="r1", call="c"))

    with pytest.raises(ConsumerError, match="one name, one prompt"):
        feed.whole(request(request_id="r2", call="c"))


def test_a_clients_oldest_rows_give_way_and_the_reason_is_told() -> None:
    feed = memory(keep_key_bytes=20 * ROW_BYTES)
    feed.whole(request("other", "r0", owner="bob"))
    for index in range(2):
        feed.whole(request(f"run-{index}", f"r{index}", owner="alice"))
    find(feed, "run-0", "alice")  # used since: the other one is the oldest

    feed.whole(request("run-2", "r2", owner="alice"))

    assert (
        len(find(feed, "run-0", "alice")) == len(find(feed, "run-2", "alice")) == len(find(feed, "other", "bob")) == 8
    )
    with pytest.raises(RequestError, match=f"'run-1' are gone: this client keeps at most {20 * ROW_BYTES} bytes"):
        find(feed, "run-1", "alice")


def test_all_clients_together_stay_within_the_limit() -> None:
    feed = memory(keep_bytes=20 * ROW_BYTES)
    for index, owner in enumerate(("alice", "bob", "carol")):
        feed.whole(request("clean", f"r{index}", owner=owner))

    with pytest.raises(RequestError, match=f"at most {20 * ROW_BYTES} bytes are kept here"):
        find(feed, owner="alice")
    assert len(find(feed, owner="bob")) == len(find(feed, owner="carol")) == 8


def test_rows_that_could_never_be_kept_end_with_an_error_and_displace_nothing() -> None:
    feed = memory(keep_key_bytes=20 * ROW_BYTES)
    feed.whole(request("small", "r0"))

    with pytest.raises(ConsumerError, match=f"take {30 * ROW_BYTES} bytes, and a client may keep {20 * ROW_BYTES}"):
        feed.whole(request("large", "r1", rows=30))

    assert len(find(feed, "small")) == 8


def test_rows_are_given_up_when_they_are_old() -> None:
    now = 0.0
    kept = KeptRequests(KeepLimits(max_bytes=100, max_key_bytes=100, max_age_s=10.0), clock=lambda: now)
    rows = memory().whole(request())
    kept.keep(KeptName(None, "clean"), rows, call="c", num_bytes=1)
    now = 9.9
    assert kept.find(KeptName(None, "clean"), 0, FIELD) is rows

    now = 10.0
    with pytest.raises(RequestError, match="are gone: they were kept for 10 s"):
        kept.find(KeptName(None, "clean"), 0, FIELD)


@pytest.mark.parametrize("name", ["", 3, True, "a\n", "x" * 257, ["a"]])
def test_names_that_are_none_are_refused(name: object) -> None:
    with pytest.raises(RequestError, match="printable characters") as refusal:
        MemoryConsumer.validate_client_spec({"hooks": {"post_mlp": [1]}, "keep": name}, context())

    assert refusal.value.field == "capture.memory.keep"


def test_where_another_process_may_get_the_later_request_nothing_is_kept() -> None:
    with pytest.raises(RequestError, match="has 4 API processes"):
        MemoryConsumer.validate_client_spec({"hooks": {"post_mlp": [1]}, "keep": "clean"}, context(num_front_ends=4))


@pytest.mark.parametrize("name", ["keep_bytes", "keep_key_bytes", "keep_s"])
def test_limits_are_above_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be (above 0|at least 1)"):
        MemoryConsumer.check_params({name: 0})
