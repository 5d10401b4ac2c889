"""Consumers in the front end come and go with it, whatever is under way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headgate.capture.links.driver import DriverHost
from headgate.capture.links.hub import ResultHub
from headgate.capture.links.sender import ResultSender
from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.errors import ConfigError
from tests.fakes.driver_consumers import FLOW, WHOLE, Worker, config, expect, flow, hosting, result, whole
from tests.fakes.pipeline import MODEL, TIMEOUT_S, Gate, at_gate

pytestmark = pytest.mark.usefixtures("driver_consumers")

KILLED = """
import os, signal, sys
from tests.fakes.driver_consumers import Worker
from headgate.capture.links.sender import ResultSender
class Hub:
    address = sys.argv[1]
sender = ResultSender()
worker = Worker(Hub(), sender, "whole")
request = worker.request()
worker.begin(request)
worker.write((request, [0, 1]))
for channel in sender._rows.values():
    assert channel.close(30) == 0
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_takes_only_its_own_requests_with_it(folder: Path, sender: ResultSender) -> None:
    with hosting(folder, WHOLE) as (hub, host):
        expect(hub, "whole", "request-1", "request-2")
        done = subprocess.run([sys.executable, "-c", KILLED, hub.address], timeout=4 * TIMEOUT_S)
        worker = Worker(hub, sender, "whole")
        request = worker.request("request-2")

        worker.begin(request)
        worker.write((request, [0, 1, 2, 3]))
        worker.finish(request)

        assert done.returncode == -9
        assert result(hub, "whole", "request-2").status == "ok"
        assert result(hub, "whole", "request-1", timeout_s=0).status == "pending"
        assert len(whole(host).captured) == 1
        hub.shutdown(TIMEOUT_S)
        assert "shut down before the request had ended" in str(result(hub, "whole", "request-1").error)


def test_shutdown_delivers_what_has_arrived_and_leaves_nothing_behind(folder: Path, sender: ResultSender) -> None:
    before, gate = set(threading.enumerate()), Gate()
    hub = ResultHub(folder=str(folder))
    host = DriverHost(config(FLOW), model=MODEL, hub=hub)
    worker = Worker(hub, sender, "flow")
    consumer = flow(host)
    consumer.behave = at_gate(gate, "begin")
    request = worker.request()
    expect(hub, "flow")
    worker.begin(request)
    worker.write((request, [0, 1, 2, 3]))
    worker.finish(request)
    assert sender.close(TIMEOUT_S) == 0
    assert len(os.listdir(next(folder.iterdir()))) == 2

    gate.opened.set()
    assert hub.shutdown(TIMEOUT_S)

    assert result(hub, "flow").status == "ok"
    assert consumer.names() == ["begin", "write", "finish", "close"]
    assert os.listdir(folder) == []
    assert set(threading.enumerate()) == before


def test_shutdown_does_not_wait_for_a_consumer_longer_than_allowed(folder: Path, sender: ResultSender) -> None:
    gate = Gate()
    hub = ResultHub(folder=str(folder))
    host = DriverHost(config(CaptureConsumerSpec(name="flow", queue_bytes=1)), model=MODEL, hub=hub)
    worker = Worker(hub, sender, "flow")
    flow(host).behave = at_gate(gate, "write")
    request = worker.request()
    expect(hub, "flow")
    worker.begin(request)
    for position in range(3):
        worker.write((request, [position]))
    gate.wait_reached()

    ended = hub.shutdown(0.1)
    gate.opened.set()

    assert not ended
    assert "shut down" in str(result(hub, "flow").error)
    assert os.listdir(folder) == []


def test_consumers_of_the_worker_are_left_to_the_worker(folder: Path) -> None:
    with hosting(folder, CaptureConsumerSpec(name="elsewhere"), WHOLE) as (_, host):
        assert host.instances == ("whole",)
        assert list(host.consumers) == ["whole"]


def test_without_driver_located_consumers_nothing_is_opened(folder: Path) -> None:
    with hosting(folder, CaptureConsumerSpec(name="elsewhere")) as (_, host):
        assert host.consumers == {}
        assert host.stats().consumers == ()
        assert len(os.listdir(next(folder.iterdir()))) == 1


def test_a_consumer_that_cannot_be_opened_says_so_and_leaves_nothing(folder: Path) -> None:
    before = set(threading.enumerate())
    hub = ResultHub(folder=str(folder))
    DriverHost(config(FLOW, CaptureConsumerSpec(name="unopenable")), model=MODEL, hub=hub)

    with pytest.raises(ConfigError, match="'unopenable' cannot be opened: broken on purpose"):
        print(hub.address)

    assert os.listdir(folder) == []
    assert set(threading.enumerate()) == before


FORKS = """
import os, sys
sys.path.insert(0, sys.argv[2])
from headgate.capture.links.hub import ResultHub
from headgate.capture.links.driver import open_drivers
from headgate.capture.links.sender import ResultSender
from tests.fakes.driver_consumers import WHOLE, Worker, config, expect, result, whole
from tests.fakes.pipeline import MODEL

def use(hub, host, req_id):
    sender = ResultSender()
    worker = Worker(hub, sender, "whole")
    request = worker.request(req_id)
    expect(hub, "whole", req_id)
    worker.begin(request)
    worker.write((request, [0, 1, 2, 3]))
    worker.finish(request)
    assert result(hub, "whole", req_id).payload is whole(host).captured[-1]
    assert sender.close(30) == 0

hub = ResultHub(folder=sys.argv[1])
host = open_drivers(hub, config=config(WHOLE), model=MODEL)
use(hub, host, "request-1")
child = os.fork()
if child == 0:
    use(hub, host, "request-2")
    assert len(whole(host).captured) == 1
    assert hub.shutdown(30)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
use(hub, host, "request-3")
assert len(whole(host).captured) == 2
assert hub.shutdown(30)
assert os.listdir(sys.argv[1]) == []
print("done")
"""


def test_a_forked_child_has_consumers_of_its_own(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(folder), str(tmp_path / "plugins")],
        capture_output=True,
        text=True,
        timeout=4 * TIMEOUT_S,
    )

    assert done.stderr == ""
    assert done.stdout == "done\n"
