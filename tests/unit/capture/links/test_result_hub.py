"""A request gets every answer that is meant for it, nobody else's, and no later than it is willing to wait."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from headgate.capture.links.hub import MAX_CLOSED_KEYS, Inboxes, ResultHub
from headgate.capture.links.messages import Result, encode
from headgate.capture.links.peer import numbering
from headgate.capture.links.sender import ResultSender
from headgate.capture.schema.batch import Begin, End
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.results import CaptureResult, CaptureResults
from tests.fakes.pipeline import TIMEOUT_S


def ok(payload: object = None, **counts: Any) -> CaptureResult:
    return CaptureResult(status="ok", payload=payload, **counts)


def keyed(results: dict[str, CaptureResult]) -> dict[str, CaptureResult]:
    """Results as a request finds them: each has its consumer's name."""
    return {name: replace(result, key=name) for name, result in results.items()}


def answer(
    hub: ResultHub,
    key: str,
    result: CaptureResult,
    *,
    sample: int = 0,
    instance: str = "files",
    stage: int = 0,
    num_stages: int = 1,
) -> bool:
    return hub.deliver(
        Result(key=key, sample_index=sample, instance=instance, stage=stage, num_stages=num_stages, result=result)
    )


def send(sender: ResultSender, hub: ResultHub, key: str, result: CaptureResult) -> None:
    sender.send_result(hub.address, Result(key=key, req_id="r", instance="files", result=result))


def raw_socket(address: str) -> zmq.Socket[bytes]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return socket


def test_a_payload_of_64_mib_arrives(hub: ResultHub, sender: ResultSender) -> None:
    payload = "0123456789abcdef" * (4 << 20)
    hub.expect("k", instances=["files"])

    send(sender, hub, "k", ok(payload))

    assert hub.wait("k", TIMEOUT_S).merged["files"].payload == payload


def test_what_is_not_answered_in_time_is_pending_and_the_rest_is_there(hub: ResultHub) -> None:
    hub.expect("k", instances=["files", "probe"], num_samples=2)
    answer(hub, "k", ok("a"), sample=1, instance="probe")

    results = hub.wait("k", 0.01)

    assert results.per_sample == [
        keyed({"files": CaptureResult(status="pending"), "probe": CaptureResult(status="pending")}),
        keyed({"files": CaptureResult(status="pending"), "probe": ok("a")}),
    ]
    assert results.merged["files"] == CaptureResult(status="pending", payload=[None, None], key="files")
    assert results.merged["probe"] == CaptureResult(status="pending", payload=[None, "a"], key="probe")


def test_a_wait_ends_with_the_last_answer(hub: ResultHub) -> None:
    hub.expect("k", instances=["files", "probe"])
    results = []
    waiting = threading.Thread(target=lambda: results.append(hub.wait("k", 2 * TIMEOUT_S)))
    waiting.start()

    answer(hub, "k", ok("a"))
    answer(hub, "k", ok("b"), instance="probe")
    waiting.join(TIMEOUT_S)

    assert [result.merged for result in results] == [keyed({"files": ok("a"), "probe": ok("b")})]


def test_stages_are_awaited_as_many_as_answer(hub: ResultHub) -> None:
    hub.expect("k", instances=["files", "probe"], num_stages=3)
    answer(hub, "k", ok("one"), stage=2, num_stages=3)
    answer(hub, "k", ok("two"), stage=0, num_stages=3)
    answer(hub, "k", ok("only"), instance="probe", stage=1, num_stages=1 + 1)
    answer(hub, "k", ok(), instance="probe", stage=0, num_stages=2)

    assert hub.wait("k", 0).merged["files"].status == "pending"
    answer(hub, "k", ok("three"), stage=1, num_stages=3)

    assert hub.wait("k", 0).merged == keyed({"files": ok(["two", "three", "one"]), "probe": ok("only")})


