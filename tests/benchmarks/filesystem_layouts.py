"""How fast the filesystem consumer writes, beside what the disk does with one plain file of the same bytes.

``python -m tests.benchmarks.filesystem_layouts FOLDER``: rows of decode steps and of prefill chunks, in each layout,
with and without fsync. The folder should be on the disk that counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from headgate.capture.schema.batch import FinalState
from headgate.capture.schema.consumer import ConsumerContext, FinishedRequest, ModelInfo, RequestInfo, RowBlock, RowSpan
from headgate.capture.schema.positions import Named
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem import FilesystemConsumer

HIDDEN_SIZE = 2560


@dataclass(frozen=True, slots=True)
class Load:
    """A stream of requests of one shape: `batch` at a time, `step` rows of each per step."""

    name: str
    num_sites: int
    num_rows: int
    num_requests: int
    batch: int
    step: int

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that every request wants."""
        return tuple(Site(layer, HookPoint.POST_MLP) for layer in range(self.num_sites))

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_sites * self.num_rows * self.num_requests * HIDDEN_SIZE * 2


LOADS = (
    Load("last prompt token, 1 site", 1, 1, 4000, 64, 1),
    Load("decode, 1 site", 1, 256, 512, 64, 1),
    Load("decode, 34 sites", 34, 128, 48, 16, 1),
    Load("prefill, 34 sites", 34, 512, 16, 8, 256),
)


def feed(consumer: FilesystemConsumer, load: Load, layout: str) -> None:
    """Write every request and wait for the results."""
    rows = torch.randn(load.num_sites, load.batch * load.step, HIDDEN_SIZE).to(torch.bfloat16)
    answers: list[Future[object]] = []
    for first in range(0, load.num_requests, load.batch):
        requests = [request(f"r{first + index}", load, layout) for index in range(load.batch)]
        for each in requests:
            consumer.begin(each)
        for block in blocks(requests, rows, load):
            consumer.write([block])
        final = FinalState(num_prompt_tokens=1, token_ids=np.zeros(load.num_rows + 1, dtype=np.int64), status="stop")
        answers += [consumer.finish(FinishedRequest(request=each, final=final)) for each in requests]
    for answer in answers:
        answer.result()


def request(name: str, load: Load, layout: str) -> RequestInfo:
    """A request for every site and position."""
    options = {"tag": "bench", "request_id": name, "name": name, "layout": layout}
    spec = CaptureSpec(sites=load.sites, positions=Named("all"), options=options)
    return RequestInfo(request_id=name, client_request_id=name, prompt_token_ids=np.zeros(1, dtype=np.int64), spec=spec)


def blocks(requests: list[RequestInfo], rows: torch.Tensor, load: Load) -> Iterator[RowBlock]:
    """The steps of a batch."""
    spans = tuple(
        RowSpan(request=each, start=index * load.step, stop=(index + 1) * load.step)
        for index, each in enumerate(requests)
    )
    for start in range(0, load.num_rows, load.step):
        positions = np.tile(np.arange(start, start + load.step, dtype=np.int64), len(requests))
        yield RowBlock(sites=load.sites, rows=rows, positions=positions, spans=spans)


def seconds_of_consumer(root: Path, load: Load, layout: str, *, fsync: bool) -> float:
    """Seconds from the first row to the last result."""
    model = ModelInfo(
        name="bench", num_layers=load.num_sites, hidden_size=HIDDEN_SIZE, dtype="bfloat16", sites=load.sites
    )
    context = ConsumerContext(instance_name="bench", model=model)
    consumer = FilesystemConsumer({"root": str(root), "layout": layout, "fsync": fsync}, context)
    started = time.perf_counter()
    feed(consumer, load, layout)
    taken_s = time.perf_counter() - started
    consumer.close(60.0)
    shutil.rmtree(root)
    os.sync()
    return taken_s


def seconds_of_disk(path: Path, num_bytes: int, *, fsync: bool) -> float:
    """Seconds to write one file of that size, 8 MiB at a time."""
    piece = os.urandom(8 << 20)
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for start in range(0, num_bytes, len(piece)):
            file.write(piece[: num_bytes - start])
        if fsync:
            os.fsync(file.fileno())
    taken_s = time.perf_counter() - started
    path.unlink()
    os.sync()
    return taken_s


def main() -> None:
    """Run every load and print the medians, line by line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, of which the median is printed")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the number of requests")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    echo = Console(width=120, highlight=False).print
    echo(f"{'load':26}{'layout':9}{'fsync':7}{'requests/s':>12}{'MB/s':>8}{'one plain file, MB/s':>23}")
    for load in LOADS:
        load = replace(load, num_requests=max(int(load.num_requests * arguments.scale) // load.batch, 1) * load.batch)
        for layout in ("request", "shards", "raw"):
            for fsync in (True, False):
                pairs = [
                    (
                        seconds_of_disk(folder / "plain", load.num_bytes, fsync=fsync),
                        seconds_of_consumer(folder / "root", load, layout, fsync=fsync),
                    )
                    for _ in range(arguments.repeat)
                ]
                disk_s, taken_s = (float(np.median(column)) for column in zip(*pairs, strict=True))
                rate, disk_rate = load.num_bytes / taken_s / 1e6, load.num_bytes / disk_s / 1e6
                per_second, sync = load.num_requests / taken_s, "on" if fsync else "off"
                echo(f"{load.name:26}{layout:9}{sync:7}{per_second:12,.0f}{rate:8,.0f}{disk_rate:23,.0f}")


if __name__ == "__main__":
    main()
