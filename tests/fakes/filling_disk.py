"""A process that fills a small disk with captures, makes room, and goes on.

``python -m tests.fakes.filling_disk ROOT LAYOUT``; exits with 0 if everything went as promised.
"""

from __future__ import annotations

import shutil
import sys
from itertools import count
from pathlib import Path

import torch

from headgate.capture.schema.errors import ConsumerError
from headgate.consumers.feed import ExampleRequest, Feed
from headgate.consumers.reader import open_captures
from tests.fakes.capturing import capturing


def main(root: Path, layout: str) -> None:
    """Write until the disk is full; delete the first tag; write again; read everything."""
    written: list[ExampleRequest] = []
    with capturing(root, layout=layout, threads=1, shard_bytes=50_000) as files:
        files.feed.whole(files.request({"tag": "ballast"}, prompt=1000))
        for index in count():
            request = files.request(client_id=f"r{index}", prompt=100)
            if not has_room(files.feed, request):
                break
            written.append(request)
        assert written
        assert files.temporary() == []
        shutil.rmtree(root / "ballast")
        request = files.request(client_id="after", prompt=100)
        files.feed.whole(request)
        written.append(request)
    folder = open_captures(root)
    assert len(list(folder)) == len(written)
    for request in written:
        for site, rows in request.expected().rows.items():
            assert torch.equal(folder[request.info.client_request_id][site], rows)


def has_room(feed: Feed, request: ExampleRequest) -> bool:
    """Write a request; False if the disk is full."""
    try:
        feed.whole(request)
    except ConsumerError as error:
        if "No space left on device" in str(error):
            return False
        raise
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
