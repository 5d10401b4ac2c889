"""A hub and the processes around it: workers that answer or die, children that are forked, and its own end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from headgate.capture.links.hub import ResultHub
from headgate.capture.links.messages import Result
from headgate.capture.links.sender import ResultSender
from headgate.capture.schema.results import CaptureResult
from tests.deadlines import patience
from tests.unit.capture.links.test_result_hub import keyed, ok, send

TIMEOUT_S = patience(120.0)
"""A process may take long to start on a busy machine."""

WORKER = """
import sys
from headgate.capture.schema.results import CaptureResult
from headgate.capture.links.messages import Result
from headgate.capture.links.sender import ResultSender
sender = ResultSender()
for line in sys.stdin:
    key, sample, payload = line.split()
    result = CaptureResult(status="ok", payload=payload * 2, num_rows=3)
    sender.send_result(sys.argv[1], Result(key=key, sample_index=int(sample), instance="files", result=result))
print(sender.close(30), flush=True)
"""


def test_a_worker_process_answers(hub: ResultHub) -> None:
    hub.expect("k1", instances=["files"], num_samples=2)
    hub.expect("k2", instances=["files"])
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, hub.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    printed, _ = worker.communicate("k1 1 b\nk2 0 c\nk1 0 a\n", timeout=TIMEOUT_S)

    first, second = hub.wait("k1", TIMEOUT_S), hub.wait("k2", TIMEOUT_S)

    assert printed == "0\n"
    assert [sample["files"] for sample in first.per_sample] == [
        ok("aa", num_rows=3, key="files"),
        ok("bb", num_rows=3, key="files"),
    ]
    assert first.merged == keyed({"files": ok(["aa", "bb"], num_rows=6)})
    assert second.merged == keyed({"files": ok("cc", num_rows=3)})
    assert hub.stats().results == 3


def test_a_killed_worker_leaves_its_requests_pending_and_the_hub_working(hub: ResultHub, sender: ResultSender) -> None:
    hub.expect("k1", instances=["files"])
    hub.expect("k2", instances=["files"])
    worker = subprocess.Popen([sys.executable, "-c", WORKER, hub.address], stdin=subprocess.PIPE, text=True)
    assert worker.stdin is not None
    worker.stdin.write("k1 0 a\n")
    worker.stdin.flush()
    assert hub.wait("k1", TIMEOUT_S).merged["files"].payload == "aa"

    worker.send_signal(signal.SIGKILL)
    worker.communicate(timeout=TIMEOUT_S)

    assert hub.wait("k2", 0).merged == keyed({"files": CaptureResult(status="pending")})
    send(sender, hub, "k2", ok("from another"))
    assert hub.wait("k2", TIMEOUT_S).merged["files"].payload == "from another"


EXITS = """
import sys
from headgate.capture.links.hub import ResultHub
hub = ResultHub(folder=sys.argv[1])
print(hub.address, flush=True)
sys.exit(3)
"""


def test_a_process_that_ends_without_shutdown_removes_its_socket_and_exits_as_it_wants(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXITS, str(folder)], capture_output=True, text=True, timeout=TIMEOUT_S
    )

    assert done.stdout.startswith("ipc://")
    assert done.stderr == ""
    assert done.returncode == 3
    assert os.listdir(folder) == []


FORKS = """
import os, sys, threading
from headgate.capture.links.hub import ResultHub
from headgate.capture.schema.results import CaptureResult
from headgate.capture.links.messages import Result
from headgate.capture.links.sender import ResultSender

def use(hub, key):
    sender = ResultSender()
    hub.expect(key, instances=["files"])
    sender.send_result(hub.address, Result(key=key, instance="files", result=CaptureResult(status="ok", payload=key)))
    assert hub.wait(key, 30).merged["files"].payload == key
    assert sender.close(30) == 0

hub = ResultHub(folder=sys.argv[1])
use(hub, "before")
hub.expect("of the parent", instances=["files"])
address = hub.address
with hub._table._lock, hub._listener._lock:  # as another thread might hold them
    child = os.fork()
if child == 0:
    assert hub.stats().waiting == 0
    use(hub, "in the child")
    assert hub.address != address
    assert hub.shutdown(30)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert hub.address == address
assert len(os.listdir(sys.argv[1])) == 1
use(hub, "after")
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
use(hub, "after a child that ended by itself")
assert hub.stats().waiting == 4
assert hub.shutdown(30)
assert os.listdir(sys.argv[1]) == []
print("done")
"""


def test_a_forked_child_has_a_hub_of_its_own_and_leaves_the_parents_alone(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKS, str(folder)], capture_output=True, text=True, timeout=TIMEOUT_S)

    assert done.stderr == ""
    assert done.stdout == "done\n"


WAITS = """
import sys
from headgate.capture.links.hub import ResultHub
hub = ResultHub(folder=sys.argv[1])
for index in range(100):
    hub.expect(f"k{index}", instances=["files"])
print(hub.address, flush=True)
sys.stdin.readline()
print(*(hub.wait(f"k{index}", 0).merged["files"].status for index in range(100)))
"""


def test_a_stopped_front_end_holds_nobody_up_and_gets_what_was_kept_for_it(hub: ResultHub, folder: Path) -> None:
    sender = ResultSender(window_bytes=100_000)
    command = [sys.executable, "-c", WAITS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stopped:
        assert stopped.stdout is not None
        address = stopped.stdout.readline().strip()
        send_to(sender, address, "k0")
        stopped.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])

        for index in range(100):
            hub.expect(f"k{index}", instances=["files"])
            send_to(sender, address, f"k{index}")
            send_to(sender, hub.address, f"k{index}")
            assert hub.wait(f"k{index}", TIMEOUT_S).merged["files"].status == "ok"
        lost = sender.stats().lost_results
        stopped.send_signal(signal.SIGCONT)
        assert sender.close(TIMEOUT_S) == 0
        printed, _ = stopped.communicate("now\n", timeout=TIMEOUT_S)

    statuses = printed.split()
    assert 0 < lost < 100
    assert statuses.count("ok") + statuses.count("pending") == 100
    assert statuses.count("ok") in (100 - lost, 101 - lost)  # k0 was sent twice


def send_to(sender: ResultSender, address: str, key: str) -> None:
    result = CaptureResult(status="ok", payload=10_000 * "x")
    sender.send_result(address, Result(key=key, req_id="r", instance="files", result=result))
