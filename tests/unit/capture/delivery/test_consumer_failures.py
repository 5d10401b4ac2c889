"""A consumer that raises, hangs or is shut down: what it costs, and whom."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.delivery import completeness, consumer_queue
from headgate.capture.delivery.consumer_queue import ConsumerQueue, UnfinishedWork
from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.schema.config import CaptureConsumerSpec
from tests.fakes.pipeline import (
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

PACKET_BYTES = packet([(consumer_request(), [0])]).num_bytes
"""One row of one request."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The queues' clock, turned by the test: ``clock.now``. It starts as the real one, by which waits of tests end."""
    clock = SimpleNamespace(now=time.monotonic())
    clock.monotonic = lambda: clock.now
    for module in (consumer_queue, completeness):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_request_with_an_unknown_end_is_an_error_and_abandoned() -> None:
    sink, reports, request = Recorder(), Reports(), consumer_request()

    with running(sink, reports) as queue:
        queue.begin(request)
        queue.finish(request, None)

    assert sink.names() == ["begin", "abandon", "close"]
    assert reports.wait()["request-1"].status == "error"
    assert "but not its tokens and why it stopped" in str(reports.wait()["request-1"].error)


@pytest.mark.parametrize("error", [ValueError("bad row"), SystemExit(3)], ids=["exception", "exit"])
@pytest.mark.parametrize("at", ["begin", "write", "finish"])
def test_a_raising_consumer_costs_its_request_and_nobody_else(at: str, error: BaseException) -> None:
    def behave(name: str, detail: Any) -> None:
        if name == at and "request-1" in str(detail):
            raise error

    sink, reports = Recorder(behave), Reports()
    bad, good = consumer_request("request-1"), consumer_request("request-2")

    with running(sink, reports) as queue:
        for request in (bad, good):
            queue.begin(request)
            send(queue, request, [0, 1, 2, 3])
        send(queue, bad, [4])
        for request in (bad, good):
            queue.finish(request, final_state())
        results = reports.wait(2)

    assert results["request-1"].status == "error"
    assert results["request-1"].error == f"c: {type(error).__name__}: {error}"
    assert results["request-2"].status == "ok"
    assert ("write", [("request-1", [4])]) not in sink.calls or at == "finish"
    assert ("abandon", "request-1") in sink.calls or at == "finish"
    assert queue.stats().errors == 1


def test_a_failing_write_fails_every_request_in_it_and_spares_later_rows_of_others() -> None:
    def behave(name: str, detail: Any) -> None:
        if name == "write" and len(detail) == 2 and detail[0][1] == [0]:
            raise ValueError("no")

    sink, reports = Recorder(behave), Reports()
    first, second, third = (consumer_request(f"request-{number}") for number in (1, 2, 3))

    with running(sink, reports) as queue:
        for request in (first, second, third):
            queue.begin(request)
        queue.offer(packet([(first, [0]), (second, [0])]), may_wait=True)
        queue.offer(packet([(first, [1]), (third, [0, 1, 2, 3]), (second, [1])]), may_wait=True)
        for request in (first, second, third):
            queue.finish(request, final_state())
        results = reports.wait(3)

    assert [results[f"request-{number}"].status for number in (1, 2, 3)] == ["error", "error", "ok"]
    assert sink.calls[-3] == ("write", [("request-3", [0, 1, 2, 3])])
    (block,) = sink.blocks
    assert block.rows[0, :, 0].tolist() == [3, 3, 3, 3]


def test_a_consumer_that_fails_to_let_go_fails_nothing_else() -> None:
    def behave(name: str, _detail: Any) -> None:
        if name in ("begin", "abandon", "close"):
            raise ValueError(name)

    reports, request = Reports(), consumer_request()
    consumer = open_consumer(Recorder(behave), reports)
    queue = consumer.queue

    queue.begin(request)
    queue.finish(request, final_state())
    left = close_consumer(consumer)

    assert reports.wait()["request-1"].error == "c: ValueError: begin"
    assert left == UnfinishedWork(close_error="c: ValueError: close")


def test_a_call_that_takes_too_long_ends_finished_requests_with_an_error_though_nothing_else_comes(
    clock: SimpleNamespace,
) -> None:
    gate, reports, request = Gate(), Reports(), consumer_request()
    sink = Recorder(at_gate(gate, "finish"))

    with running(sink, reports, max_stall_s=5) as queue:
        queue.begin(request)
        queue.finish(request, final_state())
        gate.wait_reached()
        assert queue.due_at() == clock.now + 5
        clock.now += 5
        queue.fail_hung()
        assert queue.due_at() == clock.now + 5  # the next call may take too long, too
        result = reports.wait()["request-1"]
        assert queue.stats().is_hung
        gate.opened.set()

    assert (result.status, result.error) == ("error", "c: hung: one call took longer than 5 s")
    assert (queue.stats().hangs, queue.stats().is_hung) == (1, False)


