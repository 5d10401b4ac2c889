"""Rows of the filesystem consumer, found again by the payload of their result alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from headgate.capture.schema.errors import CaptureFileError
from headgate.capture.schema.results import RowFetcher
from headgate.consumers.feed import ExampleRequest
from headgate.consumers.filesystem import FilesystemConsumer
from tests.fakes.capturing import capturing

each_layout = pytest.mark.parametrize("layout", ["request", "raw", "shards"])


def check(payload: Any, request: ExampleRequest) -> None:
    expected = request.expected()
    rows = FilesystemConsumer.fetch_rows(payload)
    assert tuple(rows.sites) == expected.sites
    assert rows.positions.tolist() == expected.positions.tolist()
    assert rows.token_ids.tolist() == expected.token_ids.tolist()
    for site in expected.sites:
        assert torch.equal(rows[site], expected.rows[site])


@pytest.fixture
def bucket() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@each_layout
def test_each_request_is_found_among_others(tmp_path: Path, layout: str) -> None:
    with capturing(tmp_path, layout=layout) as files:
        requests = [files.request(client_id=f"client-{n}", prompt=n + 2, output=3) for n in range(5)]
        payloads = [files.feed.whole(request) for request in requests]
        check(payloads[1], requests[1])  # of shards: while they still grow

    for payload, request in zip(payloads, requests, strict=True):
        check(payload, request)
    assert isinstance(FilesystemConsumer, RowFetcher)


@each_layout
def test_a_request_without_rows_is_found_beside_one_with_some(tmp_path: Path, layout: str) -> None:
    with capturing(tmp_path, layout=layout) as files:
        none = files.request({"positions": "all_generated"}, client_id="none", prompt=3, output=1)
        some = files.request(client_id="some", prompt=3, output=2)
        payloads = [files.feed.whole(request) for request in (none, some)]

    check(payloads[0], none)
    check(payloads[1], some)


@pytest.mark.parametrize("layout", ["request", "raw"])
def test_object_stores_are_read_too(bucket: Any, layout: str) -> None:
    with capturing("memory://bucket/run", layout=layout) as files:
        request = files.request()
        check(files.feed.whole(request), request)


@each_layout
def test_pipeline_stages_are_joined(tmp_path: Path, layout: str) -> None:
    payloads, parts = [], []
    for stage, hooks in enumerate(({"post_mlp": [1]}, {"post_mlp": [3], "final_norm": "all"})):
        with capturing(tmp_path, layout=layout, stage=(stage, 2)) as files:
            parts.append(files.request({"hooks": hooks}))
            payloads.append(files.feed.whole(parts[-1]))

    rows = FilesystemConsumer.fetch_rows(payloads)

    assert [site.name for site in rows.sites] == ["1.post_mlp", "3.post_mlp", "final_norm"]
    for part in parts:
        for site, expected in part.expected().rows.items():
            assert torch.equal(rows[site], expected)


@each_layout
def test_a_file_that_is_gone_is_an_error(tmp_path: Path, layout: str) -> None:
    with capturing(tmp_path, layout=layout) as files:
        payload = files.feed.whole(files.request())
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()

    with pytest.raises(CaptureFileError):
        FilesystemConsumer.fetch_rows(payload)
