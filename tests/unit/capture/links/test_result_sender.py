"""What a worker sends arrives, or is counted and said; a front end that is gone costs it nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from headgate.capture.delivery.consumer_queue import DEFERRED
from headgate.capture.links.messages import (
    Message,
    Result,
    Rows,
    decode_frames,
    read_rows,
)
from headgate.capture.links.peer import Inbox, rows_address
from headgate.capture.links.sender import ResultSender, RowSender, split_by_reply
from headgate.capture.schema.batch import Begin, End, FinalState
from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.consumer import (
    ConsumerContext,
    FinishedRequest,
    ModelInfo,
    Origin,
    RequestInfo,
    RowBlock,
    RowSpan,
)
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.positions import Named
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from tests.deadlines import patience

TIMEOUT_S = patience(30.0)
SITES = (Site(0, HookPoint.POST_MLP), Site(1, HookPoint.POST_MLP))
SPEC = CaptureSpec(sites=SITES, positions=Named("all"))
MODEL = ModelInfo(name="m", num_layers=2, hidden_size=4, dtype="float32", sites=SITES)


class Box:
    """A front end that keeps what it gets, and reads on only when it may."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.received: list[tuple[Message, list[zmq.Frame]]] = []
        self.may_read = threading.Event()
        self.may_read.set()
        self._arrived = threading.Semaphore(0)
        self._inbox = Inbox(address, self._handle, name="headgate-test")

    def _handle(self, frames: Sequence[zmq.Frame]) -> None:
        assert self.may_read.wait(TIMEOUT_S)
        self.received.append((decode_frames(frames), list(frames)))
        self._arrived.release()

    def messages(self, count: int) -> list[Any]:
        for _ in range(count):
            assert self._arrived.acquire(timeout=TIMEOUT_S)
        return [message for message, _ in self.received]

    def close(self) -> None:
        self.may_read.set()
        assert self._inbox.close(TIMEOUT_S)


@pytest.fixture
def open_box() -> Iterator[Callable[[str], Box]]:
    boxes: list[Box] = []

    def open_box(address: str) -> Box:
        boxes.append(Box(address))
        return boxes[-1]

    yield open_box
    for box in boxes:
        box.close()


@pytest.fixture
def sender() -> Iterator[ResultSender]:
    sender = ResultSender(window_bytes=2000)
    yield sender
    sender.close(0)