def test_a_consumer_that_answers_once_is_complete_with_any_stage(hub: ResultHub) -> None:
    hub.answers_once(["reward"])
    hub.expect("k", instances=["reward"], num_stages=3)

    assert answer(hub, "k", CaptureResult(status="error", error="lost"), instance="reward", stage=2, num_stages=3)

    assert hub.wait("k", 0).merged["reward"].error == "lost"
    assert not answer(hub, "k", ok(), instance="reward")


@pytest.mark.parametrize(
    "strange",
    [
        {"key": "wrong"},
        {"sample": 2},
        {"sample": -1},
        {"instance": "probe"},
        {"stage": 1, "num_stages": 1},
        {"stage": -1},
        {"stage": 0, "num_stages": 3},
        {"stage": 0, "num_stages": 0},
    ],
)
def test_an_answer_that_fits_no_question_is_ignored_and_counted(hub: ResultHub, strange: dict[str, object]) -> None:
    hub.expect("k", instances=["files"], num_samples=2, num_stages=2)

    taken = answer(hub, **{"key": "k", "result": ok("forged"), **strange})

    assert not taken
    assert hub.wait("k", 0).merged["files"].status == "pending"
    assert hub.stats().unknown == 1
    assert hub.stats().results == 0


def test_the_first_of_two_equal_answers_counts(hub: ResultHub) -> None:
    hub.expect("k", instances=["files"], num_stages=2)
    assert answer(hub, "k", ok("first"), num_stages=2)

    assert not answer(hub, "k", ok("second"), num_stages=2)
    assert answer(hub, "k", ok("other stage"), stage=1, num_stages=2)

    assert hub.wait("k", 0).merged["files"].payload == ["first", "other stage"]


def test_parts_go_out_by_position_once_and_none_of_tokens_that_the_client_lacks(
    hub: ResultHub, sender: ResultSender
) -> None:
    hub.expect("k", instances=["files"], num_samples=2)

    def part(payload: str, num_rows: int, sample: int = 0) -> Result:
        return Result(key="k", sample_index=sample, instance="files", result=ok(payload), num_rows=num_rows)

    for each in (part("late", 9), part("second", 7), part("first", 5), part("other sample", 5, sample=1)):
        hub.deliver_part(each)
    hub.deliver_part(replace(part("forged", 1), key="guess"))
    taken = [hub.take_parts("k", "files", 0, num_rows) for num_rows in (4, 8, 8)]

    assert taken == [[], ["first", "second"], []]
    assert hub.take_parts("k", "files", 1, 8) == ["other sample"]
    assert hub.take_parts("k", "others", 0, 8) == []
    sender.send_part(hub.address, part("sent", 8, sample=1))
    hub.expect("after it", instances=["files"])
    send(sender, hub, "after it", ok())
    assert hub.wait("after it", TIMEOUT_S).merged["files"].status == "ok"
    assert hub.take_parts("k", "files", 1, 8) == ["sent"]
    assert hub.wait("k", 0).merged["files"].status == "pending"
    assert (hub.stats().results, hub.stats().unknown) == (1, 0)
    answer(hub, "k", ok("whole"))
    hub.deliver_part(part("too late", 5))
    assert hub.take_parts("k", "files", 0, 9) == ["late"]
    assert hub.take_parts("k", "files", 0, 9) == []
    hub.close("k")
    assert hub.take_parts("k", "files", 0, 9) == []


def test_a_chunk_takes_parts_of_a_megabyte_or_one_that_is_larger(hub: ResultHub) -> None:
    hub.expect("k", instances=["files"])
    sizes = (300_000, 700_000, 2_000_000, 10, 10)
    for number, size in enumerate(sizes):
        payload = {"rows": ["x" * size], "number": number}
        hub.deliver_part(Result(key="k", instance="files", result=ok(payload), num_rows=number + 1))

    taken = [hub.take_parts("k", "files", 0, 9) for _ in range(4)]

    assert [[part["number"] for part in parts] for parts in taken] == [[0, 1], [2], [3, 4], []]


