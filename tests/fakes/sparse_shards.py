"""Shards of any size that take no disk: files of holes, with a true index."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from headgate.consumers.filesystem.formats.layout import Sidecar
from headgate.consumers.filesystem.formats.shard_layout import INDEX, SHARD, SHARED_FIELDS, index_line


def sidecar(number: int, rows: int, hidden_size: int) -> Sidecar:
    """The description of a request of `rows` rows at the site ``3.post_mlp``, half of them of its prompt."""
    name, prompt = f"request-{number:08d}", (rows + 1) // 2
    return Sidecar(
        request_id=name,
        client_request_id=name,
        engine_request_id=name,
        sample_index=0,
        num_samples=1,
        tag="sparse",
        name=name,
        model="example-model",
        num_layers=4,
        hidden_size=hidden_size,
        dtype="bfloat16",
        versions={"headgate": "0.0"},
        sites=["3.post_mlp"],
        selector="all",
        num_rows=rows,
        num_prompt_tokens=prompt,
        num_tokens=rows + 1,
        phases={"prefill": [0, prompt], "decode": [prompt, rows]},
        status="stop",
        dropped_rows=0,
        pp_rank=0,
        pp_size=1,
        written_at="2026-01-01T00:00:00.000+00:00",
    )


def make_sparse(root: str, *, num_shards: int, num_requests: int, rows: int, hidden_size: int) -> None:
    """Write shards of `num_requests` requests each, all of `rows` rows, whose values are zero."""
    for shard in range(num_shards):
        folder = Path(root) / "sparse" / "_shards" / f"shard-{shard:04d}"
        folder.mkdir(parents=True)
        fields = msgspec.to_builtins(sidecar(0, rows, hidden_size))
        shared = {key: value for key, value in fields.items() if key in SHARED_FIELDS}
        (folder / SHARD).write_bytes(msgspec.json.encode(shared))
        total = num_requests * rows
        with (folder / INDEX).open("wb") as file:
            for number in range(num_requests):
                about = sidecar(shard * num_requests + number, rows, hidden_size)
                file.write(index_line(about, number * rows, (number + 1) * rows))
        np.tile(np.arange(rows, dtype=np.int64), num_requests).tofile(folder / "positions.bin")
        for name, width in (("token_ids", 8), ("3_post_mlp", 2 * hidden_size)):
            with (folder / f"{name}.bin").open("wb") as file:
                file.truncate(total * width)
