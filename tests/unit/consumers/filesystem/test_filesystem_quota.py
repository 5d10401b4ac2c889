"""How much may lie under one tag."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.schema.consumer import ConsumerContext
from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.capture.schema.positions import Named
from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest, Feed
from headgate.consumers.filesystem import FilesystemConsumer
from headgate.consumers.filesystem.storage.quota import MEASURE_AGAIN_S, TagQuota, bytes_below

SITES = (Site(1, HookPoint.POST_MLP), FINAL_NORM_SITE)
REQUEST_BYTES = 8 * len(SITES) * EXAMPLE_MODEL.hidden_size * 2
"""Rows of one request; a file has a header of a few KB besides."""


class Tags:
    """What lies under each tag, and how often somebody looked."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.looks = 0
        self.now = 0.0

    def measure(self, tag: str) -> int:
        self.looks += 1
        return self.sizes.get(tag, 0)


def quota(tags: Tags, max_bytes: int | None = 100) -> TagQuota:
    return TagQuota(max_bytes, tags.measure, clock=lambda: tags.now)


def test_what_is_there_counts() -> None:
    limits = quota(Tags(a=90))

    assert limits.add("1", "a", 10)
    assert not limits.add("2", "a", 1)
    assert limits.add("3", "b", 100)


def test_requests_that_run_together_count_together() -> None:
    limits = quota(Tags())

    assert limits.add("1", "a", 60)
    assert not limits.add("2", "a", 60)
    assert limits.add("1", "a", 40)
    assert (limits.confirm("1"), limits.confirm("2")) == (True, False)


def test_a_refused_request_gets_nothing_more_and_gives_back_what_it_had() -> None:
    limits = quota(Tags())

    assert limits.add("1", "a", 60)
    assert not limits.add("1", "a", 60)
    assert not limits.add("1", "a", 1)
    assert limits.add("2", "a", 100)
    assert not limits.confirm("1")


def test_a_failed_request_gives_back_what_it_had() -> None:
    limits = quota(Tags())
    assert limits.add("1", "a", 100)

    limits.release("1")
    limits.release("1")

    assert limits.add("2", "a", 100)


def test_what_is_done_stays_counted() -> None:
    tags = Tags()
    limits = quota(tags)

    assert limits.add("1", "a", 100)
    assert limits.confirm("1")

    assert not limits.add("2", "a", 1)
    assert tags.looks == 1


def test_a_full_tag_is_measured_again_after_a_while() -> None:
    tags = Tags(a=100)
    limits = quota(tags)
    assert not limits.add("1", "a", 50)
    tags.sizes["a"] = 20
    assert not limits.add("2", "a", 50)

    tags.now = MEASURE_AGAIN_S

    assert limits.add("3", "a", 50)
    assert limits.add("4", "a", 30)
    tags.now *= 2
    assert not limits.add("5", "a", 1)  # what runs counts beside what lies there
    assert tags.looks == 3


def test_without_a_limit_nobody_looks() -> None:
    tags = Tags()

    assert quota(tags, None).add("1", "a", 1 << 40)
    assert tags.looks == 0


def test_files_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(b"x" * 5)
    (tmp_path / "a" / "b" / "two").write_bytes(b"x" * 7)

    assert bytes_below(tmp_path / "a") == 12
    assert bytes_below(tmp_path / "none") == 0


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[Feed]:
    params = {"root": str(tmp_path), "max_tag_bytes": 3 * REQUEST_BYTES // 2, "threads": 1}
    consumer = FilesystemConsumer(params, ConsumerContext(instance_name="filesystem", model=EXAMPLE_MODEL))
    yield Feed(consumer)
    consumer.close(10)


def request(name: str, tag: str = "run") -> ExampleRequest:
    options: dict[str, Any] = {"tag": tag, "request_id": name, "name": name, "layout": "request"}
    return ExampleRequest(CaptureSpec(sites=SITES, positions=Named("all"), options=options), request_id=name)


def test_a_request_without_room_is_an_error_and_leaves_no_file(feed: Feed, tmp_path: Path) -> None:
    one, other = request("one"), request("other")
    feed.begin(one, other)
    feed.step({one: (0, 8), other: (0, 8)})
    assert feed.finish(one)["num_rows"] == 8

    with pytest.raises(ConsumerError, match=r"tag 'run' has no room .* max_tag_bytes"):
        feed.finish(other)

    assert [path.name for path in (tmp_path / "run").iterdir()] == ["one.safetensors"]
    assert feed.whole(request("third", "elsewhere"))["num_rows"] == 8


@pytest.mark.parametrize(
    "params",
    [
        {"root": "/x", "max_tag_bytes": 0},
        {"root": "memory://x", "max_tag_bytes": 5},
        {"root": "/x", "max_tag_bytes": "a"},
    ],
    ids=["zero", "remote", "text"],
)
def test_a_wrong_limit_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_tag_bytes"):
        FilesystemConsumer.check_params(params)
