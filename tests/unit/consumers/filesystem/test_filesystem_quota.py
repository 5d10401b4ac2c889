"""How much may lie under one tag, and in the whole root."""

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
from headgate.consumers.filesystem.storage import quota as quotas
from headgate.consumers.filesystem.storage.quota import FILE_BYTES, MAX_TAGS, MEASURE_AGAIN_S, DiskQuota, bytes_below

ROOT = Path("/captures")
SITES = (Site(1, HookPoint.POST_MLP), FINAL_NORM_SITE)
REQUEST_BYTES = 8 * len(SITES) * EXAMPLE_MODEL.hidden_size * 2
"""Rows of one request; a file has a header of a few KB besides."""


class Tags:
    """What lies under each tag, and how often somebody looked."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.looks = 0
        self.now = 0.0

    def measure(self, folder: Path) -> int:
        self.looks += 1
        return sum(self.sizes.values()) if folder == ROOT else self.sizes.get(folder.name, 0)


def quota(tags: Tags, max_bytes: int | None = 100, max_root_bytes: int | None = None) -> DiskQuota:
    return DiskQuota(max_bytes, max_root_bytes, ROOT, tags.measure, clock=lambda: tags.now)


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
    limits.store("1")
    with pytest.raises(ConsumerError, match="tag 'a' has no room"):
        limits.store("2")


def test_a_refused_request_gets_nothing_more_and_gives_back_what_it_had() -> None:
    limits = quota(Tags())

    assert limits.add("1", "a", 60)
    assert not limits.add("1", "a", 60)
    assert not limits.add("1", "a", 1)
    assert limits.add("2", "a", 100)
    with pytest.raises(ConsumerError, match="tag 'a' has no room"):
        limits.store("1")


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
    limits.store("1")

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
    tags.now *= 3
    assert not limits.add("5", "a", 1)  # what runs counts beside what lies there
    assert tags.looks == 3


@pytest.mark.parametrize("num_bytes", [90, 0], ids=["larger", "failed"])
def test_what_is_stored_counts_with_the_size_of_its_files(num_bytes: int) -> None:
    limits = quota(Tags())
    assert limits.add("1", "a", 50)
    limits.settle(limits.store("1"), num_bytes)

    assert not limits.add("2", "a", 101 - num_bytes)
    assert limits.add("3", "a", 100 - num_bytes)


def test_the_root_has_a_limit_over_all_tags() -> None:
    limits = quota(Tags(old=40), 100, max_root_bytes=100)
    limits.open()
    assert limits.add("1", "a", 60)

    assert not limits.add("2", "b", 1)
    with pytest.raises(ConsumerError, match=r"the root has no room .* max_root_bytes is 100"):
        limits.store("2")
    limits.release("1")
    assert limits.add("3", "b", 60)


def test_a_folder_that_takes_a_second_to_measure_is_measured_every_hundred() -> None:
    tags = Tags(a=100)

    def measure(folder: Path) -> int:
        tags.now += 1
        return tags.measure(folder)

    slow = DiskQuota(100, None, ROOT, measure, clock=lambda: tags.now)
    looks = []
    for request_id, wait in (("1", 0), ("2", 99), ("3", 1)):
        tags.now += wait
        assert not slow.add(request_id, "a", 1)
        looks.append(tags.looks)

    assert looks == [1, 1, 2]


def test_tags_are_forgotten_but_for_those_in_use() -> None:
    tags = Tags()
    limits = quota(tags)
    limits.add("used", "used", 60)
    for index in range(3 * MAX_TAGS):
        limits.add(str(index), f"tag-{index}", 1)
        limits.settle(limits.store(str(index)), 1)

    assert len(limits._folders) <= 2 * MAX_TAGS
    assert not limits.add("more", "used", 41)
    assert tags.looks == 3 * MAX_TAGS + 1


def test_without_a_limit_nobody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(folder: Path) -> int:
        raise AssertionError(f"somebody looked at {folder}")

    monkeypatch.setattr(quotas, "bytes_below", look)
    consumer = FilesystemConsumer(
        {"root": str(tmp_path), "threads": 1}, ConsumerContext(instance_name="filesystem", model=EXAMPLE_MODEL)
    )

    assert Feed(consumer).whole(request("one"))["num_rows"] == 8
    consumer.close(10)


def test_files_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(b"x" * 5)
    (tmp_path / "a" / "b" / "two").write_bytes(b"x" * 7)

    (tmp_path / "a" / ".tmp").mkdir()
    (tmp_path / "a" / ".tmp" / "in-the-making").write_bytes(b"x" * 100)

    assert bytes_below(tmp_path / "a") == 12 + 2 * FILE_BYTES
    assert bytes_below(tmp_path / "none") == 0


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[Feed]:
    params = {"root": str(tmp_path), "max_tag_bytes": FILE_BYTES + 3 * REQUEST_BYTES, "threads": 1}
    consumer = FilesystemConsumer(params, ConsumerContext(instance_name="filesystem", model=EXAMPLE_MODEL))
    yield Feed(consumer)
    consumer.close(10)


def request(name: str, tag: str = "run", *, layout: str = "request") -> ExampleRequest:
    options: dict[str, Any] = {"tag": tag, "request_id": name, "name": name, "layout": layout}
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


def test_raw_files_count_with_their_sidecars(tmp_path: Path) -> None:
    """Few rows at each site, many files: the rows alone would fit many times over."""
    limit = 3 * 2 * len(SITES) * FILE_BYTES
    params = {"root": str(tmp_path), "max_root_bytes": limit, "threads": 1}
    consumer = FilesystemConsumer(params, ConsumerContext(instance_name="filesystem", model=EXAMPLE_MODEL))
    feed = Feed(consumer)
    for index in range(2):
        feed.whole(request(f"r-{index}", f"tag-{index}", layout="raw"))

    with pytest.raises(ConsumerError, match="the root has no room"):
        feed.whole(request("r-2", "tag-2", layout="raw"))

    assert bytes_below(tmp_path) <= limit
    consumer.close(10)


def test_what_lies_in_the_root_counts_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"x" * 5000)
    params = {"root": str(tmp_path), "max_root_bytes": 5000 + FILE_BYTES, "threads": 1}
    consumer = FilesystemConsumer(params, ConsumerContext(instance_name="filesystem", model=EXAMPLE_MODEL))

    with pytest.raises(ConsumerError, match="the root has no room"):
        Feed(consumer).whole(request("one"))

    consumer.close(10)


@pytest.mark.parametrize("name", ["max_tag_bytes", "max_root_bytes"])
@pytest.mark.parametrize(("root", "limit"), [("/x", 0), ("memory://x", 5), ("/x", "a")], ids=["zero", "remote", "text"])
def test_a_wrong_limit_is_refused(root: str, limit: object, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        FilesystemConsumer.check_params({"root": root, name: limit})
