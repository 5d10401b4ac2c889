"""A small world for the tests of the pipeline: requests whose rows say whose they are, consumers under control."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headgate.capture.delivery.completeness import ConsumerRequest
from headgate.capture.delivery.consumer_queue import ConsumerQueue, ConsumerThread, UnfinishedWork
from headgate.capture.delivery.row_packets import Packet
from headgate.capture.schema.batch import FinalState, Int64Array
from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.consumer import (
    ConsumerContext,
    FinishedRequest,
    ModelInfo,
    Origin,
    RequestInfo,
    RowBlock,
    RowSpan,
    StreamingConsumer,
)
from headgate.capture.schema.positions import Named, PositionSelector
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from tests.deadlines import patience

TIMEOUT_S = patience(30.0)
"""Nothing that a test waits for takes longer, unless it never comes."""

HIDDEN = 4
SITES = tuple(Site(layer, HookPoint.POST_MLP) for layer in range(3))
MODEL = ModelInfo(name="tiny", num_layers=3, hidden_size=HIDDEN, dtype="float32", sites=SITES)
ROW_BYTES = HIDDEN * 4


def row_values(number: int, positions: Int64Array, site_index: int) -> Tensor:
    """What the model computes: each element of a row says which request, position and site it is of."""
    rows = torch.zeros(len(positions), HIDDEN)
    rows[:, 0] = number
    rows[:, 1] = torch.from_numpy(positions).float()
    rows[:, 2] = site_index
    rows[:, 3] = 1
    return rows


def request_number(req_id: str) -> int:
    """The number that stands for a request in its rows: the end of its id."""
    return int(req_id.rpartition("-")[2])


def info(
    req_id: str = "request-1",
    *,
    num_prompt: int = 4,
    sites: tuple[Site, ...] = SITES,
    positions: PositionSelector | None = None,
) -> RequestInfo:
    """A request as a consumer knows it."""
    return RequestInfo(
        request_id=req_id,
        client_request_id=f"client-{req_id}",
        prompt_token_ids=np.arange(num_prompt, dtype=np.int64),
        spec=CaptureSpec(sites=sites, positions=positions or Named("all")),
        origin=Origin(reply=None, key=f"key-{req_id}"),
    )


def consumer_request(req_id: str = "request-1", **kwargs: Any) -> ConsumerRequest:
    """A request on its way to one consumer."""
    return ConsumerRequest(info(req_id, **kwargs))


def final_state(num_prompt: int = 4, num_tokens: int | None = None, status: str = "stop") -> FinalState:
    """An end after `num_tokens` tokens; by default the whole prompt and one sampled token."""
    count = num_prompt + 1 if num_tokens is None else num_tokens
    return FinalState(num_prompt_tokens=num_prompt, token_ids=np.arange(count, dtype=np.int64) + 100, status=status)


def block(members: Sequence[tuple[ConsumerRequest, Sequence[int]]], sites: tuple[Site, ...] = SITES) -> RowBlock:
    """Rows of several requests at some positions each."""
    spans, stop = [], 0
    for request, positions in members:
        start, stop = stop, stop + len(positions)
        spans.append(RowSpan(request=request.info, start=start, stop=stop))
    arrays = [np.array(positions, dtype=np.int64) for _, positions in members]
    rows = torch.stack([
        torch.cat([
            row_values(request_number(request.info.request_id), array, SITES.index(site))
            for (request, _), array in zip(members, arrays, strict=True)
        ])
        for site in sites
    ])  # fmt: skip
    return RowBlock(sites=sites, rows=rows, positions=np.concatenate(arrays), spans=tuple(spans))


def packet(members: Sequence[tuple[ConsumerRequest, Sequence[int]]], sites: tuple[Site, ...] = SITES) -> Packet:
    """The same as a packet of one block."""
    return Packet([(block(members, sites), tuple(request for request, _ in members))])


class Reports:
    """Collects results, from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._results: list[tuple[RequestInfo, CaptureResult]] = []

    def __call__(self, request: RequestInfo, result: CaptureResult | None) -> None:
        if result is None:
            return
        with self._changed:
            self._results.append((request, result))
            self._changed.notify_all()

    def wait(self, count: int = 1) -> dict[str, CaptureResult]:
        """Request id to result, once there are `count`."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._results) >= count, TIMEOUT_S), f"only {self._results}"
            found = {request.request_id: result for request, result in self._results}
            assert len(found) == len(self._results), f"a request was reported twice: {self._results}"
            return found


@dataclass
class Gate:
    """Blocks whoever passes until it is opened; tells when somebody came."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(TIMEOUT_S), "the test never opened the gate"

    def wait_reached(self) -> None:
        assert self.reached.wait(TIMEOUT_S), "nobody came to the gate"


