"""A consumer in the front end gets exactly what workers captured for it, whatever they, it or others do."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from headgate.capture.delivery.completeness import ConsumerRequest
from headgate.capture.links.messages import Result
from headgate.capture.links.peer import numbering, rows_address
from headgate.capture.links.sender import ResultSender
from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.consumer import CapturedRequest
from headgate.capture.schema.positions import Named
from headgate.capture.schema.results import CaptureResult, Origin
from headgate.capture.schema.sites import HookPoint, Site
from tests.fakes.driver_consumers import FLOW, WHOLE, Worker, assert_rows, expect, flow, hosting, result, whole
from tests.fakes.pipeline import (
    ROW_BYTES,
    SITES,
    TIMEOUT_S,
    Gate,
    Reports,
    at_gate,
    block,
    consumer_request,
    final_state,
    packet,
    running,
)

pytestmark = pytest.mark.usefixtures("driver_consumers")


def test_a_batched_consumer_gets_whole_requests_and_answers_with_live_objects(
    folder: Path, sender: ResultSender
) -> None:
    with hosting(folder, WHOLE) as (hub, host):
        worker = Worker(hub, sender, "whole")
        one, two = worker.request("request-1"), worker.request("request-2")
        expect(hub, "whole", "request-1", "request-2")

        worker.begin(one, two)
        worker.write((one, [0, 1, 2]), (two, [0]))
        worker.write((two, [1, 2]), (one, [3]))
        worker.write((two, [3]))
        worker.finish(two, one)

        answer = result(hub, "whole", "request-1")
        assert result(hub, "whole", "request-2").payload is whole(host).captured[0]
        assert answer == CaptureResult(
            status="ok", payload=whole(host).captured[1], num_rows=4, num_bytes=4 * 3 * ROW_BYTES, key="whole"
        )
        assert_rows(whole(host).captured[0], 2, [0, 1, 2, 3])
        assert_rows(whole(host).captured[1], 1, [0, 1, 2, 3])
        assert answer.payload.token_ids.tolist() == [100, 101, 102, 103]


def test_a_streaming_consumer_gets_each_step_as_it_comes(folder: Path, sender: ResultSender) -> None:
    with hosting(folder, FLOW) as (hub, host):
        flow(host).behave = lambda name, detail: f"payload of {detail}" if name == "finish" else None
        worker = Worker(hub, sender, "flow")
        request = worker.request()
        expect(hub, "flow")

        worker.begin(request)
        worker.write((request, [0, 1]))
        worker.write((request, [2, 3]))
        worker.finish(request)

        assert result(hub, "flow").payload == "payload of request-1"
        assert flow(host).calls == [
            ("begin", "request-1"),
            ("write", [("request-1", [0, 1])]),
            ("write", [("request-1", [2, 3])]),
            ("finish", "request-1"),
        ]
    assert flow(host).names()[-1] == "close"


def test_samples_of_one_request_are_told_apart(folder: Path, sender: ResultSender) -> None:
    with hosting(folder, WHOLE) as (hub, _):
        worker = Worker(hub, sender, "whole")
        samples = [
            replace(
                worker.request(f"{index}_request-{index}", sample_index=index, num_samples=2),
                origin=Origin(hub.address, "key"),
            )
            for index in range(2)
        ]
        hub.expect("key", instances=["whole"], num_samples=2)

        worker.begin(*samples)
        worker.write((samples[1], [0, 1, 2, 3]), (samples[0], [0, 1, 2, 3]))
        worker.finish(*samples)

        results = hub.wait("key", TIMEOUT_S)
        for index, sample in enumerate(results.per_sample):
            assert_rows(sample["whole"].payload, index, [0, 1, 2, 3])
        assert results.merged["whole"].num_rows == 8


def test_what_a_consumer_raises_is_its_requests_error_and_nobody_elses(folder: Path, sender: ResultSender) -> None:
    def refuse_one(captured: CapturedRequest) -> str:
        if captured.request.request_id == "request-1":
            raise ValueError("no reward")
        return "fine"

    with hosting(folder, WHOLE) as (hub, host):
        whole(host).behave = refuse_one
        worker = Worker(hub, sender, "whole")
        requests = [worker.request("request-1"), worker.request("request-2")]
        expect(hub, "whole", "request-1", "request-2")

        worker.begin(*requests)
        worker.write(*((request, [0, 1, 2, 3]) for request in requests))
        worker.finish(*requests)

        refused, fine = result(hub, "whole", "request-1"), result(hub, "whole", "request-2")
        assert (refused.status, refused.payload) == ("error", None)
        assert "ValueError: no reward" in str(refused.error)
        assert (fine.status, fine.payload) == ("ok", "fine")


def test_a_slow_consumer_holds_up_its_worker_and_loses_nothing(folder: Path) -> None:
    sender, gate, num_steps = ResultSender(window_bytes=2000), Gate(), 200
    spec = CaptureConsumerSpec(name="flow", queue_bytes=1000, overload="drop")
    with hosting(folder, spec) as (hub, host):
        flow(host).behave = at_gate(gate, "write")
        worker = Worker(hub, sender, "flow")
        request = worker.request()
        expect(hub, "flow")
        worker.begin(request)
        written = threading.Semaphore(0)

        def write_all() -> None:
            for position in range(num_steps):
                worker.write((request, [position]))
                written.release()
            worker.finish(request, num_tokens=num_steps + 1)

        writing = threading.Thread(target=write_all)
        writing.start()
        gate.wait_reached()
        num_written = 0
        while written.acquire(timeout=0.5):
            num_written += 1
        gate.opened.set()
        writing.join(TIMEOUT_S)

        assert num_written < num_steps / 2
        assert result(hub, "flow") == CaptureResult(
            status="ok", num_rows=num_steps, num_bytes=num_steps * 3 * ROW_BYTES, key="flow"
        )
    assert sender.close(TIMEOUT_S) == 0


def test_a_hung_consumer_fails_its_requests_and_spares_the_other_consumer(folder: Path, sender: ResultSender) -> None:
    gate = Gate()
    with hosting(folder, CaptureConsumerSpec(name="flow", max_stall_s=0.05), WHOLE) as (hub, host):
        flow(host).behave = at_gate(gate, "write")
        hanging, fine = Worker(hub, sender, "flow"), Worker(hub, sender, "whole")
        request = hanging.request()
        hub.expect("key-request-1", instances=["flow", "whole"])

        for worker in (hanging, fine):
            worker.begin(request)
            worker.write((request, [0, 1, 2, 3]))
            worker.finish(request)
        results = hub.wait("key-request-1", TIMEOUT_S).merged
        gate.opened.set()

        assert results["flow"].status == "error"
        assert "took longer than 0.05 s" in str(results["flow"].error)
        assert results["whole"].status == "ok"

        again = hanging.request("request-2")
        while not flow(host).names().count("abandon"):  # the call has returned, and the failed request is abandoned
            assert hub.wait("key-request-1", 0)
        expect(hub, "flow", "request-2")
        hanging.begin(again)
        hanging.write((again, [0, 1, 2, 3]))
        hanging.finish(again)
        assert result(hub, "flow", "request-2").status == "ok"


def test_rows_lost_on_the_way_are_in_the_result(folder: Path, sender: ResultSender) -> None:
    with hosting(folder, WHOLE) as (hub, host):
        worker = Worker(hub, sender, "whole")
        request = worker.request()
        expect(hub, "whole")

        worker.begin(request)
        worker.write((request, [0, 1]))
        worker.finish(request, num_tokens=7, dropped_rows=3)

        answer = result(hub, "whole")
        assert (answer.status, answer.num_rows, answer.dropped_rows) == ("partial_error", 2, 3)
        assert "4 of 6 wanted positions are missing: 3 dropped (they did not reach the front end in time); 1 never" in (
            str(answer.error)
        )
        assert_rows(whole(host).captured[0], 1, [0, 1])


def test_a_consumer_of_another_party_may_want_other_positions_at_a_hook_point(
    folder: Path, sender: ResultSender
) -> None:
    own = Site(0, HookPoint.PRE_ATTN)
    with hosting(folder, WHOLE) as (hub, host):
        worker = Worker(hub, sender, "whole")
        requests = [worker.request(name) for name in ("request-1", "request-2")]
        spec = replace(requests[0].spec, sites=(own, *SITES), hook_positions={HookPoint.PRE_ATTN: Named("last_prompt")})
        requests = [replace(request, spec=spec) for request in requests]
        expect(hub, "whole", "request-1", "request-2")

        worker.begin(*requests)
        worker.write((requests[0], [0, 1, 2, 3]), (requests[1], [0, 1, 2, 3]))
        row = block([(consumer_request(), [3])], SITES[:1])
        worker.sink.write([replace(row, sites=(own,), spans=(replace(row.spans[0], request=requests[0]),))])
        worker.finish(requests[0])
        worker.finish(requests[1], dropped_rows=1)

        answer, lost = result(hub, "whole"), result(hub, "whole", "request-2")
        assert (answer.status, answer.num_rows, answer.num_bytes) == ("ok", 4, (4 * 3 + 1) * ROW_BYTES)
        captured = next(each for each in whole(host).captured if each.request.request_id == "request-1")
        assert_rows(captured, 1, [0, 1, 2, 3])
        assert captured.positions_at(own).tolist() == [3]
        assert captured.rows[own].tolist() == row.rows[0].tolist()
        assert (lost.status, lost.num_rows, lost.dropped_rows) == ("partial_error", 3, 1)
        assert "1 dropped (they did not reach the front end in time)" in str(lost.error)


def test_rows_that_the_workers_queue_dropped_are_in_the_result(folder: Path) -> None:
    sender, gate, num_steps = ResultSender(window_bytes=1), Gate(), 50
    with hosting(folder, CaptureConsumerSpec(name="flow", queue_bytes=1)) as (hub, host):
        flow(host).behave = at_gate(gate, "write")
        worker = Worker(hub, sender, "flow")
        request = ConsumerRequest(worker.request())
        expect(hub, "flow")
        with running(worker.sink, Reports(), overload="drop", queue_bytes=5 * 3 * ROW_BYTES) as queue:
            queue.begin(request)
            for position in range(num_steps):
                queue.offer(packet([(request, [position])]), may_wait=True)
            queue.finish(request, final_state(num_tokens=num_steps + 1))
            gate.opened.set()
            answer = result(hub, "flow")

        delivered = [p for name, detail in flow(host).calls if name == "write" for _, part in detail for p in part]
        assert answer.status == "partial_error"
        assert len(delivered) == answer.num_rows == num_steps - answer.dropped_rows
        assert 5 <= answer.num_rows < num_steps
    assert sender.close(TIMEOUT_S) == 0


def test_a_request_that_is_abandoned_by_its_worker_is_let_go_of_and_not_answered_twice(
    folder: Path, sender: ResultSender
) -> None:
    with hosting(folder, FLOW) as (hub, host):
        is_written = threading.Event()
        flow(host).behave = lambda name, detail: is_written.set() if name == "write" else None
        worker = Worker(hub, sender, "flow")
        request, other = worker.request(), worker.request("request-2")
        expect(hub, "flow", "request-1", "request-2")

        worker.begin(request, other)
        worker.write((request, [0]), (other, [0, 1, 2, 3]))
        assert is_written.wait(TIMEOUT_S)
        worker.sink.abandon(request)
        worker.finish(other)
        assert result(hub, "flow", "request-2").status == "ok"
        sender.send_result(
            hub.address,
            Result(
                key="key-request-1",
                req_id="request-1",
                instance="flow",
                result=CaptureResult(status="error", error="the worker knows why"),
            ),
        )

        assert result(hub, "flow").error == "the worker knows why"
        assert ("abandon", "request-1") in flow(host).calls
        assert hub.stats().unknown == 0


def test_an_id_that_is_used_again_after_it_was_abandoned_is_a_new_request(folder: Path, sender: ResultSender) -> None:
    with hosting(folder, WHOLE) as (hub, host):
        worker = Worker(hub, sender, "whole")
        request = worker.request()
        expect(hub, "whole")

        worker.begin(request)
        worker.write((request, [0, 1]))
        worker.sink.abandon(request)
        worker.begin(request)
        worker.write((request, [0, 1, 2, 3]))
        worker.finish(request)

        assert result(hub, "whole").status == "ok"
        assert_rows(whole(host).captured[0], 1, [0, 1, 2, 3])


def test_a_request_that_nobody_waits_for_any_more_is_delivered_all_the_same(folder: Path, sender: ResultSender) -> None:
    with hosting(folder, WHOLE) as (hub, host):
        worker, done = Worker(hub, sender, "whole"), threading.Event()
        whole(host).behave = lambda captured: done.set()
        request = worker.request()
        expect(hub, "whole")

        assert result(hub, "whole", timeout_s=0).status == "pending"
        hub.close("key-request-1")
        worker.begin(request)
        worker.write((request, [0, 1, 2, 3]))
        worker.finish(request)

        assert done.wait(TIMEOUT_S)
        assert_rows(whole(host).captured[0], 1, [0, 1, 2, 3])


def test_forged_and_malformed_messages_change_nothing(folder: Path, sender: ResultSender) -> None:
    with hosting(folder, WHOLE) as (hub, host):
        worker = Worker(hub, sender, "whole")
        request = worker.request()
        forged = replace(request, origin=Origin(hub.address, "guess"))
        expect(hub, "whole")
        worker.begin(request)

        worker.begin(forged)
        worker.write((forged, [0, 1]))
        worker.finish(forged)
        worker.sink.abandon(forged)
        worker.begin(request)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(rows_address(hub.address, "whole"))
        for number, frames in enumerate(([b""], [b"\x80\x04pickle"], [b"\xff", b"x" * 100])):
            socket.send_multipart([numbering(b"a" * 8, number), *frames])
            socket.recv()
        context.destroy(linger=0)
        worker.write((request, [0, 1, 2, 3]))
        worker.finish(request)

        assert result(hub, "whole").status == "ok"
        assert_rows(whole(host).captured[0], 1, [0, 1, 2, 3])
        assert host.stats().unknown == 3
        assert host.stats().malformed == 4