def test_a_hung_consumer_recovers_for_new_requests_and_lets_go_of_the_old_ones(clock: SimpleNamespace) -> None:
    gate, reports = Gate(), Reports()
    sink = Recorder(
        lambda name, detail: gate.pass_through() if name == "write" and "request-1" in str(detail) else None
    )
    stuck, begun, late, fresh = (consumer_request(f"request-{number}") for number in range(1, 5))

    with running(sink, reports, max_stall_s=5) as queue:
        queue.begin(begun)
        queue.begin(stuck)
        send(queue, stuck, [0, 1])
        gate.wait_reached()
        send(queue, begun, [0, 1])
        clock.now += 5
        queue.fail_hung()
        queue.begin(late)
        for request in (stuck, begun, late):
            send(queue, request, [2, 3])
            queue.finish(request, final_state())
        failed = reports.wait(3)
        gate.opened.set()
        with queue._changed:
            assert queue._changed.wait_for(lambda: not queue.calls.is_hung, TIMEOUT_S)
        queue.begin(fresh)
        send(queue, fresh, [0, 1, 2, 3])
        queue.finish(fresh, final_state())
        result = reports.wait(4)["request-4"]

    assert {each.status for each in failed.values()} == {"error"}
    assert "was hung or shut down when the request began" in str(failed["request-3"].error)
    assert result.status == "ok"
    assert sorted(detail for name, detail in sink.calls if name == "abandon") == ["request-1", "request-2"]
    assert queue.stats().dropped_rows == 2 + 3 * 2


def test_holding_up_the_engine_for_too_long_counts_as_hung() -> None:
    gate, reports, request = Gate(), Reports(), consumer_request()

    with running(Recorder(at_gate(gate, "write")), reports, queue_bytes=PACKET_BYTES, max_stall_s=0.05) as queue:
        queue.begin(request)
        send(queue, request, [0])
        gate.wait_reached()
        assert send(queue, request, [1])
        queue.finish(request, final_state())
        result = reports.wait()["request-1"]
        gate.opened.set()

    assert (result.status, result.error) == ("error", "c: hung: held up the engine for longer than 0.05 s")
    assert (queue.stats().hangs, queue.stats().stalls, queue.stats().dropped_rows) == (1, 1, 1)
    assert queue.stats().stall_s >= 0.01


def test_what_a_hung_call_returns_in_the_end_is_not_reported_again(clock: SimpleNamespace) -> None:
    gate, reports, request = Gate(), Reports(), consumer_request()
    later: Future[str] = Future()

    def behave(name: str, _detail: Any) -> Any:
        if name == "finish":
            gate.pass_through()
            return later
        return None

    with running(Recorder(behave), reports, max_stall_s=5) as queue:
        queue.begin(request)
        queue.finish(request, final_state())
        gate.wait_reached()
        clock.now += 5
        queue.fail_hung()
        gate.opened.set()
        later.set_result("late")

    assert reports.wait()["request-1"].status == "error"


def test_payloads_that_are_under_way_elsewhere_survive_a_hang(clock: SimpleNamespace) -> None:
    gate, reports, later = Gate(), Reports(), Future[str]()
    slow, stuck = consumer_request("request-1"), consumer_request("request-2")

    def behave(name: str, detail: Any) -> Any:
        if (name, detail) == ("begin", "request-2"):
            gate.pass_through()
        return later if name == "finish" else None

    with running(Recorder(behave), reports, max_stall_s=5) as queue:
        queue.begin(slow)
        send(queue, slow, [0, 1, 2, 3])
        queue.finish(slow, final_state())
        queue.begin(stuck)
        gate.wait_reached()
        clock.now += 5
        queue.fail_hung()
        later.set_result("done")
        assert reports.wait()["request-1"].payload == "done"
        gate.opened.set()
        queue.finish(stuck, final_state())

    assert reports.wait(2)["request-2"].status == "error"


def test_what_a_consumer_has_to_let_go_of_survives_a_hang(clock: SimpleNamespace) -> None:
    gate, reports = Gate(), Reports()
    sink = Recorder(lambda name, detail: gate.pass_through() if (name, detail) == ("begin", "request-2") else None)
    wrong, stuck = consumer_request("request-1"), consumer_request("request-2")

    with running(sink, reports, max_stall_s=5) as queue:
        queue.begin(wrong)
        queue.begin(stuck)
        gate.wait_reached()
        queue.finish(wrong, final_state(), mismatch="its rows are another's")
        clock.now += 5
        queue.fail_hung()
        gate.opened.set()
        queue.finish(stuck, final_state())
        results = reports.wait(2)

    assert results["request-1"].error == "c: its rows are another's"
    assert sorted(detail for name, detail in sink.calls if name == "abandon") == ["request-1", "request-2"]


