"""One consumer's queue and thread: order, bounds, overload policies, and consumers that fail, are slow or hang."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from tests.fakes.pipeline import (
    SITES,
    TIMEOUT_S,
    Gate,
    Recorder,
    Reports,
    at_gate,
    close_consumer,
    consumer_request,
    final_state,
    open_consumer,
    packet,
    running,
    send,
    when_it_waits,
)
from tests.unit.capture.delivery.test_spill_file import full_disk

OPEN = Gate()
OPEN.opened.set()

PACKET_BYTES = packet([(consumer_request(), [0])]).num_bytes
"""One row of one request."""


def test_calls_come_in_order_and_the_result_follows_the_last_rows() -> None:
    sink, reports = Recorder(lambda name, _detail: {"rows": 4} if name == "finish" else None), Reports()
    request = consumer_request()

    with running(sink, reports) as queue:
        queue.begin(request)
        send(queue, request, [0, 1])
        send(queue, request, [2, 3])
        queue.finish(request, final_state())
        result = reports.wait()["request-1"]

    assert sink.calls == [
        ("begin", "request-1"),
        ("write", [("request-1", [0, 1])]),
        ("write", [("request-1", [2, 3])]),
        ("finish", "request-1"),
        ("close", None),
    ]
    assert (result.status, result.error, result.payload) == ("ok", None, {"rows": 4})
    assert (result.num_rows, result.num_bytes) == (4, 4 * PACKET_BYTES)


def test_a_request_whose_rows_never_came_is_not_ok() -> None:
    reports, request = Reports(), consumer_request(num_prompt=10)

    with running(Recorder(), reports) as queue:
        queue.begin(request)
        send(queue, request, [8, 9])
        queue.finish(request, final_state(10))

    result = reports.wait()["request-1"]
    assert result.status == "partial_error"
    assert result.error is not None
    assert "8 of 10 wanted positions are missing: 8 never captured" in result.error


def test_block_waits_for_room_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reports, request = Gate(), Reports(), consumer_request()
    sink = Recorder(at_gate(gate, "write"))

    with running(sink, reports, overload="block", queue_bytes=2 * PACKET_BYTES) as queue:
        queue.begin(request)
        send(queue, request, [0])
        send(queue, request, [1])
        gate.wait_reached()
        assert not queue.offer(packet([(request, [2])]), may_wait=False)
        thread = threading.Thread(target=lambda: send(queue, request, [2, 3]))
        waits = when_it_waits(queue._changed, monkeypatch)
        thread.start()
        assert waits.wait(TIMEOUT_S)
        gate.opened.set()
        thread.join(TIMEOUT_S)
        queue.finish(request, final_state())
        result = reports.wait()["request-1"]

    assert result.status == "ok"
    assert [detail for name, detail in sink.calls if name == "write"] == [
        [("request-1", positions)] for positions in ([0], [1], [2, 3])
    ]
    assert queue.stats().stalls == 1


def test_a_packet_larger_than_the_queue_is_taken_alone() -> None:
    reports, request = Reports(), consumer_request()

    with running(Recorder(), reports, queue_bytes=1) as queue:
        queue.begin(request)
        send(queue, request, [0, 1])
        send(queue, request, [2, 3])
        queue.finish(request, final_state())

    assert reports.wait()["request-1"].status == "ok"


def test_drop_counts_exactly_what_it_loses() -> None:
    gate, reports, request = Gate(), Reports(), consumer_request(num_prompt=8)
    sink = Recorder(at_gate(gate, "write"))

    with running(sink, reports, overload="drop", queue_bytes=3 * PACKET_BYTES) as queue:
        queue.begin(request)
        for position in range(8):
            assert queue.offer(packet([(request, [position])]), may_wait=False)
        gate.wait_reached()
        queue.finish(request, final_state(8))
        gate.opened.set()
        result = reports.wait()["request-1"]

    assert [detail[0][1] for name, detail in sink.calls if name == "write"] == [[0], [1], [2]]
    assert (result.status, result.num_rows, result.dropped_rows) == ("partial_error", 3, 5)
    assert "5 of 8 wanted positions are missing: 5 dropped (its queue of" in str(result.error)
    assert queue.stats().dropped_rows == 5
    assert queue.stats().rows == 3


def test_a_dropped_row_that_was_computed_in_vain_is_no_loss() -> None:
    gate, reports, request = Gate(), Reports(), consumer_request(num_prompt=2)

    with running(Recorder(at_gate(gate, "write")), reports, overload="drop", queue_bytes=2 * PACKET_BYTES) as queue:
        queue.begin(request)
        for positions in ([0, 1], [2]):
            send(queue, request, positions)
        queue.finish(request, final_state(2))
        gate.opened.set()

    assert reports.wait()["request-1"].status == "ok"
    assert queue.stats().dropped_rows == 1


def test_spill_delivers_everything_in_order_among_begins_and_ends(tmp_path: Any) -> None:
    gate, reports = Gate(), Reports()
    sink = Recorder(at_gate(gate, "write"))
    requests = [consumer_request(f"request-{number}") for number in range(4)]

    with running(sink, reports, overload="spill", queue_bytes=2 * PACKET_BYTES, spill_dir=str(tmp_path)) as queue:
        for request in requests:
            queue.begin(request)
            for position in range(4):
                assert queue.offer(packet([(request, [position])]), may_wait=False)
            queue.finish(request, final_state())
        assert queue.stats().spilled_bytes == 14 * PACKET_BYTES
        gate.opened.set()
        results = reports.wait(4)

    assert {result.status for result in results.values()} == {"ok"}
    expected: list[tuple[str, Any]] = []
    for request in requests:
        req_id = request.info.request_id
        writes = [("write", [(req_id, [position])]) for position in range(4)]
        expected += [("begin", req_id), *writes, ("finish", req_id)]
    assert sink.calls[:-1] == expected
    assert all(block.rows[index, 0].tolist() == [number // 4, number % 4, index, 1]
               for number, block in enumerate(sink.blocks) for index in range(len(SITES)))  # fmt: skip
    assert (queue.stats().spilled_rows, queue.stats().spilled_bytes) == (14, 0)


def test_once_spilling_everything_goes_through_the_file_until_it_is_empty() -> None:
    first, second, reports, request = Gate(), Gate(), Reports(), consumer_request(num_prompt=8)

    def behave(name: str, detail: Any) -> None:
        if name == "write":
            {0: first, 2: second}.get(detail[0][1][0], OPEN).pass_through()

    with running(Recorder(behave), reports, overload="spill", queue_bytes=2 * PACKET_BYTES) as queue:
        queue.begin(request)
        for position in range(4):  # 0 and 1 in memory, 2 and 3 on disk
            send(queue, request, [position])
        first.opened.set()
        second.wait_reached()  # 2 was loaded; memory has room, the file still holds 3
        send(queue, request, [4])
        assert queue.stats().spilled_rows == 3
        second.opened.set()
        queue.finish(request, final_state(8, num_tokens=5))
        reports.wait()
        send(queue, request, [5])
        assert queue.stats().spilled_rows == 3


def test_a_full_disk_is_a_counted_drop_that_the_result_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reports, request = Gate(), Reports(), consumer_request()
    monkeypatch.setattr(os, "pwrite", full_disk(PACKET_BYTES))

    with running(Recorder(at_gate(gate, "write")), reports, overload="spill", queue_bytes=PACKET_BYTES) as queue:
        queue.begin(request)
        for position in range(4):  # one in memory, one on disk, two too many
            send(queue, request, [position])
        queue.finish(request, final_state())
        gate.opened.set()

    result = reports.wait()["request-1"]
    assert (result.status, result.num_rows, result.dropped_rows) == ("partial_error", 2, 2)
    assert "spilling to disk failed" in str(result.error)
    assert "No space left on device" in str(result.error)


def test_rows_that_cannot_be_read_back_are_counted_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reports, request = Gate(), Reports(), consumer_request()

    with running(Recorder(at_gate(gate, "write")), reports, overload="spill", queue_bytes=PACKET_BYTES) as queue:
        queue.begin(request)
        for positions in ([0, 1], [2, 3]):
            send(queue, request, positions)
        monkeypatch.setattr(os, "preadv", lambda *_args: 0)
        queue.finish(request, final_state())
        gate.opened.set()

    result = reports.wait()["request-1"]
    assert (result.status, result.dropped_rows) == ("partial_error", 2)
    assert "reading back from disk failed" in str(result.error)


def test_requests_without_sites_here_are_blank_unless_the_consumer_wants_to_hear_of_them() -> None:
    sink, reports, request = Recorder(), Reports(), consumer_request(sites=())

    with running(sink, reports) as queue:
        queue.begin(request)
        queue.finish(request, final_state())

    result = reports.wait()["request-1"]
    assert sink.names() == ["close"]
    assert (result.status, result.payload, result.num_rows) == ("ok", None, 0)


def test_a_request_that_is_replaced_is_abandoned_and_its_rows_go_nowhere() -> None:
    sink, reports = Recorder(), Reports()
    old, new = consumer_request(), consumer_request()

    with running(sink, reports) as queue:
        queue.begin(old)
        send(queue, old, [0, 1])
        queue.replace(old, is_silent=True)
        queue.begin(new)
        send(queue, new, [0, 1, 2, 3])
        queue.finish(new, final_state())

    assert sink.names()[-4:] == ["begin", "write", "finish", "close"]
    assert sink.names().count("abandon") <= 1
    assert reports.wait()["request-1"].status == "ok"


def test_rows_are_never_delivered_to_a_request_of_the_same_name_that_came_later() -> None:
    gate, reports = Gate(), Reports()
    sink = Recorder(at_gate(gate, "begin"))
    old, new = consumer_request(), consumer_request()

    consumer = open_consumer(sink, reports)
    queue = consumer.queue
    queue.begin(old)
    gate.wait_reached()
    send(queue, old, [0, 1])
    queue.replace(old, is_silent=False)
    queue.begin(new)
    assert "another request took over the id" in str(reports.wait()["request-1"].error)
    gate.opened.set()
    close_consumer(consumer)

    assert sink.names() == ["begin", "abandon", "begin", "close"]


def test_rows_are_shared_with_the_consumer_without_another_copy() -> None:
    sink, reports, request = Recorder(), Reports(), consumer_request()
    given = packet([(request, [0, 1, 2, 3])])

    with running(sink, reports) as queue:
        queue.begin(request)
        queue.offer(given, may_wait=True)
        queue.finish(request, final_state())
        reports.wait()

    assert sink.blocks[0].rows is given.blocks[0].rows
    assert torch.equal(sink.blocks[0].rows, given.blocks[0].rows)
