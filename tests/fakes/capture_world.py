"""A capture session, the ring it stages from, and a model whose rows say whose they are; no vLLM, no GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch

from headgate.capture.capture_process import DeliveryTarget, SpreadDelivery
from headgate.capture.delivery.delivery import Delivery
from headgate.capture.links.messages import Result
from headgate.capture.links.sender import ResultSender, SenderStats
from headgate.capture.links.shared_memory import SharedStaging
from headgate.capture.local_delivery import LocalDelivery, WorkerPlace
from headgate.capture.schema.batch import BatchView, NewRequest
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import BatchedConsumer, CaptureConsumer, CapturedRequest, ConsumerContext
from headgate.capture.schema.positions import Named, PositionSelector
from headgate.capture.schema.registry import OpenConsumer
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.capture.session import CaptureSession, lingers
from headgate.capture.staging.ring import StagingRing
from tests.fakes.looped_process import looped_process
from tests.fakes.pipeline import HIDDEN, MODEL, ROW_BYTES, SITES, TIMEOUT_S, row_values
from tests.fakes.readouts import Declared, bound, sites_of

NUM_READERS = 0
"""Of shared staging memory: one `looped_process`; three are two of them and threads, among which consumers are dealt
out. 0: threads, and memory of their own."""


class Keeper(BatchedConsumer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__({}, ConsumerContext(instance_name="keeper", model=MODEL))
        self.captured: list[CapturedRequest] = []

    def on_capture(self, captured: CapturedRequest) -> int:
        self.captured.append(captured)
        return len(captured.positions)


class KeptResults:
    """A `ResultSender` that keeps results; rows of driver-located consumers never come this way in these tests."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.sent: list[dict[str, Any]] = []

    def stats(self) -> SenderStats:
        return SenderStats(lost_results=0, lost_messages=0)

    def send_result(self, reply: str | None, result: Result) -> None:
        with self._changed:
            self.sent.append({"reply": reply, **msgspec.structs.asdict(result)})
            self._changed.notify_all()

    def close(self, timeout_s: float) -> int:
        return 0

    def wait(self, count: int = 1) -> list[CaptureResult]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.sent) >= count, TIMEOUT_S), f"only {self.sent}"
            return [message["result"] for message in self.sent]


@dataclass
class World:
    """A session, its staging ring, and the model whose forward pass writes into it."""

    session: CaptureSession
    staging: StagingRing
    sender: KeptResults
    numbers: dict[str, int] = field(default_factory=dict)
    """What stands for a request in the rows it computes."""

    def add(
        self, req_id: str, capture: Mapping[str, CaptureSpec], *, num_prompt: int = 4, number: int = 1, **wire: Any
    ):
        self.numbers[req_id] = number
        fields = {
            "id": f"client-{req_id}",
            "n": 1,
            "key": f"key-{req_id}",
            "reply": "ipc://hub",
            "wait": False,
            **wire,
        }
        raw = {instance: spec.to_wire() for instance, spec in capture.items()}
        self.session.request_added(
            NewRequest(
                req_id=req_id,
                prompt_token_ids=np.arange(num_prompt, dtype=np.int64),
                wire={"v": 1, "capture": {**fields, "specs": raw}},
            )
        )

    def view(self, **spans: tuple[int, int]) -> BatchView:
        """A batch with the positions ``start : stop`` of each request."""
        counts = np.array([stop - start for start, stop in spans.values()], dtype=np.int64)
        computed = np.array([start for start, _ in spans.values()], dtype=np.int64)
        return BatchView(tuple(spans), np.cumsum(counts) - counts, counts, computed)

    def step(self, *, token_ids: torch.Tensor | None = None, **spans: tuple[int, int]) -> None:
        """One step of such a batch."""
        view = self.view(**spans)
        self.session.step_begins(view, token_ids)
        rows = list(zip(view.req_ids, view.starts, view.num_scheduled, view.num_computed, strict=True))
        for index, buffer in enumerate(self.staging.site_rows):
            for req_id, start, count, first in rows:
                values = row_values(self.numbers[req_id], np.arange(first, first + count), index)
                buffer.index_put_((self.staging.slots[start : start + count],), values)
        self.session.step_ends()


