"""Consumers that are located in the driver, and workers that send to them, for the tests of both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.links.driver import DriverHost, open_drivers
from headgate.capture.links.hub import ResultHub
from headgate.capture.links.network import Listening
from headgate.capture.links.sender import ResultSender, RowSender
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import (
    BatchedConsumer,
    CapturedRequest,
    ConsumerContext,
    FinishedRequest,
    Origin,
    RequestInfo,
)
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.registry import GROUP
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import Site
from tests.fakes.pipeline import (
    MODEL,
    SITES,
    TIMEOUT_S,
    Recorder,
    block,
    consumer_request,
    final_state,
    info,
    row_values,
)

WHOLE, FLOW = CaptureConsumerSpec(name="whole"), CaptureConsumerSpec(name="flow")


class Whole(BatchedConsumer):
    """Keeps each request; `behave` may raise, wait or return the payload, which is the live object otherwise."""

    location = "driver"

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self.captured: list[CapturedRequest] = []
        self.behave: Callable[[CapturedRequest], Any] = lambda captured: captured

    def on_capture(self, captured: CapturedRequest) -> Any:
        self.captured.append(captured)
        return self.behave(captured)


class Flow(Recorder):
    """Notes every call, and does what `behave` says."""

    location = "driver"

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(lambda name, detail: self.behave(name, detail), params, context)
        self.behave: Callable[[str, Any], Any] = lambda name, detail: None


class Unopenable(Whole):
    """Cannot be opened."""

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        raise ConfigError("broken on purpose")


class Elsewhere(Whole):
    """Stays in the worker."""

    location = "worker"


def publish(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the consumers above be found by name."""
    distribution = folder / "driving-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: driving\nVersion: 1.0\n")
    points = "".join(f"{name.lower()} = {__name__}:{name}\n" for name in ("Whole", "Flow", "Unopenable", "Elsewhere"))
    (distribution / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")
    monkeypatch.syspath_prepend(str(folder))


def config(*consumers: CaptureConsumerSpec) -> CaptureConsumersConfig:
    return CaptureConsumersConfig(consumers=consumers)


@contextmanager
def hosting(
    folder: Path, *consumers: CaptureConsumerSpec, listening: Listening | None = None
) -> Iterator[tuple[ResultHub, DriverHost]]:
    """A front end with some consumers, which ends cleanly."""
    hub = ResultHub(folder=str(folder), listening=listening)
    host = open_drivers(hub, config=config(*consumers), model=MODEL)
    try:
        yield hub, host
    finally:
        ended = hub.shutdown(TIMEOUT_S)
    assert ended


class Worker:
    """One pipeline stage of a worker, as one driver-located consumer knows it."""

    def __init__(
        self,
        hub: ResultHub,
        sender: ResultSender,
        instance: str,
        *,
        stage: int = 0,
        num_stages: int = 1,
        max_stall_s: float = TIMEOUT_S,
    ) -> None:
        context = ConsumerContext(instance_name=instance, model=MODEL, pp_rank=stage, pp_size=num_stages)
        self.sink = RowSender(CaptureConsumerSpec(name=instance, max_stall_s=max_stall_s), context, sender)
        self._address = hub.address
        self._sites = SITES[stage::num_stages]

    def request(self, req_id: str = "request-1", **changes: Any) -> RequestInfo:
        """A request with the sites of this stage; its key is its own."""
        request = info(req_id, sites=self._sites)
        return replace(request, origin=Origin(self._address, f"key-{req_id}"), **changes)

    def begin(self, *requests: RequestInfo) -> None:
        for request in requests:
            self.sink.begin(request)

    def write(self, *members: tuple[RequestInfo, Sequence[int]], sites: tuple[Site, ...] | None = None) -> None:
        """One step: rows of some requests at some positions."""
        owned = [(consumer_request(request.request_id), positions) for request, positions in members]
        sent = block(owned, sites or self._sites)
        spans = tuple(replace(span, request=request) for span, (request, _) in zip(sent.spans, members, strict=True))
        self.sink.write([replace(sent, spans=spans)])

    def finish(self, *requests: RequestInfo, num_tokens: int = 5, dropped_rows: int = 0) -> None:
        final = final_state(num_tokens=num_tokens)
        for request in requests:
            self.sink.finish(FinishedRequest(request=request, final=final, dropped_rows=dropped_rows))


def expect(hub: ResultHub, instance: str, *req_ids: str, **kwargs: Any) -> None:
    """Expect the results of requests of `Worker`."""
    for req_id in req_ids or ("request-1",):
        hub.expect(f"key-{req_id}", instances=[instance], **kwargs)


def result(hub: ResultHub, instance: str, req_id: str = "request-1", timeout_s: float = TIMEOUT_S) -> CaptureResult:
    """Wait for the result of such a request."""
    return hub.wait(f"key-{req_id}", timeout_s).merged[instance]


def whole(host: DriverHost, instance: str = "whole") -> Whole:
    consumer = host.consumers[instance]
    assert isinstance(consumer, Whole)
    return consumer


def flow(host: DriverHost) -> Flow:
    consumer = host.consumers["flow"]
    assert isinstance(consumer, Flow)
    return consumer


def assert_rows(captured: CapturedRequest, number: int, positions: list[int]) -> None:
    """Everything of one request, each row its own."""
    assert captured.positions.tolist() == positions
    for index, site in enumerate(SITES):
        assert torch.equal(captured.rows[site], row_values(number, np.array(positions, dtype=np.int64), index))


def no_drivers(_hub: ResultHub) -> DriverHost:
    """For a front end whose consumers are all located in the workers."""
    raise AssertionError("no consumer is located here")
