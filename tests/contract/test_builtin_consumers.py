"""Every built-in consumer holds to the contract that plugin authors are given."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load

from headgate.capture.schema.consumer import CapturedRequest, ConsumerContext
from headgate.capture.schema.sites import Site
from headgate.consumers.feed import TIMEOUT_S
from headgate.consumers.filesystem import FilesystemConsumer
from headgate.consumers.inline import InlineConsumer
from headgate.consumers.logging import LoggingConsumer
from headgate.consumers.memory import CapturedRows, MemoryConsumer
from headgate.consumers.reader import open_captures
from headgate.consumers.stream import StreamBatch, StreamConsumer, StreamError, StreamReader
from headgate.consumers.testing import ConsumerContract


class TestLogging(ConsumerContract):
    consumer_class = LoggingConsumer

    def check_payload(self, payload: Any, expected: CapturedRequest) -> None:
        shapes = {site.name: list(rows.shape) for site, rows in expected.rows.items()}
        assert payload == {"num_rows": len(expected.positions), "shapes": shapes}


class TestMemory(ConsumerContract):
    consumer_class = MemoryConsumer

    def check_payload(self, payload: Any, expected: CapturedRequest) -> None:
        assert isinstance(payload, CapturedRows)
        assert payload.sites == expected.sites
        for site in expected.sites:
            assert payload[site].dtype == expected.rows[site].dtype
            assert torch.equal(payload[site.name], expected.rows[site])
        assert np.array_equal(payload.positions, expected.positions)
        assert np.array_equal(payload.token_ids, expected.token_ids)
        assert np.array_equal(payload.is_prefill, expected.is_prefill)
        assert payload.status == expected.final.status


class TestInline(ConsumerContract):
    consumer_class = InlineConsumer

    def bad_specs(self) -> Mapping[str, Any]:
        return {"tag": {"hooks": {"post_mlp": [1]}, "tag": "mine"}}

    def check_payload(self, payload: Any, expected: CapturedRequest) -> None:
        content = base64.b64decode(payload["data"], validate=True)
        assert (payload["format"], payload["num_bytes"]) == ("safetensors", len(content))
        tensors = load(content)
        assert set(tensors) == {"positions", "token_ids", *(site.name for site in expected.sites)}
        for site in expected.sites:
            assert torch.equal(tensors[site.name], expected.rows[site])
        assert np.array_equal(tensors["positions"], expected.positions)
        assert np.array_equal(tensors["token_ids"], expected.token_ids)


class FilesystemContract(ConsumerContract):
    consumer_class = FilesystemConsumer
    layout: ClassVar[str]
    further: ClassVar[Mapping[str, Any]] = {}

    def params(self, folder: Path) -> Mapping[str, Any]:
        self.root: Path | str = folder / "captures"
        return {"root": str(self.root), "layout": self.layout, "threads": 2, **self.further}

    def bad_specs(self) -> Mapping[str, Any]:
        hooks = {"post_mlp": [1]}
        return {
            "tag": {"hooks": hooks, "tag": "../elsewhere"},
            "request_id": {"hooks": hooks, "request_id": "a/b"},
            "layout": {"hooks": hooks, "layout": "parquet"},
        }

    def check_payload(self, payload: Any, expected: CapturedRequest) -> None:
        assert payload["layout"] == self.layout
        assert payload["num_rows"] == len(expected.positions)
        assert all(Path(path).exists() for path in payload["paths"])
        capture = open_captures(self.root)[expected.request.client_request_id]
        assert capture.sites == expected.sites
        for site in expected.sites:
            assert torch.equal(capture[site], expected.rows[site])
        assert np.array_equal(capture.positions, expected.positions)
        assert np.array_equal(capture.token_ids, expected.token_ids)
        assert capture.metadata["status"] == expected.final.status


class TestFilesystemRequest(FilesystemContract):
    layout = "request"


class TestFilesystemRaw(FilesystemContract):
    layout = "raw"


class TestFilesystemShards(FilesystemContract):
    layout = "shards"


class TestFilesystemSpilling(FilesystemContract):
    """Every row goes through a temporary file."""

    layout = "request"
    further: ClassVar[Mapping[str, Any]] = {"max_request_bytes": 1, "fsync": False}


class TestFilesystemShortOfMemory(FilesystemContract):
    """Requests take turns in going to their temporary files, and shards hold one request each."""

    layout = "shards"
    further: ClassVar[Mapping[str, Any]] = {"memory_bytes": 1, "shard_bytes": 1, "fsync": False}


class TestFilesystemRemote(FilesystemContract):
    layout = "request"

    @pytest.fixture(autouse=True)
    def empty_memory(self) -> None:
        import fsspec

        files = fsspec.filesystem("memory")
        if files.exists("/captures"):
            files.rm("/captures", recursive=True)

    def params(self, folder: Path) -> Mapping[str, Any]:
        self.root = "memory://captures"
        return {"root": self.root, "layout": self.layout, "spool": str(folder / "spool")}

    def check_payload(self, payload: Any, expected: CapturedRequest) -> None:
        assert payload["uploaded"]
        capture = open_captures(self.root)[expected.request.client_request_id]
        assert len(payload["paths"]) == (1 if self.layout == "request" else 2 * len(expected.sites))
        for site in expected.sites:
            assert torch.equal(capture[site], expected.rows[site])
        assert np.array_equal(capture.positions, expected.positions)
        assert np.array_equal(capture.token_ids, expected.token_ids)


class TestFilesystemRemoteRaw(TestFilesystemRemote):
    layout = "raw"


TAKEN: defaultdict[str, Queue[StreamBatch]] = defaultdict(Queue)
"""Batches that readers took, by stream."""


class ReadStream(StreamConsumer):
    """A stream with a reader on a thread of its own, which takes everything."""

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self.reading = Thread(target=self.read)
        self.reading.start()

    def read(self) -> None:
        reader = StreamReader(self.address, sites="1.post_mlp", reconnect_s=0)
        with suppress(StreamError), reader:  # a test may close the consumer before the reader has connected
            for batch in reader:
                TAKEN[reader.state_dict()["stream"]].put(batch)

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        self.reading.join(timeout_s)
        assert not self.reading.is_alive()


class TestStream(ConsumerContract):
    consumer_class = ReadStream

    def params(self, folder: Path) -> Mapping[str, Any]:
        return {"address": f"unix://{folder}/rows.sock"}

    def bad_specs(self) -> Mapping[str, Any]:
        return {"tag": {"hooks": {"post_mlp": [1]}, "tag": "../elsewhere"}}

    def check_payload(self, payload: Any, expected: CapturedRequest) -> None:
        first, end = payload["batches"]
        assert (payload["num_rows"], end - first) == (len(expected.positions), len(expected.positions) > 0)
        if first < end:
            wanted = {expected.request.client_request_id}
            taken = TAKEN[payload["stream"]]
            batch = next(
                one for one in iter(partial(taken.get, timeout=TIMEOUT_S), None) if {*one.request_ids} == wanted
            )
            assert batch.positions.tolist() == expected.positions.tolist()
            assert batch.token_ids.tolist() == expected.token_ids.tolist()
            assert torch.equal(batch.torch("1.post_mlp"), expected.rows[Site.parse("1.post_mlp")])