def test_a_bug_of_ours_fails_its_request_and_the_thread_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, reports = Recorder(), Reports()
    first, second = consumer_request("request-1"), consumer_request("request-2")
    monkeypatch.setattr(first.audit, "close", lambda _final: 1 / 0)

    with running(sink, reports) as queue:
        for request in (first, second):
            queue.begin(request)
            send(queue, request, [0, 1, 2, 3])
            queue.finish(request, final_state())
        results = reports.wait(2)

    assert results["request-1"].error == "c: internal error: ZeroDivisionError('division by zero')"
    assert results["request-2"].status == "ok"
    assert ("abandon", "request-1") in sink.calls


def test_rows_that_came_twice_are_not_given_to_the_consumer_as_a_whole() -> None:
    sink, reports, request = Recorder(), Reports(), consumer_request()

    with running(sink, reports) as queue:
        queue.begin(request)
        for positions in ([0, 1, 2, 3], [3]):
            send(queue, request, positions)
        queue.finish(request, final_state())

    assert "rows were delivered twice or unasked for" in str(reports.wait()["request-1"].error)
    assert sink.names() == ["begin", "write", "write", "abandon", "close"]


def test_an_item_is_watched_before_the_call_that_it_leads_to(clock: SimpleNamespace) -> None:
    settings = CaptureConsumerSpec(name="c", max_stall_s=5)
    queue = ConsumerQueue(settings, Reports(), log=SparseLog("test"), accepts_empty=True)
    queue.begin(consumer_request())

    item = queue.next_item()

    assert item is not None
    assert queue.due_at() == clock.now + 5


def test_nothing_is_watched_while_nothing_is_under_way(clock: SimpleNamespace) -> None:
    with running(Recorder(), Reports(), max_stall_s=5) as queue:
        assert queue.due_at() is None


def test_closing_delivers_what_is_queued_and_tells_requests_that_never_ended() -> None:
    sink, reports = Recorder(), Reports()
    ended, running_on = consumer_request("request-1"), consumer_request("request-2")
    consumer = open_consumer(sink, reports)
    queue = consumer.queue

    for request in (ended, running_on):
        queue.begin(request)
        send(queue, request, [0, 1, 2, 3])
    queue.finish(ended, final_state())
    left = close_consumer(consumer)

    assert left == UnfinishedWork(unfinished=1)
    results = reports.wait(2)
    assert results["request-1"].status == "ok"
    assert "shut down before the request had ended" in str(results["request-2"].error)
    assert sink.names()[-1] == "close"


def test_closing_gives_up_a_consumer_that_hangs_and_its_thread_ends_with_the_call() -> None:
    gate, reports = Gate(), Reports()
    sink = Recorder(at_gate(gate, "write"))
    requests = [consumer_request(f"request-{number}") for number in (1, 2)]
    consumer = open_consumer(sink, reports)
    queue = consumer.queue

    for request in requests:
        queue.begin(request)
        send(queue, request, [0, 1, 2, 3])
        queue.finish(request, final_state())
    gate.wait_reached()
    left = close_consumer(consumer, 0)

    assert left == UnfinishedWork(unfinished=2, is_stuck=True)
    assert {result.status for result in reports.wait(2).values()} == {"error"}
    assert queue.stats().dropped_rows == 4
    gate.opened.set()
    consumer._thread.join(TIMEOUT_S)
    assert not consumer._thread.is_alive()
    assert sink.names() == ["begin", "write", "close"]


def test_a_dispatch_thread_that_waits_for_room_is_let_go_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reports, request = Gate(), Reports(), consumer_request()
    consumer = open_consumer(Recorder(at_gate(gate, "write")), reports, queue_bytes=PACKET_BYTES)
    queue = consumer.queue
    queue.begin(request)
    send(queue, request, [0])
    gate.wait_reached()
    waits = when_it_waits(queue._changed, monkeypatch)
    thread = threading.Thread(target=lambda: send(queue, request, [1, 2]))
    thread.start()
    assert waits.wait(TIMEOUT_S)

    queue.stop_blocking()

    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert queue.stats().dropped_rows == 2
    gate.opened.set()
    assert close_consumer(consumer) == UnfinishedWork(unfinished=1)
