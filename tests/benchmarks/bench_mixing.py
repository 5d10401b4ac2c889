"""How fast a data set is mixed, beside numpy reading its files: ``python -m tests.benchmarks.bench_mixing FOLDER``.

Writes `REQUESTS` requests of `ROWS` rows of `HIDDEN` bfloat16 values into shards, 1.6 GB, unless the folder has them.
The files are in the page cache then. *numpy* reads each of them in pieces of 4 MiB into one buffer; *in order* makes
batches of 4096 rows without mixing; *mixed* draws them from a pool of `POOL` rows, 0.5 GB, while the pool is full.
Gigabytes a second of the rows; medians of `ROUNDS` rounds in which all take turns.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.sites import Site
from headgate.consumers.datasets import Dataset, MixedBatches, open_dataset
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest
from tests.fakes.capturing import Capturing

HIDDEN, REQUESTS, ROWS, POOL, BATCH, ROUNDS = 2048, 1600, 256, 131_072, 4096, 5
SITE = "1.post_mlp"
PIECE = 4 << 20
MODEL = replace(EXAMPLE_MODEL, hidden_size=HIDDEN)
VALUES = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16)


class _SameRows(ExampleRequest):
    """A request whose rows are those of all others: random numbers of its own take longer than writing them."""

    def rows(self, site: Site, positions: Int64Array) -> torch.Tensor:
        return VALUES[: len(positions)]


def write(root: Path) -> None:
    """Write the data set."""
    files = Capturing(root, model=MODEL, layout="shards", shard_bytes=256 << 20)
    for number in range(REQUESTS):
        known = files.request({"hooks": {"post_mlp": [1]}}, client_id=f"r{number}", prompt=ROWS, output=1)
        request = _SameRows(known.info.spec, f"r{number}", prompt=ROWS, output=1, model=MODEL)
        request.info = known.info
        files.feed.whole(request)
    files.close()


def by_numpy(root: Path) -> int:
    """Read all rows, and nothing else."""
    buffer, total = np.empty(PIECE, np.uint8), 0
    for path in sorted(root.rglob("*post_mlp*.bin")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def in_order(data: Dataset) -> int:
    return sum(batch.data[SITE].nbytes for batch in data.batches(SITE, batch_size=BATCH))


def mixed(batches: MixedBatches) -> int:
    """Draw half of the data from the full pool."""
    return sum(next(batches).data[SITE].nbytes for _ in range(REQUESTS * ROWS // BATCH // 2))


def rate(call: Callable[[], int]) -> float:
    started = time.perf_counter()
    return call() / (time.perf_counter() - started) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", action="store_true", help="show where the time of mixing goes")
    args = parser.parse_args()
    root = args.folder / "root"
    if not root.exists():
        write(root)
    data = open_dataset(root)
    batches = data.mixed(SITE, batch_size=BATCH, min_rows=POOL, min_requests=500, epochs=None)
    if args.profile:
        next(batches)
        profile = cProfile.Profile()
        profile.runcall(mixed, batches)
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
        return
    found: dict[str, list[float]] = {name: [] for name in ("numpy", "in order", "mixed")}
    for _ in range(ROUNDS):
        found["numpy"].append(rate(lambda: by_numpy(root)))
        found["in order"].append(rate(lambda: in_order(data)))
        epoch = batches.epoch
        while batches.epoch == epoch:  # to the beginning of an epoch, whose first batch fills the pool
            next(batches)
        found["mixed"].append(rate(lambda: mixed(batches)))
    for name, rates in found.items():
        print(f"{name:10}{np.median(rates):7.2f} GB/s")


if __name__ == "__main__":
    main()
