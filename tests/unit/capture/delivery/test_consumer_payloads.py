"""What a consumer returns becomes the payload: at once, later, or elsewhere."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from headgate.capture.delivery.consumer_queue import DEFERRED, UnfinishedWork
from tests.fakes.pipeline import (
    Recorder,
    Reports,
    close_consumer,
    consumer_request,
    final_state,
    open_consumer,
    running,
    send,
)


def test_payloads_may_come_later_from_another_thread() -> None:
    later: Future[str] = Future()
    reports, first, second = Reports(), consumer_request("request-1"), consumer_request("request-2")

    def behave(name: str, detail: Any) -> Any:
        return later if (name, detail) == ("finish", "request-1") else None

    with running(Recorder(behave), reports) as queue:
        for request in (first, second):
            queue.begin(request)
            send(queue, request, [0, 1, 2, 3])
            queue.finish(request, final_state())
        assert set(reports.wait(1)) == {"request-2"}
        later.set_result("written")
        results = reports.wait(2)

    assert (results["request-1"].status, results["request-1"].payload) == ("ok", "written")


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["failed", "cancelled"])
def test_a_payload_that_fails_later_is_the_requests_error(is_cancelled: bool) -> None:
    later: Future[str] = Future()
    reports, request = Reports(), consumer_request()

    with running(Recorder(lambda name, _detail: later if name == "finish" else None), reports) as queue:
        queue.begin(request)
        queue.finish(request, final_state())
        _ = later.cancel() if is_cancelled else later.set_exception(OSError("disk"))
        result = reports.wait()["request-1"]

    assert result.status == "error"
    assert result.error == ("c: CancelledError: " if is_cancelled else "c: OSError: disk")


def test_a_payload_that_never_comes_is_an_error_once_the_consumer_is_closed() -> None:
    reports, request = Reports(), consumer_request()
    consumer = open_consumer(Recorder(lambda name, _detail: Future() if name == "finish" else None), reports)
    queue = consumer.queue

    queue.begin(request)
    queue.finish(request, final_state())
    left = close_consumer(consumer)

    assert left == UnfinishedWork(unfinished=1)
    assert reports.wait()["request-1"].status == "error"


def test_a_sender_that_fails_costs_one_result_and_is_counted() -> None:
    reports = Reports()

    def send_or_fail(request: Any, result: Any) -> None:
        if request.request_id == "request-1":
            raise OSError("gone")
        reports(request, result)

    with running(Recorder(), send_or_fail) as queue:  # type: ignore[arg-type]
        for number in (1, 2):
            request = consumer_request(f"request-{number}")
            queue.begin(request)
            queue.finish(request, final_state())
        assert set(reports.wait()) == {"request-2"}

    assert queue.stats().lost_reports == 1


def test_a_result_that_comes_from_elsewhere_is_not_reported_here() -> None:
    reports, remote, local = Reports(), consumer_request("request-1"), consumer_request("request-2")
    sink = Recorder(lambda name, detail: DEFERRED if (name, detail) == ("finish", "request-1") else None)

    with running(sink, reports) as queue:
        for request in (remote, local):
            queue.begin(request)
            queue.finish(request, final_state())
        results = reports.wait()

    assert set(results) == {"request-2"}
