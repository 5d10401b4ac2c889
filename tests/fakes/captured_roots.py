"""Roots of captures with known rows, and data sets of them as multisets: what the tests of data sets start from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headgate.capture.schema.sites import Site
from headgate.consumers.datasets import RowBatch
from headgate.consumers.feed import ExampleRequest
from tests.fakes.capturing import capturing

SITE = "3.post_mlp"
LAYOUTS = ("request", "raw", "shards")
Facts = Counter[tuple[str, int, int, bytes]]
"""Rows by request id, position, token and values."""


Places = list[dict[str, Any]]
"""Role, start and stop of the messages of a chat."""


def write_root(
    root: Path,
    names: Iterable[str],
    *,
    raw: Any = None,
    messages: Callable[[int], Places | None] | None = None,
    **shape: Any,
) -> list[ExampleRequest]:
    """Write one request for each name, in all layouts by turns, and return them.

    Args:
        root: Where.
        names: Their ids.
        raw: Added to what they wrote.
        messages: Gives those of the request of a number.
        shape: As for `ExampleRequest`.
    """
    requests = []
    with capturing(root) as files:
        for number, name in enumerate(names):
            wanted = {"layout": LAYOUTS[number % 3], "tag": "odd" if number % 2 else "even", **(raw or {})}
            request = files.request(wanted, client_id=name, **{"prompt": 4 + number % 5, "output": 4, **shape})
            if messages is not None and (places := messages(number)) is not None:
                told = replace(request.info.spec, options={**request.info.spec.options, "messages": places})
                request.info = replace(request.info, spec=told)
            files.feed.whole(request)
            requests.append(request)
    return requests


def facts_of(batches: Iterable[RowBatch], site: str = SITE) -> Facts:
    """All rows of batches."""
    return Counter(
        fact
        for batch in batches
        for fact in zip(
            batch.request_ids,
            batch.positions.tolist(),
            batch.token_ids.tolist(),
            [row.tobytes() for row in batch.float32(site)],
            strict=True,
        )
    )


def expected_facts(requests: Sequence[ExampleRequest], site: str = SITE) -> Facts:
    """All rows of requests."""
    facts: Facts = Counter()
    for request in requests:
        expected = request.expected()
        rows = expected.rows[Site.parse(site)].float().numpy()
        name = request.info.client_request_id
        columns = zip(expected.positions.tolist(), expected.token_ids.tolist(), rows, strict=True)
        facts.update((name, position, token, np.float32(row).tobytes()) for position, token, row in columns)
    return facts
