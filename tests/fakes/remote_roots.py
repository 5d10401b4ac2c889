"""Roots in the S3 store of the tests: writing to them, and comparing them and the spool with the requests."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from headgate.capture.schema.errors import ConsumerError
from headgate.consumers.datasets import open_dataset
from headgate.consumers.feed import TIMEOUT_S, ExampleRequest
from headgate.consumers.reader import open_captures
from tests.fakes.captured_roots import LAYOUTS, SITE, expected_facts, facts_of
from tests.fakes.capturing import Capturing
from tests.fakes.s3_server import S3Server


def root_of(store: S3Server) -> str:
    return f"s3://{store.bucket}/run"


def write(files: Capturing, names: list[str], **raw: Any) -> list[ExampleRequest]:
    """Write requests in all layouts by turns; each has its result."""
    requests = [files.request({"layout": LAYOUTS[n % 3], **raw}, client_id=name) for n, name in enumerate(names)]
    for request in requests:
        files.feed.whole(request)
    return requests


def check(store: S3Server, spool: Path, requests: list[ExampleRequest]) -> None:
    """The store has exactly the rows of `requests`, and the spool nothing."""
    assert facts_of(open_dataset(root_of(store), sites=SITE).batches()) == expected_facts(requests)
    assert len(list(open_captures(root_of(store)))) == len(requests)
    assert waiting(spool) == []
    assert store.unfinished() == []


def is_taken(files: Capturing, request: ExampleRequest) -> bool:
    """Whether the request's rows could be stored."""
    try:
        files.feed.whole(request)
    except ConsumerError:
        return False
    return True


def waiting(spool: Path) -> list[str]:
    """Files in the spool, but for locks."""
    return sorted(path.name for path in spool.rglob("*") if path.is_file() and path.name not in (".lock", "lock"))


def end_uploads() -> None:
    """Wait for the attempts that a closed consumer has not ended yet, as they end with a process."""
    for thread in threading.enumerate():
        if "-upload-" in thread.name:
            thread.join(TIMEOUT_S)