def make_staging(
    sites: tuple[Site, ...] = SITES,
    *,
    num_rows: int = 64,
    max_tokens: int = 64,
    staging_rows: int = 1000,
    declared: Sequence[Declared] = (),
) -> StagingRing:
    device = torch.device("cpu")
    return StagingRing(
        sites=sites,
        num_rows=num_rows,
        max_tokens=max_tokens,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=device,
        staging_bytes=staging_rows * ROW_BYTES,
        memory=SharedStaging(staging_rows, HIDDEN, torch.float32, device, NUM_READERS) if NUM_READERS else None,
        readouts=bound(declared, sites),
    )


def local_session(
    *,
    config: CaptureConsumersConfig,
    sites: tuple[Site, ...],
    consumers: Sequence[OpenConsumer],
    staging: StagingRing,
    sender: ResultSender,
    close_sender: Callable[[float], int] | None = None,
    pp_rank: int = 0,
    pp_size: int = 1,
    declared: Sequence[Declared] = (),
) -> CaptureSession:
    """A session that delivers on threads of this process, to consumers that are there."""
    linger_s = lingers(config, {each.bit: type(each.consumer) for each in consumers})
    place = WorkerPlace(
        config=config,
        model=MODEL,
        sites=tuple(sites),
        staging_bytes=staging.host_bytes,
        linger_s=min(linger_s.values(), default=0.0),
        pp_rank=pp_rank,
        pp_size=pp_size,
        readouts=sites_of(declared),
    )
    memory = staging.memory
    delivery: Delivery
    if isinstance(memory, SharedStaging) and memory.shared.num_readers > 1:
        delivery = spread_delivery(place, consumers, sender, memory, close_sender)
    elif isinstance(memory, SharedStaging):
        delivery = looped_process(place, consumers, sender, memory, close_sender)
    else:
        delivery = LocalDelivery(place, consumers, sender, close_sender=close_sender)
    bits = {each.spec.instance: each.bit for each in consumers}
    parts: dict[str, Any] = {"staging": staging, "delivery": delivery, "readouts": place.readouts}
    return CaptureSession(config=config, sites=sites, bits=bits, linger_s=linger_s, **parts)


def spread_delivery(
    place: WorkerPlace,
    consumers: Sequence[OpenConsumer],
    sender: ResultSender,
    memory: SharedStaging,
    close_sender: Callable[[float], int] | None,
) -> SpreadDelivery:
    """Consumers dealt out among processes and, last, threads of this one."""
    readers, count = [], memory.shared.num_readers
    for index in range(count):
        own = consumers[index::count]
        at = replace(place, bits=frozenset(each.bit for each in own))
        closing = close_sender if index == 0 else None
        delivery: Delivery
        if index < count - 1:
            delivery = looped_process(at, own, sender, memory, closing, index)
        else:
            delivery = LocalDelivery(at, own, sender)
        readers.append(DeliveryTarget(delivery, {each.spec.instance: each.bit for each in own}, index, memory))
    return SpreadDelivery(readers, [each.spec.instance for each in consumers])


Configured = tuple[CaptureConsumer, dict[str, Any]]


@contextmanager
def world(*consumers: Configured, sites: tuple[Site, ...] = SITES, **settings: Any) -> Iterator[World]:
    """A world whose consumers are called ``c0``, ``c1``, ...; closed at the end."""
    made = make_world(*consumers, sites=sites, **settings)
    try:
        yield made
    finally:
        made.session.close(TIMEOUT_S)


def make_world(
    *consumers: Configured, sites: tuple[Site, ...] = SITES, linger_s: float | None = 0, **settings: Any
) -> World:
    """The same, not closed. With ``linger_s=0`` each step is a packet."""
    specs = [CaptureConsumerSpec(name=f"c{bit}", **knobs) for bit, (_, knobs) in enumerate(consumers)]
    declared = settings.get("declared", ())
    staging, sender = settings.pop("staging", None) or make_staging(sites, declared=declared), KeptResults()
    session = local_session(
        config=CaptureConsumersConfig(consumers=tuple(specs), linger_s=linger_s),
        sites=sites,
        consumers=[OpenConsumer(bit, specs[bit], consumer) for bit, (consumer, _) in enumerate(consumers)],
        staging=staging,
        sender=sender,
        **settings,
    )
    return World(session, staging, sender)


def want(positions: PositionSelector | None = None, sites: tuple[Site, ...] = SITES) -> CaptureSpec:
    return CaptureSpec(sites=sites, positions=positions or Named("all"), options={"tag": "t"})