@pytest.fixture
def reply(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/hub"


def send(sender: ResultSender, reply: str | None, result: CaptureResult, *, req_id: str = "r") -> None:
    sender.send_result(reply, Result(key="k", req_id=req_id, instance="files", result=result))


def request(name: str, reply: str | None) -> RequestInfo:
    return RequestInfo(
        request_id=name,
        client_request_id=f"client-{name}",
        prompt_token_ids=np.arange(2, dtype=np.int64),
        spec=SPEC,
        origin=Origin(reply, f"key-{name}"),
    )


def rows(*parts: tuple[RequestInfo, Sequence[int]], sites: tuple[Site, ...] = SITES) -> RowBlock:
    positions = np.concatenate([np.asarray(part, dtype=np.int64) for _, part in parts])
    stops = np.cumsum([len(part) for _, part in parts]).tolist()
    return RowBlock(
        sites=sites,
        rows=torch.randn(len(sites), len(positions), 4),
        positions=positions,
        spans=tuple(
            RowSpan(request=info, start=stop - len(part), stop=stop)
            for (info, part), stop in zip(parts, stops, strict=True)
        ),
    )


def finished(info: RequestInfo, dropped_rows: int = 0) -> FinishedRequest:
    final = FinalState(num_prompt_tokens=2, token_ids=np.arange(4, dtype=np.int64), status="stop")
    return FinishedRequest(request=info, final=final, dropped_rows=dropped_rows)


def remote_sink(sender: ResultSender, *, max_stall_s: float = TIMEOUT_S) -> RowSender:
    spec = CaptureConsumerSpec(name="reward", max_stall_s=max_stall_s)
    return RowSender(spec, ConsumerContext(instance_name="reward", model=MODEL, pp_rank=1, pp_size=3), sender)


class Summarised:
    def __init__(self, summary: Callable[[], dict[str, Any]]) -> None:
        self._summary = summary

    def summary(self) -> dict[str, Any]:
        return self._summary()


def test_parts_without_room_are_dropped_and_take_none_from_results(
    sender: ResultSender, reply: str, open_box: Callable[[str], Box]
) -> None:
    """The box acknowledges nothing as long as it may not read."""
    box = open_box(reply)
    box.may_read.clear()
    for number in range(4):
        payload = f"{number}" * 1500
        result = CaptureResult(status="ok", payload=payload)
        sender.send_part(reply, Result(key="k", instance="files", result=result, num_rows=5))
    send(sender, reply, CaptureResult(status="ok", payload="whole"))
    box.may_read.set()

    messages = box.messages(2)
    assert sorted(message.num_rows for message in messages) == [0, 5]
    assert sender.stats().lost_results == 0


def test_results_of_many_threads_arrive(sender: ResultSender, reply: str, open_box: Callable[[str], Box]) -> None:
    box = open_box(reply)
    sender = ResultSender()

    def send_many(thread: int) -> None:
        for index in range(100):
            send(sender, reply, CaptureResult(status="ok", num_rows=index), req_id=f"{thread}-{index}")

    threads = [threading.Thread(target=send_many, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)

    messages = box.messages(400)
    assert {message.req_id for message in messages} == {f"{t}-{i}" for t in range(4) for i in range(100)}
    assert all(message.result.num_rows == int(message.req_id.split("-")[1]) for message in messages)
    assert sender.close(TIMEOUT_S) == 0


def test_a_result_that_nobody_waits_for_is_not_sent(sender: ResultSender) -> None:
    send(sender, None, CaptureResult(status="ok"))

    assert sender.stats().lost_results == 0


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (object(), "object"),
        ({"x": 1 << 70}, "OverflowError"),
        (Summarised(lambda: {"rows": object()}), "object"),
        (Summarised(lambda: {}["missing"]), "KeyError"),
    ],
)
def test_a_payload_that_cannot_be_sent_becomes_an_error_that_says_so(
    sender: ResultSender, reply: str, open_box: Callable[[str], Box], payload: object, complaint: str
) -> None:
    box = open_box(reply)

    send(sender, reply, CaptureResult(status="ok", payload=payload, num_rows=3, num_bytes=4, dropped_rows=5))

    (message,) = box.messages(1)
    assert isinstance(message, Result)
    assert message.result.status == "error"
    assert message.result.payload is None
    assert "consumer files: its payload cannot be sent from a worker" in str(message.result.error)
    assert complaint in str(message.result.error)
    assert (message.result.num_rows, message.result.num_bytes, message.result.dropped_rows) == (3, 4, 5)


def test_a_live_payload_is_sent_as_its_summary(
    sender: ResultSender, reply: str, open_box: Callable[[str], Box]
) -> None:
    box = open_box(reply)

    send(sender, reply, CaptureResult(status="ok", payload=Summarised(lambda: {"rows": 3})))

    assert box.messages(1)[0].result.payload == {"rows": 3}


def test_a_front_end_that_is_gone_costs_no_time_and_is_counted(sender: ResultSender, reply: str) -> None:
    started = time.monotonic()
    for _ in range(100):
        send(sender, reply, CaptureResult(status="ok", payload="x" * 1000))
    left = sender.close(TIMEOUT_S)

    assert time.monotonic() - started < TIMEOUT_S / 2
    assert sender.stats().lost_results + left == 100


def test_a_front_end_that_does_not_read_bounds_the_memory_and_is_counted(
    sender: ResultSender, reply: str, open_box: Callable[[str], Box]
) -> None:
    box = open_box(reply)
    box.may_read.clear()

    for _ in range(10):
        send(sender, reply, CaptureResult(status="ok", payload="x" * 800))

    assert sender.stats().lost_results == 8
    box.may_read.set()
    assert len(box.messages(2)) == 2


def test_nothing_is_sent_after_close_and_no_error_is_raised(
    sender: ResultSender, reply: str, open_box: Callable[[str], Box]
) -> None:
    box = open_box(reply)
    assert sender.close(TIMEOUT_S) == 0

    send(sender, reply, CaptureResult(status="ok"))

    assert box.received == []