class Recorder(StreamingConsumer):
    """Notes every call as ``(name, detail)``; `behave` may raise, wait or return what `finish` returns."""

    def __init__(
        self,
        behave: Callable[[str, Any], Any] | None = None,
        params: Mapping[str, Any] | None = None,
        context: ConsumerContext | None = None,
    ) -> None:
        super().__init__(params or {}, context or ConsumerContext(instance_name="recorder", model=MODEL))
        self.calls: list[tuple[str, Any]] = []
        self.blocks: list[RowBlock] = []
        self._behave = behave or (lambda _name, _detail: None)

    def begin(self, request: RequestInfo) -> None:
        self._note("begin", request.request_id)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        self._note("write", [(s.request.request_id, b.positions[s.start : s.stop].tolist()) for b in blocks
                             for s in b.spans])  # fmt: skip
        self.blocks += blocks

    def finish(self, finished: FinishedRequest) -> Any:
        return self._note("finish", finished.request.request_id)

    def abandon(self, request: RequestInfo) -> None:
        self._note("abandon", request.request_id)

    def close(self, timeout_s: float) -> None:
        self._note("close", None)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def _note(self, name: str, detail: Any) -> Any:
        self.calls.append((name, detail))
        return self._behave(name, detail)


def open_consumer(sink: Any, send_result: Any, **spec: Any) -> ConsumerThread:
    """A consumer whose thread runs; the test closes it."""
    spill_dir = spec.pop("spill_dir", None)
    settings = CaptureConsumerSpec(name="c", **spec)
    consumer = ConsumerThread(settings, sink, send_result, model=MODEL, spill_dir=spill_dir)
    consumer.start()
    return consumer


@contextmanager
def running(sink: Any, send_result: Any, **spec: Any) -> Iterator[ConsumerQueue]:
    """The queue of a consumer that is closed, cleanly, at the end."""
    consumer = open_consumer(sink, send_result, **spec)
    try:
        yield consumer.queue
    finally:
        left = close_consumer(consumer)
    assert left == UnfinishedWork()


def close_consumer(consumer: ConsumerThread, timeout_s: float = TIMEOUT_S) -> UnfinishedWork:
    close_by = time.monotonic() + timeout_s
    consumer.close(close_by)
    return consumer.join(close_by)


def send(queue: ConsumerQueue, request: ConsumerRequest, positions: list[int]) -> bool:
    """Offer rows of one request."""
    return queue.offer(packet([(request, positions)]), may_wait=True)


def at_gate(gate: Gate, at: str) -> Callable[[str, Any], None]:
    """Behaviour of a `Recorder` that waits at the gate in the call `at`."""
    return lambda name, _detail: gate.pass_through() if name == at else None


def when_it_waits(condition: threading.Condition, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a thread waits for `condition`, from now on."""
    waits, wait = threading.Event(), condition.wait

    def note(timeout: float | None = None) -> bool:
        waits.set()
        return wait(timeout)

    monkeypatch.setattr(condition, "wait", note)
    return waits
