"""Rows as a Hugging Face `datasets.IterableDataset`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from headgate.consumers.datasets.view import DatasetView, RowBatch

if TYPE_CHECKING:
    from datasets import IterableDataset

_READ_ROWS = 1024


def to_hugging_face(view: DatasetView, *, num_shards: int = 16) -> IterableDataset:
    """One example for each row, in the order of the files.

    Its columns are ``request_id``, ``tag``, ``position``, ``token_id`` and, by name, the sites: float16 if the model is
    of float16, else float32. Needs the package ``datasets``.

    Args:
        view: The rows.
        num_shards: Parts that workers and nodes can share.
    """
    from datasets import Features, IterableDataset, Sequence, Value

    kind = "float16" if view.dtype == "float16" else "float32"
    text = {"request_id": Value("string"), "tag": Value("string")}
    numbers = {"position": Value("int64"), "token_id": Value("int64")}
    rows = {site: Sequence(Value(kind), length=view.hidden_size) for site in view.sites}
    edges = np.linspace(0, len(view), max(min(num_shards, len(view)), 1) + 1).astype(int).tolist()
    shards = list(pairwise(edges))
    return IterableDataset.from_generator(
        examples, features=Features({**text, **numbers, **rows}), gen_kwargs={"view": view, "shards": shards}
    )


def examples(view: DatasetView, shards: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """The rows of some ranges, each as a dictionary."""
    for first, end in shards:
        for start in range(first, end, _READ_ROWS):
            stop = min(start + _READ_ROWS, end)
            batch = RowBatch(view, np.arange(start, stop, dtype=np.int64), view.read(start, stop))
            yield from _examples_of(batch)


def _examples_of(batch: RowBatch) -> Iterator[dict[str, Any]]:
    rows = {site: batch.numpy(site) for site in batch.view.sites}
    columns = zip(batch.request_ids, batch.tags, batch.positions.tolist(), batch.token_ids.tolist(), strict=True)
    for number, (request_id, tag, position, token_id) in enumerate(columns):
        facts = {"request_id": request_id, "tag": tag, "position": position, "token_id": token_id}
        yield facts | {site: values[number] for site, values in rows.items()}
