"""From the step of a worker to a consumer in the front end and back to the request: every part is the real one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headgate.capture.links.hub import ResultHub
from headgate.capture.links.sender import ResultSender, RowSender
from headgate.capture.schema.consumer import ConsumerContext
from headgate.capture.schema.registry import OpenConsumer
from headgate.capture.schema.sites import Site
from tests.fakes.capture_world import World, local_session, make_staging, want
from tests.fakes.driver_consumers import WHOLE, assert_rows, config, expect, hosting, result, whole
from tests.fakes.pipeline import MODEL, ROW_BYTES, SITES, TIMEOUT_S, final_state, row_values
from tests.fakes.readouts import Declared, Multiples

pytestmark = pytest.mark.usefixtures("driver_consumers")


@contextmanager
def working(
    sites: tuple[Site, ...] = SITES, *, stage: int = 0, num_stages: int = 1, declared: Sequence[Declared] = ()
) -> Iterator[World]:
    """A worker whose only consumer is ``whole``, in the front end."""
    sender, staging = ResultSender(), make_staging(sites, declared=declared)
    context = ConsumerContext(instance_name="whole", model=MODEL, pp_rank=stage, pp_size=num_stages)
    session = local_session(
        config=config(WHOLE),
        sites=sites,
        consumers=[OpenConsumer(0, WHOLE, RowSender(WHOLE, context, sender))],
        staging=staging,
        sender=sender,
        close_sender=sender.close,
        pp_rank=stage,
        pp_size=num_stages,
        declared=declared,
    )
    yield World(session, staging, sender)  # type: ignore[arg-type]
    assert session.close(TIMEOUT_S).is_clean


def add(worker: World, hub: ResultHub, number: int) -> str:
    req_id = f"request-{number}"
    worker.add(req_id, {"whole": want()}, number=number, reply=hub.address)
    return req_id


def test_rows_of_concurrent_requests_come_back_as_results(folder: Path) -> None:
    with hosting(folder, WHOLE) as (hub, host), working() as worker:
        expect(hub, "whole", "request-1", "request-2")
        one, two = add(worker, hub, 1), add(worker, hub, 2)

        worker.step(**{one: (0, 3)})
        worker.step(**{two: (0, 4), one: (3, 4)})
        worker.step(**{one: (4, 5), two: (4, 5)})
        worker.session.request_finished(one, final_state(num_tokens=6))
        worker.step(**{two: (5, 6)})
        worker.session.request_finished(two, final_state(num_tokens=6))

        for number, req_id in ((1, one), (2, two)):
            answer = result(hub, "whole", req_id)
            assert (answer.status, answer.error) == ("ok", None)
            assert (answer.num_rows, answer.num_bytes) == (5, 5 * len(SITES) * ROW_BYTES)
            assert_rows(answer.payload, number, [0, 1, 2, 3, 4])
        assert len(whole(host).captured) == 2


def test_outputs_of_readouts_of_two_stages_come_in_place_of_rows(folder: Path) -> None:
    """The first stage has two of the sites and reads one of them out, the second one reads out its only one."""
    stages = [(SITES[:2], [(0, SITES[1], Multiples(3))]), (SITES[2:], [(0, SITES[2], Multiples(1, 2.0))])]
    with hosting(folder, WHOLE) as (hub, host), ExitStack() as stack:
        expect(hub, "whole", "request-1", num_stages=2)
        workers = [
            stack.enter_context(working(sites, stage=stage, num_stages=2, declared=declared))
            for stage, (sites, declared) in enumerate(stages)
        ]
        for worker in workers:
            req_id = add(worker, hub, 1)
            worker.step(**{req_id: (0, 4)})
            worker.step(**{req_id: (4, 5)})
            worker.session.request_finished(req_id, final_state(num_tokens=6))

        answer = result(hub, "whole", "request-1")

        assert (answer.status, answer.num_rows, answer.num_bytes) == ("ok", 5, 5 * (ROW_BYTES + 4 * 3 + 4 * 1))
        (captured,) = whole(host).captured
        first, second = row_values(1, np.arange(5), 0), row_values(1, np.arange(5), 1)
        assert torch.equal(captured.rows[SITES[0]], first)
        assert torch.equal(captured.rows[SITES[1]], Multiples(3).expected(second))
        assert torch.equal(captured.rows[SITES[2]], Multiples(1, 2.0).expected(first))
        assert set(captured.request.readouts) == set(SITES[1:])


def test_a_request_without_a_reported_end_is_an_error_and_forgotten(folder: Path) -> None:
    with hosting(folder, WHOLE) as (hub, host), working() as worker:
        expect(hub, "whole", "request-1", "request-2")
        lost, fine = add(worker, hub, 1), add(worker, hub, 2)

        worker.step(**{lost: (0, 4), fine: (0, 4)})
        worker.session.request_finished(lost, None)
        worker.session.request_finished(fine, final_state())

        assert result(hub, "whole", fine).status == "ok"
        answer = result(hub, "whole", lost)
        assert answer.status == "error"
        assert "but not its tokens and why it stopped" in str(answer.error)
        assert [captured.request.request_id for captured in whole(host).captured] == [fine]


def test_two_stages_make_one_request(folder: Path) -> None:
    with (
        hosting(folder, WHOLE) as (hub, host),
        working(SITES[:2], num_stages=2) as first,
        working(SITES[2:], stage=1, num_stages=2) as second,
    ):
        expect(hub, "whole", num_stages=2)
        for worker in (first, second):
            req_id = add(worker, hub, 1)
            worker.step(**{req_id: (0, 4)})
            worker.session.request_finished(req_id, final_state())

        answer = result(hub, "whole")
        assert (answer.status, answer.num_rows) == ("ok", 4)
        (captured,) = whole(host).captured
        assert captured.sites == SITES
        # The worlds number their own sites from 0.
        rows = {site: captured.rows[site].clone() for site in SITES}
        rows[SITES[2]][:, 2] = 2
        assert_rows(replace(captured, rows=rows), 1, [0, 1, 2, 3])
