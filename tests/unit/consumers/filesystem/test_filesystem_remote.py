"""Roots that fsspec reaches: the same files, and failures that leave nothing behind."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch

from headgate.capture.schema.errors import CaptureFileError, ConfigError, ConsumerError
from headgate.capture.schema.sites import Site
from headgate.consumers.reader import open_captures
from tests.fakes.capturing import capturing

SITE = Site.parse("final_norm")
ROOT = "memory://bucket/run"

each_layout = pytest.mark.parametrize("layout", ["request", "raw"])


@pytest.fixture
def bucket() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@each_layout
def test_an_id_that_is_taken_is_an_error(bucket: Any, layout: str) -> None:
    with capturing(ROOT, layout=layout) as files:
        first = files.request({"request_id": "a"}, engine_id="one")
        files.feed.whole(first)

        with pytest.raises(ConsumerError, match="exists and is not overwritten"):
            files.feed.whole(files.request({"request_id": "a"}, engine_id="two"))

    assert torch.equal(open_captures(ROOT)["a"][SITE], first.expected().rows[SITE])


@each_layout
def test_or_is_numbered(bucket: Any, layout: str) -> None:
    with capturing(ROOT, layout=layout, if_exists="number") as files:
        payloads = [files.feed.whole(files.request({"request_id": "a"}, engine_id=name)) for name in ("one", "two")]

    assert len(open_captures(ROOT).find("a")) == 2
    assert not set(payloads[0]["paths"]) & set(payloads[1]["paths"])
    assert all(bucket.exists(path) for payload in payloads for path in payload["paths"])
    assert payloads[0]["durable"] is None  # the remote store's business


@each_layout
@pytest.mark.parametrize("num_moves", [0, 2])
def test_a_failed_upload_is_an_error_and_leaves_nothing(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, layout: str, num_moves: int
) -> None:
    real, moves = bucket.mv, iter(range(num_moves if layout == "raw" else 0))

    def fail_in_the_end(source: str, target: str) -> None:
        if next(moves, None) is None:
            raise OSError(errno.EIO, "the network is down")
        real(source, target)

    with capturing(ROOT, layout=layout) as files:
        monkeypatch.setattr(type(bucket), "mv", lambda self, source, target: fail_in_the_end(source, target))
        with pytest.raises(ConsumerError, match="network is down"):
            files.feed.whole(files.request(client_id="lost"))
        monkeypatch.undo()
        assert bucket.find("/bucket") == []

        after = files.request(client_id="after")
        files.feed.whole(after)

    (capture,) = open_captures(ROOT)
    assert torch.equal(capture[SITE], after.expected().rows[SITE])


def test_a_raw_folder_that_is_still_being_uploaded_is_refused(bucket: Any) -> None:
    with capturing(ROOT, layout="raw") as files:
        files.feed.whole(files.request())
    bucket.rm("/bucket/run/default/client-1/final_norm.json")

    with pytest.raises(CaptureFileError, match="partial"):
        list(open_captures(ROOT))


def test_a_protocol_that_is_not_there_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="cannot be opened"), capturing("no-such-store://bucket"):
        pass
