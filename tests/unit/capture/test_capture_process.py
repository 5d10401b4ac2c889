"""A real capture process: rows arrive, it dies alone, it ends with its worker, and its errors are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch

from headgate.capture.capture_process import deal_out
from headgate.capture.links.actions import ActionInbox
from headgate.capture.links.hub import ResultHub
from headgate.capture.links.shared_memory import SharedStaging
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import NOWHERE, ActionTarget
from headgate.capture.schema.errors import ConfigError
from headgate.capture.session import CaptureSession, open_session
from headgate.capture.staging.ring import StagingRing
from tests.fakes.capture_world import World, want
from tests.fakes.forks import ADDRESS
from tests.fakes.pipeline import HIDDEN, MODEL, ROW_BYTES, SITES, TIMEOUT_S, final_state, row_values
from tests.fakes.published import install_plugin

CONSUMERS = """
import os
import threading
from dataclasses import dataclass
from headgate.capture.schema.consumer import BatchedConsumer

@dataclass
class Told:
    request: str
    notes: list

class Telling(BatchedConsumer):
    def __init__(self, params, context):
        super().__init__(params, context)
        if params.get("fail"):
            raise OSError("no disk")

    @classmethod
    def check_params(cls, params): ...

    def close(self, timeout_s):
        for number in range(self.params.get("last_actions", 0)):
            self.context.steering.submit(Told(f"last {number}", ["x" * 10_000]))

    def on_capture(self, captured):
        if captured.request.client_request_id == "client-acting":
            self.context.steering.submit(Told(captured.request.request_id, list(captured.final.notes["steering"])))
        if captured.request.client_request_id == "client-deadly":
            os.kill(os.getpid(), 11)
            threading.Event().wait()  # the signal may end the process from another thread
        sums = [float(rows.double().sum()) for rows in captured.rows.values()]
        return {"pid": os.getpid(), "sums": sums}

class Far(Telling):
    location = "driver"