def test_answers_after_close_are_ignored_and_nothing_is_kept(hub: ResultHub, sender: ResultSender) -> None:
    hub.expect("late", instances=["files"])
    hub.expect("k", instances=["files"])
    hub.close("late")
    hub.close("late")

    send(sender, hub, "late", ok())
    send(sender, hub, "k", ok())
    hub.wait("k", TIMEOUT_S)
    hub.close("k")

    assert (hub.stats().unknown, hub.stats().results, hub.stats().waiting) == (1, 1, 0)
    with pytest.raises(KeyError, match=r"call expect\(\) first"):
        hub.wait("k", 0)


def test_close_ends_a_wait(hub: ResultHub) -> None:
    async def run() -> CaptureResults:
        wait = asyncio.create_task(hub.wait_async("k", 2 * TIMEOUT_S))
        await asyncio.sleep(0)
        hub.close("k")
        return await asyncio.wait_for(wait, TIMEOUT_S)

    hub.expect("k", instances=["files"])

    assert asyncio.run(run()).merged["files"].status == "pending"


def test_keys_are_known_while_rows_for_them_may_arrive_and_then_forgotten(hub: ResultHub) -> None:
    hub.expect("k", instances=["files"])
    assert hub.knows("k")
    assert not hub.knows("wrong")
    hub.close("k")
    assert hub.knows("k")

    for index in range(MAX_CLOSED_KEYS):
        hub.expect(str(index), instances=["files"])
        hub.close(str(index))

    assert not hub.knows("k")
    assert hub.knows("0")


def test_forged_and_malformed_messages_are_counted_and_the_hub_goes_on(hub: ResultHub, sender: ResultSender) -> None:
    hub.expect("k", instances=["files"])
    socket = raw_socket(hub.address)
    forged = Result(key="guess", instance="files", result=ok("forged"))
    wrong_status = encode(msgspec.structs.replace(forged, key="k"))
    malformed: list[list[bytes | memoryview]] = [
        [b""],
        [b"\xff" * 1000],
        [b"cos\nsystem\n(S'true'\ntR."],
        [wrong_status.replace(b"\xa2ok", b"\xa2no")],
        [encode(Begin("r", np.arange(3)))],
        [encode(End("r", None))],
        [b"\x91" * 100_000],
    ]

    socket.send_multipart([b"no number"])
    for number, frames in enumerate([*malformed, [encode(forged)]]):
        socket.send_multipart([numbering(b"a" * 8, number), *frames])
    acknowledgements = [socket.recv() for _ in range(len(malformed) + 1)]
    socket.close(linger=0)
    send(sender, hub, "k", ok("true"))

    assert hub.wait("k", TIMEOUT_S).merged["files"].payload == "true"
    assert len(acknowledgements) == len(malformed) + 1
    assert hub.stats().malformed == len(malformed) + 1
    assert hub.stats().unknown == 1


def test_many_waits_on_one_event_loop_end_each_with_its_own(hub: ResultHub, sender: ResultSender) -> None:
    async def run() -> list[object]:
        keys = [f"k{index}" for index in range(50)]
        for key in keys:
            hub.expect(key, instances=["files"])
        waits = [asyncio.create_task(hub.wait_async(key, TIMEOUT_S)) for key in keys]
        await asyncio.sleep(0)
        for key in reversed(keys):
            send(sender, hub, key, ok(key))
        return [(await wait).merged["files"].payload for wait in waits]

    assert asyncio.run(run()) == [f"k{index}" for index in range(50)]


def test_an_asynchronous_wait_ends_when_its_time_is_up_or_nothing_is_missing(hub: ResultHub) -> None:
    hub.expect("done", instances=["files"])
    answer(hub, "done", ok("a"))
    hub.expect("never", instances=["files"])

    done = asyncio.run(hub.wait_async("done", 2 * TIMEOUT_S))
    never = asyncio.run(hub.wait_async("never", 0.01))

    assert done.merged["files"].payload == "a"
    assert never.merged["files"].status == "pending"


