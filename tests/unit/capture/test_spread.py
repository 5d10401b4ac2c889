"""Consumers in several capture processes and on threads of the worker get the same rows; a process dies alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from headgate.capture.capture_process import ConsumerPlacement, deal_out
from headgate.capture.links.hub import ResultHub
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec, parse_config
from headgate.capture.schema.errors import ConfigError
from tests.fakes.capture_world import World, want
from tests.fakes.pipeline import TIMEOUT_S, final_state
from tests.unit.capture.test_capture_process import (
    consumers,  # noqa: F401  (a fixture for each test)
    open_configured,
    site_rows,
)

NAMES = ("one", "two", "here")


def config(processes: int = 2, **params: Any) -> CaptureConsumersConfig:
    """Two consumers beside the worker, and a third in its own process."""
    specs = [
        CaptureConsumerSpec(
            name="telling", instance_name=name, location="engine" if name == "here" else None, params=dict(params)
        )
        for name in NAMES
    ]
    return CaptureConsumersConfig(consumers=tuple(specs), processes=processes, linger_s=0)


@contextmanager
def opened(folder: Path) -> Iterator[tuple[World, ResultHub]]:
    hub = ResultHub(folder=str(folder))
    session, staging = open_configured(config())
    try:
        yield World(session, staging, sender=None), hub  # type: ignore[arg-type]
    finally:
        session.close(TIMEOUT_S)
        hub.shutdown(TIMEOUT_S)


def begin(it: World, hub: ResultHub, req_id: str, names: tuple[str, ...] = NAMES, number: int = 1) -> None:
    hub.expect(f"key-{req_id}", instances=list(names))
    it.add(req_id, {name: want() for name in names}, number=number, reply=hub.address)


def finish(it: World, hub: ResultHub, req_id: str) -> dict[str, Any]:
    it.session.request_finished(req_id, final_state(num_tokens=5))
    return dict(hub.wait(f"key-{req_id}", TIMEOUT_S).merged)


def serve(it: World, hub: ResultHub, req_id: str, names: tuple[str, ...] = NAMES, number: int = 1) -> dict[str, Any]:
    begin(it, hub, req_id, names, number)
    it.step(**{req_id: (0, 4)})
    return finish(it, hub, req_id)


def sums(number: int) -> list[float]:
    return [float(rows.double().sum()) for rows in site_rows(number)]


def test_each_consumer_gets_every_row_where_it_runs(tmp_path: Path) -> None:
    with opened(tmp_path) as (it, hub):
        all_three = serve(it, hub, "a", number=1)
        one = serve(it, hub, "b", ("one",), number=2)
        others = serve(it, hub, "c", ("two", "here"), number=3)
        staged, stats = it.session.stats().staged_bytes, it.session.stats()

        report = it.session.close(TIMEOUT_S)

    for number, results in ((1, all_three), (2, one), (3, others)):
        assert [(each.status, each.payload["sums"]) for each in results.values()] == [("ok", sums(number))] * len(
            results
        )
    pids = {name: all_three[name].payload["pid"] for name in NAMES}
    assert len(set(pids.values())) == 3
    assert pids["here"] == os.getpid()
    assert one["one"].payload["pid"] == pids["one"]
    assert [(each.instance, each.rows, each.requests) for each in stats.consumers] == [
        ("one", 8, 2),
        ("two", 8, 2),
        ("here", 8, 2),
    ]
    assert (staged, report.is_clean, set(report.consumers)) == (0, True, set(NAMES))
    assert not any(psutil.pid_exists(pids[name]) for name in ("one", "two"))


def test_a_process_that_is_killed_fails_its_own_consumers_requests_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as (it, hub):
        first = serve(it, hub, "first")
        begin(it, hub, "running", number=2)
        it.step(running=(0, 2))
        psutil.Process(first["one"].payload["pid"]).kill()
        it.step(running=(2, 4))
        running = finish(it, hub, "running")

        assert it.session._delivery._readers[0].delivery._serving.wait(TIMEOUT_S)
        begin(it, hub, "old", ("one", "two"), number=3)
        it.step(old=(0, 4))
        old = finish(it, hub, "old")
        stats = it.session.stats()

    assert {name: each.status for name, each in running.items()} == {"one": "error", "two": "ok", "here": "ok"}
    assert "was ended by SIGKILL" in running["one"].error
    assert [running[name].payload["sums"] for name in ("two", "here")] == [sums(2)] * 2
    assert {name: (each.status, each.payload["sums"]) for name, each in old.items()} == {
        "one": ("ok", sums(3)),
        "two": ("ok", sums(3)),
    }
    assert old["one"].payload["pid"] != first["one"].payload["pid"]
    assert old["two"].payload["pid"] == first["two"].payload["pid"]
    assert (stats.restarts, stats.dispatch_errors, stats.staged_bytes) == (1, 0, 0)


@pytest.mark.extended
def test_a_consumer_that_cannot_be_opened_closes_those_that_were(tmp_path: Path) -> None:
    failing = CaptureConsumerSpec(name="telling", instance_name="two", params={"fail": True})
    fine = CaptureConsumerSpec(name="telling", instance_name="one")
    children = set(psutil.Process().children())

    with pytest.raises(ConfigError, match="consumer 'two' cannot be opened: no disk"):
        open_configured(CaptureConsumersConfig(consumers=(fine, failing), processes=2))

    assert set(psutil.Process().children()) == children


@pytest.mark.parametrize(
    ("processes", "served", "num_readers"),
    [
        (0, ConsumerPlacement((), frozenset({0, 1, 2})), 0),
        (1, ConsumerPlacement((frozenset({0, 1}),), frozenset({2})), 2),
        (2, ConsumerPlacement((frozenset({0}), frozenset({1})), frozenset({2})), 3),
        (9, ConsumerPlacement((frozenset({0}), frozenset({1})), frozenset({2})), 3),
    ],
)
def test_consumers_are_dealt_out_in_order(processes: int, served: ConsumerPlacement, num_readers: int) -> None:
    dealt = deal_out(config(processes))

    assert dealt == served
    assert dealt.num_readers == num_readers


@pytest.mark.parametrize("processes", [-1, 17])
def test_other_numbers_of_processes_are_refused(processes: int) -> None:
    with pytest.raises(ConfigError, match=f"processes: {processes} given; expected 0 to 16 for each worker"):
        parse_config({"consumers": [{"name": "telling"}], "processes": processes})