"""
NUM_ROWS = 1000


@pytest.fixture(autouse=True)
def consumers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(ADDRESS, raising=False)  # processes begin as they do for users
    monkeypatch.syspath_prepend(str(tmp_path))
    install_plugin(tmp_path, "acme", CONSUMERS, {"telling": "Telling", "far": "Far"})
    yield
    sys.modules.pop("consumers_of_acme", None)


def open_one(actions: ActionTarget = NOWHERE, **params: object) -> tuple[CaptureSession, StagingRing]:
    consumer = CaptureConsumerSpec(name="telling", params=dict(params))
    return open_configured(CaptureConsumersConfig(consumers=(consumer,), linger_s=0), actions)


def open_configured(
    config: CaptureConsumersConfig, actions: ActionTarget = NOWHERE
) -> tuple[CaptureSession, StagingRing]:
    device = torch.device("cpu")
    memory = SharedStaging(NUM_ROWS, HIDDEN, torch.float32, device, deal_out(config).num_readers)
    staging = StagingRing(
        sites=SITES,
        num_rows=64,
        max_tokens=64,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=device,
        staging_bytes=NUM_ROWS * ROW_BYTES,
        memory=memory,
    )
    session = open_session(config=config, model=MODEL, sites=SITES, staging=staging, actions=actions)
    return session, staging


@contextmanager
def opened(folder: Path, actions: ActionTarget = NOWHERE) -> Iterator[tuple[World, ResultHub]]:
    """A worker with a capture process, and the front end that waits for its results."""
    hub = ResultHub(folder=str(folder))
    session, staging = open_one(actions)
    try:
        yield World(session, staging, sender=None), hub  # type: ignore[arg-type]
    finally:
        session.close(TIMEOUT_S)
        hub.shutdown(TIMEOUT_S)


def capture(it: World, hub: ResultHub, req_id: str, number: int = 1) -> None:
    """A request of five tokens, to its end."""
    hub.expect(f"key-{req_id}", instances=["telling"])
    it.add(req_id, {"telling": want()}, number=number, reply=hub.address)
    if req_id not in it.session._keys:
        return
    it.step(**{req_id: (0, 4)})
    it.session.request_finished(req_id, final_state(num_tokens=5))


def result_of(hub: ResultHub, req_id: str):
    return hub.wait(f"key-{req_id}", TIMEOUT_S).merged["telling"]


def process_of(it: World) -> psutil.Process:
    return psutil.Process(it.session._delivery._process.child.pid)


def test_rows_and_results_pass_through_a_process_beside_the_worker(tmp_path: Path) -> None:
    with opened(tmp_path) as (it, hub):
        for number in (1, 2):
            capture(it, hub, f"request-{number}", number)
        first, second = (result_of(hub, f"request-{number}") for number in (1, 2))
        child = process_of(it)
        stats = it.session.stats()

        report = it.session.close(TIMEOUT_S)

    assert first.status == "ok", first.error
    assert first.payload["pid"] == second.payload["pid"] == child.pid != os.getpid()
    expected = [[float(rows.double().sum()) for rows in site_rows(number)] for number in (1, 2)]
    assert [first.payload["sums"], second.payload["sums"]] == expected
    assert (stats.consumers[0].rows, stats.consumers[0].requests, stats.restarts) == (8, 2, 0)
    assert report.is_clean
    assert not child.is_running()
    assert stats.staged_bytes == 0


def site_rows(number: int) -> list[torch.Tensor]:
    return [row_values(number, np.arange(4), index) for index in range(len(SITES))]


def test_a_process_that_crashes_fails_its_requests_alone_and_is_started_again(tmp_path: Path) -> None:
    with opened(tmp_path) as (it, hub):
        hub.expect("key-running", instances=["telling"])
        it.add("running", {"telling": want()}, reply=hub.address)
        it.step(running=(0, 2))
        first = process_of(it).pid

        capture(it, hub, "deadly")
        deadly, running = result_of(hub, "deadly"), result_of(hub, "running")
        for attempt in range(100):
            it.step(running=(2, 3))  # nothing is captured of it any more
            capture(it, hub, f"after-{attempt}", number=3)
            after = result_of(hub, f"after-{attempt}")
            if after.status == "ok":
                break
            assert "is being started again" in after.error or "was ended by SIGSEGV" in after.error
            it.session._delivery._serving.wait(TIMEOUT_S)
        stats = it.session.stats()

        assert process_of(it).pid != first

    assert (deadly.status, running.status) == ("error", "error")
    assert deadly.error == running.error
    assert "telling: the capture process was ended by SIGSEGV: what it had of the request is lost" in deadly.error
    assert after.status == "ok", after.error
    assert (stats.restarts, stats.staged_bytes) == (1, 0)
    assert stats.consumers[0].errors >= 2
    assert stats.consumers[0].requests == stats.consumers[0].errors + 1


def test_a_stopped_process_does_not_hold_up_the_step_thread(tmp_path: Path) -> None:
    with opened(tmp_path) as (it, hub):
        child = process_of(it)
        child.suspend()
        began = time.monotonic()
        for number in range(40):  # several times what the socket takes
            hub.expect(f"key-{number}", instances=["telling"])
            it.add(f"{number}", {"telling": want()}, num_prompt=20_000, reply=hub.address)
            it.session.request_finished(f"{number}", None)
        took_s = time.monotonic() - began
        child.resume()
        capture(it, hub, "last")

        assert result_of(hub, "last").status == "ok"

    assert took_s < TIMEOUT_S / 2


def test_requests_that_begin_are_told_with_their_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as (it, hub):
        connection, sent = it.session._delivery._process._connection, []
        send = connection.send
        monkeypatch.setattr(connection, "send", lambda *messages: sent.append(len(messages)) or send(*messages))
        names = [f"request{number}" for number in range(3)]
        for name in names:
            hub.expect(f"key-{name}", instances=["telling"])
            it.add(name, {"telling": want()}, reply=hub.address)
        before = list(sent)
        it.step(**dict.fromkeys(names, (0, 4)))
        rows = list(sent)
        for name in names:
            it.session.request_finished(name, final_state(num_tokens=5))

        assert [result_of(hub, name).status for name in names] == ["ok"] * 3

    assert (before, rows) == ([], [4])


@pytest.mark.extended
def test_a_process_that_dies_with_requests_unsent_fails_them(tmp_path: Path) -> None:
    with opened(tmp_path) as (it, hub):
        hub.expect("key-unsent", instances=["telling"])
        it.add("unsent", {"telling": want()}, reply=hub.address)
        process_of(it).kill()

        result = result_of(hub, "unsent")

        assert it.session._delivery._serving.wait(TIMEOUT_S)
        capture(it, hub, "next", number=2)
        assert result_of(hub, "next").status == "ok"

    assert result.status == "error"
    assert "was ended by SIGKILL" in result.error


def test_counters_are_read_without_waiting_for_the_process(tmp_path: Path) -> None:
    with opened(tmp_path) as (it, hub):
        capture(it, hub, "first")
        assert result_of(hub, "first").status == "ok"
        child = process_of(it)
        child.suspend()
        began = time.monotonic()
        for _ in range(100):
            stats = it.session.stats()
        took_s = time.monotonic() - began
        child.resume()

    assert (stats.consumers[0].rows, stats.consumers[0].requests) == (4, 1)
    assert took_s < TIMEOUT_S / 10


def test_what_parts_note_reaches_consumers_and_their_actions_the_engine_core(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/headgate-core/socket"
    inbox = ActionInbox(address)
    try:
        with opened(tmp_path, ActionTarget(address=address)) as (it, hub):
            hub.expect("key-acting", instances=["telling"])
            it.add("acting", {"telling": want()}, reply=hub.address)
            it.step(acting=(0, 4))
            notes = {"steering": {"positions": [0, 1], "strength": [0.5, None]}}
            it.session.request_finished("acting", replace(final_state(num_tokens=5), notes=notes))
            assert result_of(hub, "acting").status == "ok"
            it.session.close(TIMEOUT_S)

        assert inbox.wait(TIMEOUT_S)
        (submitted,) = inbox.take()
    finally:
        inbox.close()

    assert submitted.consumer == "telling"
    assert msgspec.msgpack.decode(submitted.action) == [
        "Told",
        {"request": "acting", "notes": ["positions", "strength"]},
    ]


def test_actions_that_a_consumer_submits_as_it_closes_arrive(tmp_path: Path) -> None:
    inbox = ActionInbox(f"ipc://{tmp_path}/headgate-core/socket")
    try:
        session, _ = open_one(ActionTarget(address=f"ipc://{tmp_path}/headgate-core/socket"), last_actions=300)
        session.close(TIMEOUT_S)

        found = inbox.take()
    finally:
        inbox.close()

    assert [msgspec.msgpack.decode(each.action)[1]["request"] for each in found] == [f"last {n}" for n in range(300)]


def test_a_consumer_that_cannot_be_opened_refuses_the_start() -> None:
    with pytest.raises(ConfigError, match=r"consumer 'telling' cannot be opened: no disk"):
        open_one(fail=True)


WORKER = """
import sys
from tests.unit.capture import test_capture_process as tests
session, staging = tests.open_one()
print(session._delivery._process.child.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_a_worker_that_is_killed() -> None:
    command = [sys.executable, "-c", WORKER]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout is not None
        child = psutil.Process(int(worker.stdout.readline()))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        gone, alive = psutil.wait_procs([child], timeout=TIMEOUT_S)
        assert (gone, alive) == ([child], [])
