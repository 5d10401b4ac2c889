"""Under pipeline parallelism a consumer in the front end sees one request with the sites of all stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headgate.capture.links.messages import Result
from headgate.capture.links.sender import ResultSender
from headgate.capture.schema.consumer import RequestInfo
from headgate.capture.schema.results import CaptureResult
from tests.fakes.driver_consumers import FLOW, WHOLE, Worker, assert_rows, expect, flow, hosting, result, whole
from tests.fakes.pipeline import ROW_BYTES, SITES, TIMEOUT_S

pytestmark = pytest.mark.usefixtures("driver_consumers")

POSITIONS = [0, 1, 2, 3]


def stages(hub: object, sender: ResultSender, instance: str, count: int = 2) -> list[Worker]:
    return [Worker(hub, sender, instance, stage=stage, num_stages=count) for stage in range(count)]


def test_a_whole_request_has_the_sites_of_all_stages_however_they_are_interleaved(
    folder: Path, sender: ResultSender
) -> None:
    with hosting(folder, WHOLE) as (hub, host):
        first, second = stages(hub, sender, "whole")
        one, two = [[stage.request(name) for stage in (first, second)] for name in ("request-1", "request-2")]
        expect(hub, "whole", "request-1", "request-2", num_stages=2)

        first.begin(one[0], two[0])
        first.write((one[0], [0, 1]), (two[0], POSITIONS))
        second.begin(two[1], one[1])
        second.write((one[1], [0]))
        first.write((one[0], [2, 3]))
        first.finish(two[0])
        second.write((two[1], POSITIONS), (one[1], [1, 2, 3]))
        second.finish(one[1], two[1])
        first.finish(one[0])

        for number, name in ((1, "request-1"), (2, "request-2")):
            answer = result(hub, "whole", name)
            assert (answer.status, answer.num_rows, answer.num_bytes) == ("ok", 4, 4 * 3 * ROW_BYTES)
            assert answer.payload.sites == SITES
            assert_rows(answer.payload, number, POSITIONS)
        assert len(whole(host).captured) == 2


def test_a_streaming_consumer_gets_a_position_when_all_stages_have_sent_it(folder: Path, sender: ResultSender) -> None:
    with hosting(folder, FLOW) as (hub, host):
        first, second = stages(hub, sender, "flow")
        requests = [stage.request() for stage in (first, second)]
        expect(hub, "flow", num_stages=2)

        for stage, request in zip((first, second), requests, strict=True):
            stage.begin(request)
        first.write((requests[0], [0, 1, 2]))
        second.write((requests[1], [0, 1]))
        second.write((requests[1], [2, 3]))
        first.write((requests[0], [3]))
        for stage, request in zip((first, second), requests, strict=True):
            stage.finish(request)

        assert result(hub, "flow").status == "ok"
        writes = [detail for name, detail in flow(host).calls if name == "write"]
        assert [sorted({position for _, part in write for position in part}) for write in writes] == [[0, 1], [2], [3]]
        by_site = {
            site: torch.cat([block.rows[block.sites.index(site)] for block in flow(host).blocks if site in block.sites])
            for site in SITES
        }
        assert {site: rows[:, 1].tolist() for site, rows in by_site.items()} == dict.fromkeys(SITES, POSITIONS)
        assert [rows[0, 2].item() for rows in by_site.values()] == [0, 1, 2]
        known: set[int] = {id(span.request) for block in flow(host).blocks for span in block.spans}
        assert len(known) == 1


def test_a_position_that_one_stage_lost_is_missing_everywhere_and_counted_once(
    folder: Path, sender: ResultSender
) -> None:
    with hosting(folder, WHOLE) as (hub, host):
        first, second = stages(hub, sender, "whole")
        requests = [stage.request() for stage in (first, second)]
        expect(hub, "whole", num_stages=2)

        first.begin(requests[0])
        second.begin(requests[1])
        first.write((requests[0], [0, 2, 3]))
        second.write((requests[1], [0, 1, 3]))
        first.finish(requests[0], dropped_rows=1)
        second.finish(requests[1], dropped_rows=1)

        answer = result(hub, "whole")
        assert (answer.status, answer.num_rows, answer.dropped_rows) == ("partial_error", 2, 2)
        assert_rows(whole(host).captured[0], 1, [0, 3])


def test_a_stage_without_sites_of_the_request_is_heard_and_not_waited_for(folder: Path, sender: ResultSender) -> None:
    with hosting(folder, FLOW) as (hub, host):
        workers = stages(hub, sender, "flow", count=4)
        requests: list[RequestInfo] = [worker.request() for worker in workers]
        assert requests[3].spec.sites == ()
        expect(hub, "flow", num_stages=4)

        for worker, request in zip(workers, requests, strict=True):
            worker.begin(request)
        for worker, request in zip(workers[:3], requests, strict=False):
            worker.write((request, POSITIONS))
        for worker, request in zip(workers, requests, strict=True):
            worker.finish(request)

        assert result(hub, "flow").status == "ok"
        assert flow(host).names() == ["begin", "write", "finish"]


def test_one_stage_that_fails_ends_the_request_with_its_error(folder: Path, sender: ResultSender) -> None:
    with hosting(folder, WHOLE) as (hub, host):
        first, second = stages(hub, sender, "whole")
        requests = [stage.request() for stage in (first, second)]
        expect(hub, "whole", num_stages=2)

        first.begin(requests[0])
        second.begin(requests[1])
        second.sink.abandon(requests[1])
        sender.send_result(
            hub.address,
            Result(
                key="key-request-1",
                req_id="request-1",
                instance="whole",
                stage=1,
                num_stages=2,
                result=CaptureResult(status="error", error="stage 1 hung"),
            ),
        )
        assert result(hub, "whole").error == "stage 1 hung"
        first.write((requests[0], POSITIONS))
        first.finish(requests[0])

        again = [stage.request("request-2") for stage in (first, second)]
        expect(hub, "whole", "request-2", num_stages=2)
        for stage, request in zip((first, second), again, strict=True):
            stage.begin(request)
            stage.write((request, POSITIONS))
            stage.finish(request)
        assert result(hub, "whole", "request-2").status == "ok"
        assert [captured.request.request_id for captured in whole(host).captured] == ["request-2"]
        assert hub.wait("key-request-1", TIMEOUT_S).merged["whole"].error == "stage 1 hung"