def test_a_remote_sink_passes_a_request_on_in_order(
    sender: ResultSender, reply: str, open_box: Callable[[str], Box]
) -> None:
    box, sink, info = open_box(rows_address(reply, "reward")), remote_sink(sender), request("a", reply)
    first, second = rows((info, [0, 1])), rows((info, [2]))

    sink.begin(info)
    sink.write([first])
    sink.write([second])
    outcome = sink.finish(finished(info, dropped_rows=2))

    begin, *row_messages, finish = box.messages(4)
    assert outcome is DEFERRED
    assert isinstance(begin, Begin)
    assert (begin.capture["key"], begin.req_id, begin.stage, begin.num_stages) == ("key-a", "a", 1, 3)
    for sent, message, (_, frames) in zip((first, second), row_messages, box.received[1:3], strict=True):
        assert isinstance(message, Rows)
        (received,) = read_rows(message, frames, {("key-a", "a"): info})
        assert torch.equal(received.rows, sent.rows)
    assert isinstance(finish, End)
    assert (finish.final.status, finish.dropped_rows) == ("stop", 2)


def test_rows_of_several_front_ends_in_one_write_go_each_to_its_own(
    sender: ResultSender, tmp_path: Path, open_box: Callable[[str], Box]
) -> None:
    replies = [f"ipc://{tmp_path}/one", f"ipc://{tmp_path}/two"]
    boxes = [open_box(rows_address(reply, "reward")) for reply in replies]
    sink, infos = remote_sink(sender), [request("a", replies[0]), request("b", replies[1])]
    mixed = rows((infos[0], [0, 1]), (infos[1], [0]), (infos[0], [2]))

    for info in infos:
        sink.begin(info)
    sink.write([mixed])

    for box, info, indices in zip(boxes, infos, ([0, 1, 3], [2]), strict=True):
        message = box.messages(2)[1]
        (received,) = read_rows(message, box.received[1][1], {(f"key-{info.request_id}", info.request_id): info})
        assert torch.equal(received.rows, mixed.rows[:, indices])


def test_rows_of_one_front_end_are_not_copied() -> None:
    block = rows((request("a", "x"), [0, 1]), (request("b", "x"), [0]))

    assert split_by_reply([block]) == {"x": [block]}


def test_rows_that_a_stuck_front_end_does_not_take_are_told_when_it_moves_again(
    sender: ResultSender, reply: str, open_box: Callable[[str], Box]
) -> None:
    box, sink, info = (
        open_box(rows_address(reply, "reward")),
        remote_sink(sender, max_stall_s=0.01),
        request("a", reply),
    )
    sites = SITES[:1]
    box.may_read.clear()
    sink.begin(info)
    for start in range(0, 1000, 100):
        sink.write([rows((info, range(start, start + 100)), sites=sites), rows((info, range(start, start + 100)))])

    sink.finish(finished(info, dropped_rows=7))
    box.may_read.set()
    while not isinstance(box.messages(1)[-1], End):
        pass

    arrived = [message.blocks[0].shape[1] for message, _ in box.received if isinstance(message, Rows)]
    finish = box.received[-1][0]
    assert isinstance(finish, End)
    assert finish.dropped_rows == 1000 - sum(arrived) + 7
    assert len(arrived) < 10


def test_a_request_that_no_front_end_waits_for_is_refused(sender: ResultSender) -> None:
    with pytest.raises(ConsumerError, match="request client-a has no front end"):
        remote_sink(sender).begin(request("a", None))
    with pytest.raises(ConsumerError, match="request client-a has no front end"):
        remote_sink(sender).begin(replace(request("a", "x"), origin=None))


def test_an_abandoned_request_is_announced_once_and_only_if_it_was_begun(
    sender: ResultSender, reply: str, open_box: Callable[[str], Box]
) -> None:
    box, sink = open_box(rows_address(reply, "reward")), remote_sink(sender)

    sink.abandon(request("never begun", reply))
    sink.begin(request("a", reply))
    sink.abandon(request("a", reply))
    sink.abandon(request("a", reply))
    sink.begin(request("last", reply))

    _, abandoned, last = box.messages(3)
    assert isinstance(abandoned, End)
    assert abandoned.final is None
    assert (abandoned.key, abandoned.req_id, abandoned.stage) == ("key-a", "a", 1)
    assert last.req_id == "last"


def test_addresses_for_rows_differ_by_consumer_and_stay_short() -> None:
    addresses = {rows_address("ipc:///tmp/hub", name) for name in ("a", "b", "x" * 500, "ünicode/..")}

    assert len(addresses) == 4
    assert all(address.startswith("ipc:///tmp/hub.") and len(address) < 30 for address in addresses)