def test_a_cancelled_wait_leaves_nothing_behind(hub: ResultHub) -> None:
    async def run() -> None:
        wait = asyncio.create_task(hub.wait_async("k", TIMEOUT_S))
        await asyncio.sleep(0)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait

    hub.expect("k", instances=["files"])
    asyncio.run(run())

    assert hub._table._requests["k"].callbacks == []
    assert answer(hub, "k", ok())


def test_an_answer_for_a_closed_event_loop_does_no_harm(hub: ResultHub) -> None:
    loop = asyncio.new_event_loop()
    hub.expect("k", instances=["files"])
    wait = loop.create_task(hub.wait_async("k", TIMEOUT_S))
    loop.run_until_complete(asyncio.sleep(0))
    wait.cancel()
    callbacks = list(hub._table._requests["k"].callbacks)
    loop.run_until_complete(asyncio.gather(wait, return_exceptions=True))
    loop.close()

    for callback in callbacks:
        callback()

    assert answer(hub, "k", ok())


def test_the_socket_is_private_made_on_first_use_and_removed_at_the_end(folder: Path) -> None:
    before = set(threading.enumerate())
    hub = ResultHub(folder=str(folder))
    assert os.listdir(folder) == []

    address = hub.address
    (own,) = folder.iterdir()
    assert address == hub.address == f"ipc://{own}/hub"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert stat.S_ISSOCK((own / "hub").stat().st_mode)

    assert hub.shutdown(TIMEOUT_S)
    assert os.listdir(folder) == []
    assert set(threading.enumerate()) == before
    assert hub.shutdown(TIMEOUT_S)


def test_a_hub_that_was_shut_down_stays_closed_and_nobody_waits_for_it(folder: Path) -> None:
    before, opened = set(threading.enumerate()), []
    hub = ResultHub(folder=str(folder))
    hub.on_open(lambda doors: opened.append(doors.address) or (lambda timeout_s: True))
    hub.expect("k", instances=["files"])
    address = hub.address
    waiting = threading.Thread(target=hub.wait, args=("k", TIMEOUT_S))
    waiting.start()
    assert hub.shutdown(TIMEOUT_S)
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()

    started = time.monotonic()
    hub.expect("late", instances=["files"])
    assert hub.wait("late", TIMEOUT_S).merged == keyed({"files": CaptureResult(status="pending")})
    assert asyncio.run(hub.wait_async("k", TIMEOUT_S)).merged == keyed({"files": CaptureResult(status="pending")})
    assert time.monotonic() - started < TIMEOUT_S
    with pytest.raises(UnsupportedError, match="was shut down"):
        print(hub.address)
    assert opened == [address]
    assert os.listdir(folder) == []
    assert set(threading.enumerate()) == before


def test_what_opens_with_the_hub_closes_with_it_and_a_failure_leaves_nothing(folder: Path) -> None:
    hub = ResultHub(folder=str(folder))
    events: list[object] = []
    fails = [True]

    def open_one(doors: Inboxes) -> object:
        events.append(doors.address.startswith("ipc://"))
        return lambda timeout_s: events.append("closed") is None

    def open_two(doors: Inboxes) -> object:
        if fails.pop():
            raise RuntimeError("no")
        return lambda timeout_s: False

    hub.on_open(open_one)
    hub.on_open(open_two)
    with pytest.raises(RuntimeError, match="no"):
        print(hub.address)
    assert events == [True, "closed"]
    assert os.listdir(folder) == []

    fails.append(False)
    assert hub.address
    assert not hub.shutdown(TIMEOUT_S)
    assert events == [True, "closed", True, "closed"]


def test_waiting_for_results_under_load_takes_little(hub: ResultHub, sender: ResultSender) -> None:
    started = time.monotonic()
    for index in range(1000):
        key = f"k{index}"
        hub.expect(key, instances=["files"])
        send(sender, hub, key, ok())
        assert hub.wait(key, TIMEOUT_S).merged["files"].status == "ok"
        hub.close(key)

    assert time.monotonic() - started < TIMEOUT_S
    assert hub.stats().waiting == 0
