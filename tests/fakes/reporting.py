"""A process that writes captures and says of each when its result came, until it is killed.

``python -m tests.fakes.reporting ROOT LAYOUT``: prints the request's id, one a line.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tests.fakes.capturing import capturing


def report(client_id: str, answer: Any) -> None:
    """Say that a result came."""
    answer.result()
    sys.stdout.write(f"{client_id}\n")
    sys.stdout.flush()


def main(root: Path, layout: str) -> None:
    """Write requests for ever, four at a time."""
    with capturing(root, layout=layout, threads=2, shard_bytes=20_000) as files:
        for batch in count():
            requests = [files.request(client_id=f"r{4 * batch + index}") for index in range(4)]
            files.feed.begin(*requests)
            files.feed.step({request: (0, request.final.num_rows) for request in requests})
            for request in requests:
                answer = files.feed.finish_later(request)
                answer.add_done_callback(partial(report, request.info.client_request_id))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
