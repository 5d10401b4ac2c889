"""An S3 store for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.consumers.filesystem.uploading import uploader
from tests.fakes.s3_server import S3Server, s3_server, start_threads


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    start_threads()
    with s3_server() as server:
        yield server


@pytest.fixture
def store(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setattr(uploader, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(uploader, "MAX_PAUSE_S", 0.05)
    server.start()
    server.make_bucket()
    yield server
    server.stop()
